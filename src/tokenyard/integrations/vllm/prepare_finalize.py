"""What surrounds an experts kernel of vLLM: rows go in, and what experts made of them comes out.

vLLM's CPU kernels want K local expert ids for every row, and have no value for an expert that lives
elsewhere. So each (row, local expert) becomes a row of its own with top-k 1, grouped by expert, and
nothing is computed in vain. Weights are applied when the rows of a token are summed, in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from tokenyard import validate
from tokenyard.integrations.vllm import balance
from tokenyard.integrations.vllm.exchange import Arrived, Exchange
from tokenyard.ops.permute import permute, unpermute
from tokenyard.types import Permuted


class _OneExpertARow(mk.FusedMoEPrepareAndFinalizeModular):
    """vLLM's two calls. Subclasses bring rows to this rank's experts and take sums back."""

    def __init__(self) -> None:
        super().__init__()
        self._is_prepared = False
        # Weights of rows for the kernel, as many as were ever needed. vLLM changes default dtypes.
        self._ones = torch.ones(0, 1, dtype=torch.float32, device="cpu")

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def output_is_reduced(self) -> bool:
        return False  # over tensor parallel ranks

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
        if self._is_prepared:
            self._is_prepared = False
            raise ValueError(
                "prepare before finalize: micro-batches (--enable-dbo) are not supported"
            )
        if apply_router_weight_on_input:
            a1 = _weighted(a1, topk_weights)
        places = self._places(expert_map, num_experts)
        x, scales, own_scales = _quantised(a1, quant_config, defer_input_quant)
        rows = self._bring(x, own_scales, topk_ids, topk_weights, places)
        self._is_prepared = True
        num_rows = rows.x.shape[0]
        if self._ones.shape[0] < num_rows:
            self._ones = torch.ones(num_rows, 1, dtype=torch.float32, device="cpu")
        # No counts are told, and each row has one expert and the weight 1.
        kernel_scales = scales if own_scales is None else rows.scales
        return rows.x, kernel_scales, None, _expert_of_row(rows.offsets), self._ones[:num_rows]

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        if not self._is_prepared:
            raise ValueError("finalize without a prepare before it")
        self._is_prepared = False
        self._take_back(_one_a_row(fused_expert_output), not apply_router_weight_on_input, output)

    def _places(self, expert_map: Tensor | None, num_experts: int) -> Any:
        """What _bring must know of where experts are."""
        raise NotImplementedError

    def _bring(
        self, x: Tensor, scales: Tensor | None, topk_ids: Tensor, weights: Tensor, places: Any
    ) -> Permuted | Arrived:
        """The rows of this rank's experts, by expert. `scales` if each row of x has its own."""
        raise NotImplementedError

    def _take_back(self, y: Tensor, weigh: bool, output: Tensor) -> None:
        """Write the sum of each token's rows of y, weighted or not, to the output."""
        raise NotImplementedError


class ExchangingPrepareAndFinalize(_OneExpertARow):
    """Ranks have tokens of their own, which travel to the experts' ranks and back."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._arrived: Arrived | None = None
        self._checked = False
        # What the kernel is given in place of its own, by name, where it computes for the node.
        self.node_weights: dict[str, Tensor] = {}
        self._expert_bytes = 0  # of those of one expert

    def post_init_setup(self, fused_experts: Any) -> None:
        """Let the kernel know us: `hooks` asks it for `share` and `node_weights`."""
        fused_experts.around = self

    def share(self, fused_experts: Any, layer: Any) -> None:
        """The kernel has packed a layer's weights. All ranks call this together."""
        buffer = self._exchange.buffer
        if buffer.balance is not None:
            self.node_weights = balance.share(buffer, layer, fused_experts.quant_config)
            shared = self.node_weights.values()
            self._expert_bytes = sum(one.element_size() * one[0].numel() for one in shared)

    def num_dispatchers(self) -> int:
        return self._exchange.buffer.group_size

    def _places(self, expert_map: Tensor | None, num_experts: int) -> int:
        """The number of experts. They must be where the exchange takes them to be."""
        if not self._checked and expert_map is not None:
            local, wanted = expert_map.tolist(), self._exchange.expert_map(num_experts)
            if local != wanted:
                raise ValueError(f"expert_map is {local}, want experts in blocks by rank, {wanted}")
            self._checked = True
        return num_experts

    def _bring(
        self, x: Tensor, scales: Tensor | None, topk_ids: Tensor, weights: Tensor, places: int
    ) -> Arrived:
        sent = x.contiguous() if scales is None else (x.contiguous(), scales)
        balanced = bool(self.node_weights)
        self._arrived = self._exchange.send(sent, topk_ids, weights, places, balanced)
        if balanced:
            told = self._exchange.buffer._open_engine().balance
            assert told is not None
            told.read(self._expert_bytes)
        return self._arrived

    def _take_back(self, y: Tensor, weigh: bool, output: Tensor) -> None:
        arrived, self._arrived = self._arrived, None
        assert arrived is not None
        self._exchange.send_back(y, arrived, weigh, out=output)


class LocalPrepareAndFinalize(_OneExpertARow):
    """Ranks have the same tokens, and each runs its own experts: vLLM sums over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._way: tuple[Tensor, Tensor] | None = None  # row_of of Permuted, weights, both [T, K]

    def num_dispatchers(self) -> int:
        return 1

    def _places(self, expert_map: Tensor | None, num_experts: int) -> tuple[int, Tensor | None]:
        """How many experts this rank has, and their map: None where it has all."""
        if expert_map is None:
            return num_experts, None
        return int((expert_map >= 0).sum()), expert_map

    def _bring(
        self,
        x: Tensor,
        scales: Tensor | None,
        topk_ids: Tensor,
        weights: Tensor,
        places: tuple[int, Tensor | None],
    ) -> Permuted:
        num_local, expert_map = places
        local_ids = topk_ids
        if expert_map is not None:
            local_ids = expert_map[topk_ids.long()].masked_fill(topk_ids < 0, -1)
        rows = permute(x, local_ids, num_local, scales=scales)
        self._way = rows.row_of, weights
        return rows

    def _take_back(self, y: Tensor, weigh: bool, output: Tensor) -> None:
        way, self._way = self._way, None
        assert way is not None
        row_of, weights = way
        given: Any = {"weights": weights if weigh else None}
        if validate.overlap(output, y):  # vLLM's kernel writes there if there are as many rows
            output.copy_(unpermute(y, row_of, **given))
        else:
            unpermute(y, row_of, **given, out=output)


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


def _expert_of_row(offsets: Tensor) -> Tensor:
    """[M, 1] int32, the local expert of each row. By numpy, which needs a third of torch's time.

    >>> _expert_of_row(torch.tensor([2, 2, 3], dtype=torch.int32)).tolist()
    [[0], [0], [2]]
    """
    ends = offsets.numpy()
    counts = ends.copy()
    counts[1:] -= ends[:-1]
    return torch.from_numpy(np.repeat(np.arange(len(ends), dtype=np.int32), counts)[:, None])


def _one_a_row(y: Tensor) -> Tensor:
    """[M, D] also of a kernel that leaves its top-k, [M, 1, D] here, to others to weigh and add."""
    return y.reshape(y.shape[0], y.shape[-1])
