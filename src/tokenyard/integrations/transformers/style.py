"""A parallel style of transformers: its own expert parallelism, with rows moved by tokenyard.

    replace_dispatch()
    AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=4, ep_size=4))

transformers 5.22 uses an ep_plan only for the style named "ep_dispatch_experts", whatever else is
registered. So this style has a name of its own, and `replace_dispatch` registers it under that one
too.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any

from torch import Tensor
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from tokenyard.buffer import Buffer
from tokenyard.integrations.transformers.experts import Experts, Plan, experts_forward
from tokenyard.replicas import as_replicas
from tokenyard.topology import Placement

STYLE = "tokenyard_experts"


class TokenyardExperts(EpDispatchExpertsParallel):
    """As its parent, on the same meshes and DTensors; one Buffer for all modules of a group."""

    def __init__(self, **buffer_options: Any) -> None:
        self.buffer_options = buffer_options
        self._buffers: weakref.WeakKeyDictionary[Any, Buffer] = weakref.WeakKeyDictionary()

    def install_forward(self, module: Experts, ep_mesh: Any, *, tp_mesh: Any = None) -> Experts:
        """Let the module's forward pass send rows by a Buffer; transformers calls this."""
        group = ep_mesh.get_group()
        if group not in self._buffers:
            self._buffers[group] = Buffer(group, **self.buffer_options)
        num_ranks = ep_mesh.size()
        num_experts = module.num_experts * num_ranks  # it counts this rank's by now
        even = as_replicas(Placement.even(num_experts, num_ranks))
        module.tokenyard = Plan.make(self._buffers[group], even)

        def forward(
            module: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            given = hidden_states, top_k_index, top_k_weights
            given, _ = self.transform_inputs_pre_forward(
                module, given, {}, ep_mesh, tp_mesh=tp_mesh
            )
            with self.context_around_forward(module, ep_mesh):
                out = experts_forward(module, *given)
            return self.transform_output_post_forward(
                module, out, ep_mesh, tp_mesh=tp_mesh, num_tokens=len(hidden_states)
            )

        module.forward = MethodType(forward, module)  # of a copy of the module, it is the copy's
        return module


def replace_dispatch(**buffer_options: Any) -> None:
    """From now on "ep_dispatch_experts", the default of many models, means tokenyard here."""
    ALL_PARALLEL_STYLES.register("ep_dispatch_experts", TokenyardExperts(**buffer_options))


ALL_PARALLEL_STYLES.register(STYLE, TokenyardExperts())
