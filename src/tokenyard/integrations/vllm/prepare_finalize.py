"""What surrounds an experts kernel of vLLM: rows go in, and what experts made of them comes out.

vLLM's CPU kernels want local ids, one for each of a row's slots, and have no word for a slot whose
expert is elsewhere. So each (row, local expert) becomes a row of its own with top-k 1, grouped by
expert, and none is computed that nobody asked for. Weights are applied where the rows of a token
are summed again, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.ops.permute import permute, unpermute
from tokenyard.types import Handle, Permuted


@dataclass(frozen=True, kw_only=True, eq=False)
class _Way:
    """What finalize needs to know of prepare."""

    row_of: Tensor  # [N, K], of Permuted
    weights: Tensor | None  # [N, K], None where they were applied to the input
    handle: Handle | None  # None where no row has travelled


class _OneExpertARow(mk.FusedMoEPrepareAndFinalizeModular):
    """The part that needs no other rank."""

    _way: _Way | None = None

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def output_is_reduced(self) -> bool:
        return False  # over tensor parallel ranks

    def _take_way(self) -> _Way:
        way, self._way = self._way, None
        if way is None:
            raise ValueError("finalize without a prepare before it")
        return way


class ExchangingPrepareAndFinalize(_OneExpertARow):
    """Ranks have tokens of their own, which travel to the experts' ranks and back."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def num_dispatchers(self) -> int:
        return self._exchange.buffer.group_size

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        exchange = self._exchange
        num_local = exchange.num_local_experts(num_experts)
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        x, scales = (a1, None) if defer_input_quant else _quantised(a1, quant_config)
        travels = scales is not None and scales.ndim == 2  # and not one for all tokens
        ids, num_ids = exchange.ids(topk_ids, num_experts)
        got = exchange.buffer.dispatch(
            (x.contiguous(), scales) if travels and scales is not None else x.contiguous(),
            topk_idx=ids,
            topk_weights=topk_weights.float(),
            num_experts=num_ids,
        )
        assert got.recv_topk_idx is not None
        grouped = permute(got.recv_x, got.recv_topk_idx, num_local)
        weights = None if apply_router_weight_on_input else got.recv_topk_weights
        self._way = _Way(row_of=grouped.row_of, weights=weights, handle=got.handle)
        return _for_kernel(grouped, grouped.scales if travels else scales)

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        way = self._take_way()
        assert way.handle is not None
        y = _one_a_row(fused_expert_output, weight_and_reduce_impl, topk_weights, topk_ids)
        buffer = self._exchange.buffer
        rows = buffer.get_next_combine_buffer(way.handle)
        unpermute(y, way.row_of, weights=way.weights, out=rows)
        output.copy_(buffer.combine(rows, way.handle).x)


class LocalPrepareAndFinalize(MoEPrepareAndFinalizeNoDPEPModular, _OneExpertARow):
    """Ranks have the same tokens, and each runs its own experts: vLLM sums over ranks."""

    def supports_deferred_moe_finalize(self) -> bool:
        return False

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> Any:
        if expert_map is None:  # all experts are here
            self._way = None
            return super().prepare(
                a1,
                topk_weights,
                topk_ids,
                num_experts,
                expert_map,
                apply_router_weight_on_input,
                quant_config,
                defer_input_quant,
            )
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        x, scales = (a1, None) if defer_input_quant else _quantised(a1, quant_config)
        travels = scales is not None and scales.ndim == 2
        num_local = int((expert_map >= 0).sum())
        grouped = permute(
            x, expert_map[topk_ids.long()], num_local, scales=scales if travels else None
        )
        weights = None if apply_router_weight_on_input else topk_weights
        self._way = _Way(row_of=grouped.row_of, weights=weights, handle=None)
        return _for_kernel(grouped, grouped.scales if travels else scales)

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        if self._way is None:
            super().finalize(
                output,
                fused_expert_output,
                topk_weights,
                topk_ids,
                apply_router_weight_on_input,
                weight_and_reduce_impl,
            )
            return
        way = self._take_way()
        y = _one_a_row(fused_expert_output, weight_and_reduce_impl, topk_weights, topk_ids)
        unpermute(y, way.row_of, weights=way.weights, out=output)


def _weighted(a1: Tensor, topk_weights: Tensor) -> Tensor:
    num_topk = topk_weights.shape[1]
    if num_topk != 1:
        raise ValueError(f"router weights on the input with top-k {num_topk}, want top-k 1")
    return a1 * topk_weights.to(a1.dtype)


def _quantised(a1: Tensor, quant_config: Any) -> tuple[Tensor, Tensor | None]:
    """For kernels that take quantised rows: with scales of their own, or one for all."""
    return moe_kernel_quantize_input(
        a1,
        quant_config.a1_scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
    )


def _for_kernel(grouped: Permuted, scales: Tensor | None) -> Any:
    """As prepare returns it: rows, scales, no counts, local ids [M, 1], weights [M, 1]."""
    counts = grouped.offsets.diff(prepend=grouped.offsets.new_zeros(1))
    ids = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(
        counts, output_size=len(grouped.x)
    )
    return grouped.x, scales, None, ids[:, None], torch.ones(len(ids), 1, dtype=torch.float32)


def _one_a_row(y: Tensor, reduce: Any, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """[M, D] of a kernel that may have left it to others to weigh and add its top-k of 1."""
    if isinstance(reduce, TopKWeightAndReduceNoOP):
        return y
    if isinstance(reduce, TopKWeightAndReduceDelegate):
        reduce = TopKWeightAndReduceContiguous()
    return reduce.apply(
        output=None,
        fused_expert_output=y,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        apply_router_weight_on_input=True,
    )
