"""The functions of vLLM that are replaced. Only this file and plugin.py change anything in vLLM.

all2all_utils.make_..._naive_dp_ep   builds what surrounds an experts kernel where tokens travel
all2all_utils.make_..._no_dp_ep      ... and where ranks have the same tokens (tensor parallel)
MoERunner._select_forward            on CPUs vLLM lets the compiler look into the layer; it must
                                     not see an exchange, so the layer is an operator, as it is
                                     on GPUs
CPUUnquantizedExperts                with a balance
  .process_weights_after_loading     ranks of a node share what is packed there,
  .apply                             and compute with the node's experts
dp_utils._run_ar                     data parallel ranks meet there at every step, and a death
                                     shows there first; gloo does not say whose
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.worker import dp_utils

from tokenyard.integrations.vllm import balance
from tokenyard.integrations.vllm.prepare_finalize import (
    ExchangingPrepareAndFinalize,
    LocalPrepareAndFinalize,
)


def install() -> None:
    """Replace vLLM's functions in this process, once."""
    if hasattr(MoERunner._select_forward, "tokenyard"):
        return
    _ask_for_amx()
    naive = all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep
    local = all2all_utils.make_moe_prepare_and_finalize_no_dp_ep
    synchronise = dp_utils._run_ar
    pack = CPUUnquantizedExperts.process_weights_after_loading
    compute = CPUUnquantizedExperts.apply

    def make_naive(
        use_monolithic: bool, is_sequence_parallel: bool = False, num_dispatchers: int = 1
    ) -> Any:
        if use_monolithic:  # the kernel routes by itself, from logits that all ranks get
            balance.refuse("a kernel that routes by itself gets the tokens of all ranks")
            return naive(use_monolithic, is_sequence_parallel, num_dispatchers)
        return ExchangingPrepareAndFinalize(_manager().exchange(is_sequence_parallel))

    def make_local(use_monolithic: bool) -> Any:
        balance.refuse("tensor parallel ranks have the same tokens, and nothing travels")
        return local(use_monolithic) if use_monolithic else LocalPrepareAndFinalize()

    def select_forward(runner: Any) -> Any:
        operators = torch.ops.vllm
        shared = runner._shared_experts is not None
        return operators.moe_forward_shared if shared else operators.moe_forward

    def pack_and_share(experts: Any, layer: Any) -> None:
        pack(experts, layer)
        if hasattr(experts, "around"):
            experts.around.share(experts, layer)

    def compute_by_node(experts: Any, **given: Any) -> None:
        around = getattr(experts, "around", None)
        compute(experts, **(given if around is None else given | around.node_weights))

    def synchronise_or_say_who_died(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return synchronise(*args, **kwargs)
        except RuntimeError as error:
            raise _manager().explain("synchronisation of ranks", error) from error

    select_forward.tokenyard = True  # type: ignore[attr-defined]
    all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep = make_naive
    all2all_utils.make_moe_prepare_and_finalize_no_dp_ep = make_local
    MoERunner._select_forward = select_forward
    CPUUnquantizedExperts.process_weights_after_loading = pack_and_share
    CPUUnquantizedExperts.apply = compute_by_node
    dp_utils._run_ar = synchronise_or_say_who_died


def _manager() -> Any:
    return get_ep_group().device_communicator.all2all_manager


def _ask_for_amx() -> None:
    """vLLM's experts kernel uses AMX, which Linux grants a process only once it has asked."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
