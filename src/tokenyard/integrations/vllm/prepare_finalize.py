"""What surrounds an experts kernel of vLLM: rows go in, and what experts made of them comes out.

vLLM's CPU kernels want K local expert ids for every row, and have no value for an expert that lives
elsewhere. So each (row, local expert) becomes a row of its own with top-k 1, grouped by expert, and
nothing is computed in vain. Weights are applied when the rows of a token are summed, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from tokenyard.integrations.vllm.exchange import Arrived, Exchange
from tokenyard.ops.permute import permute, unpermute
from tokenyard.types import Permuted


class _OneExpertARow(mk.FusedMoEPrepareAndFinalizeModular):
    """The part that needs no other rank."""

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def output_is_reduced(self) -> bool:
        return False  # over tensor parallel ranks


class ExchangingPrepareAndFinalize(_OneExpertARow):
    """Ranks have tokens of their own, which travel to the experts' ranks and back."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._arrived: Arrived | None = None
        self._checked = False

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
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        self._check_places(expert_map, num_experts)
        x, scales, own_scales = _quantised(a1, quant_config, defer_input_quant)
        sent = x.contiguous() if own_scales is None else (x.contiguous(), own_scales)
        arrived = self._exchange.send(sent, topk_ids, topk_weights, num_experts)
        self._arrived = arrived
        return _for_kernel(arrived.rows, scales if own_scales is None else arrived.rows.scales)

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            raise ValueError("finalize without a prepare before it")
        y = _one_a_row(fused_expert_output)
        weights = None if apply_router_weight_on_input else arrived.weights
        output.copy_(self._exchange.send_back(y, arrived, weights))

    def _check_places(self, expert_map: Tensor | None, num_experts: int) -> None:
        """Experts must be where the exchange takes them to be."""
        if self._checked or expert_map is None:
            return
        local, wanted = expert_map.tolist(), self._exchange.expert_map(num_experts)
        if local != wanted:
            raise ValueError(f"expert_map is {local}, want experts in blocks by rank, {wanted}")
        self._checked = True


class LocalPrepareAndFinalize(_OneExpertARow):
    """Ranks have the same tokens, and each runs its own experts: vLLM sums over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._way: tuple[Tensor, Tensor] | None = None  # row_of of Permuted, weights, both [T, K]

    def num_dispatchers(self) -> int:
        return 1

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
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        x, scales, own_scales = _quantised(a1, quant_config, defer_input_quant)
        num_local = num_experts
        if expert_map is not None:  # it is None where this rank has all experts
            num_local = int((expert_map >= 0).sum())
            topk_ids = expert_map[topk_ids.long()]
        rows = permute(x, topk_ids, num_local, scales=own_scales)
        self._way = rows.row_of, topk_weights
        return _for_kernel(rows, scales if own_scales is None else rows.scales)

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        way, self._way = self._way, None
        if way is None:
            raise ValueError("finalize without a prepare before it")
        row_of, weights = way
        y = _one_a_row(fused_expert_output)
        unpermute(y, row_of, weights=None if apply_router_weight_on_input else weights, out=output)


def _weighted(a1: Tensor, topk_weights: Tensor) -> Tensor:
    num_topk = topk_weights.shape[1]
    if num_topk != 1:
        raise ValueError(f"router weights on the input with top-k {num_topk}, want top-k 1")
    return a1 * topk_weights.to(a1.dtype)


def _quantised(
    a1: Tensor, quant_config: Any, later: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows as the kernel wants them, its scales, and those if each row has its own. Kernels that
    quantise for themselves want rows as they are `later`: all of vLLM 0.32's for CPUs do.
    """
    if later:
        return a1, None, None
    x, scales = moe_kernel_quantize_input(
        a1,
        quant_config.a1_scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
    )
    each = quant_config.per_act_token_quant or quant_config.block_shape is not None
    return x, scales, scales if each else None


def _for_kernel(grouped: Permuted, scales: Tensor | None) -> Any:
    """As prepare returns it: rows, scales, no counts, local ids [M, 1], weights [M, 1]."""
    counts = grouped.offsets.diff(prepend=grouped.offsets.new_zeros(1))
    ids = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(
        counts, output_size=len(grouped.x)
    )
    return grouped.x, scales, None, ids[:, None], torch.ones(len(ids), 1, dtype=torch.float32)


def _one_a_row(y: Tensor) -> Tensor:
    """[M, D] also of a kernel that leaves its top-k, [M, 1, D] here, to others to weigh and add."""
    return y.reshape(y.shape[0], y.shape[-1])
