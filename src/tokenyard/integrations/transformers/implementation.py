"""transformers' own expert parallelism, with rows moved by tokenyard: one word of its config.

    import tokenyard.integrations.transformers

    AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=4, ep_size=4, ep_implementation="tokenyard"))

transformers shards, loads and saves the experts by its own plans, and calls a TokenyardEP in the
place of each experts module's forward. Ranks of a TP group have the same batch: each sends a slice
of it, so that no token is computed twice, and the sums of the slices are joined.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from tokenyard.compat.buffer import Buffer
from tokenyard.integrations.transformers.everyone import everyone_of, join_slices, slice_of_rank
from tokenyard.integrations.transformers.experts import FLOATS, NAME, Experts, through_experts
from tokenyard.nn import functional
from tokenyard.replicas import Replicas

# Ways to compute the same products, for which ours stand in; others may have weights of their own.
_PRODUCTS = (None, "eager", "grouped_mm", "batched_mm")

# By the id of a mesh, while that lives. Only layers hold a Buffer: caches of torch hold meshes.
_buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


class TokenyardEP(EPImplementation):
    """One for each experts module; all of a model share a Buffer for each mesh."""

    def __init__(self, experts: Experts, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.num_experts = self.num_local_experts * ep_mesh.size()
        self.buffer = _buffer_of(ep_mesh)
        self.place = Replicas.even(self.num_experts, ep_mesh.size()).mark  # as transformers shards
        self.same_batch = None
        if tp_mesh.size() > 1:
            buffer = self.buffer if self.shares_batch else _buffer_of(tp_mesh)
            self.same_batch = everyone_of(buffer)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D]: the weighted sum of what each token's experts say, wherever they are."""
        x, topk_idx, weights = hidden_states.contiguous(), top_k_index, top_k_weights.float()
        if self.same_batch is not None:
            x, topk_idx, weights = (
                slice_of_rank(self.same_batch, one) for one in (x, topk_idx, weights)
            )

        def experts(x: Tensor, offsets: Tensor) -> Tensor:
            return self._through_experts(x, offsets).to(x.dtype)

        given = self.buffer, x, topk_idx, weights, self.num_experts
        sums = functional.through_experts(*given, experts, place=self.place)
        if self.same_batch is None:
            return sums
        return join_slices(self.same_batch, sums, len(hidden_states))

    def _through_experts(self, x: Tensor, offsets: Tensor) -> Tensor:
        """x [M, D] by expert: our products where the module is plain, or its own forward."""
        if _is_plain(self.experts):
            return through_experts(self.experts, x, offsets)
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        experts = torch.arange(len(counts), device=counts.device)
        ids = experts.repeat_interleave(counts, output_size=len(x))[:, None]
        if len(x) == 0:  # FSDP and the other ranks wait for the backward pass of this one too
            some = x.sum(0, keepdim=True)
            return self.experts_forward(some, ids.new_zeros(1, 1), some.new_ones(1, 1))[:0]
        return self.experts_forward(x, ids, x.new_ones(len(x), 1))


def _is_plain(experts: Experts) -> bool:
    """Whether transformers may run it by any function of its registry."""
    if not hasattr(experts, "has_gate"):
        return False
    weights = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return experts.config._experts_implementation in _PRODUCTS and weights.dtype in FLOATS


def _buffer_of(mesh: Any) -> Buffer:
    """transformers makes meshes for each model; those of two models may be equal."""
    buffer = _buffers.get(id(mesh))
    if buffer is None:
        buffer = _buffers[id(mesh)] = Buffer(mesh.get_group())
        weakref.finalize(mesh, _buffers.pop, id(mesh), None).atexit = False
    return buffer


EPImplementationInterface.register(NAME, TokenyardEP)
