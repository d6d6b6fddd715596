"""Align, permute, rearrange and FP8: what happens to rows inside one rank.

Two letters are added to the legend of `tokenyard.types`: M is the number of rows after they were
grouped by expert and padded, S the number of scales of a row, one for each 128 elements. Results
are exact to the bit, but for the sign and payload of a NaN, which depend on the machine, as in
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

GROUP = 128  # elements that share an FP8 scale
FP8_MAX = 448.0  # of float8_e4m3fn

Array = TypeVar("Array", Tensor, np.ndarray)


@dataclass(frozen=True, kw_only=True, eq=False)
class Aligned:
    """Flat indices into topk_ids by expert, every expert's share padded to whole blocks."""

    sorted_token_ids: Tensor  # [capacity] int32, topk_ids.numel() where padded or unused
    expert_ids: Tensor  # [capacity // block_size] int32, each block's expert, -1 where unused
    num_tokens_post_pad: Tensor  # [1] int32, the entries in use, padding included


def moe_align_block_size(topk_ids: Tensor, block_size: int, num_experts: int) -> Aligned:
    """Group the (token, k) pairs by expert. A pair is given as its flat index in topk_ids, and an
    expert's pairs ascend.

    Entries of -1 are dropped. The capacity is enough for any routing: numel + E * (block_size - 1)
    rounded up to whole blocks, or, with fewer pairs than experts, one block for each pair.

    >>> got = moe_align_block_size(torch.tensor([[2, 0], [2, -1], [2, 0]]), 2, num_experts=3)
    >>> got.sorted_token_ids.tolist()  # expert 0 has 1 and 5, expert 2 has 0, 2 and 4; 6 is padding
    [1, 5, 0, 2, 4, 6, 6, 6, 6, 6]
    >>> got.expert_ids.tolist(), got.num_tokens_post_pad.tolist()
    ([0, 2, 2, -1, -1], [6])
    """
    numel = topk_ids.numel()
    capacity = _round_up(numel + num_experts * (block_size - 1), block_size)
    if numel < num_experts:
        capacity = numel * block_size
    order, owners = [], []
    for expert, pairs in enumerate(_pairs_by_expert(topk_ids, num_experts)):
        num_blocks = _round_up(len(pairs), block_size) // block_size
        order += pairs + [numel] * (num_blocks * block_size - len(pairs))
        owners += [expert] * num_blocks
    unused = capacity - len(order)
    return Aligned(
        sorted_token_ids=torch.tensor(order + [numel] * unused, dtype=torch.int32),
        expert_ids=torch.tensor(owners + [-1] * (unused // block_size), dtype=torch.int32),
        num_tokens_post_pad=torch.tensor([len(order)], dtype=torch.int32),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Permuted:
    """Received rows as a grouped GEMM wants them: one after the other by local expert."""

    x: Tensor  # [M, D], padding rows are zeros
    scales: Tensor | None  # [M, S], padding rows are zeros
    row_of: Tensor  # [N, K] int64, the row of x that (row, k) went to, -1 where topk_idx is -1
    offsets: Tensor  # [L] int32, the end of each group with its padding: `offs` of grouped_mm


def permute(
    x_ND: Tensor,
    topk_idx_NK: Tensor,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    scales: Tensor | None = None,
) -> Permuted:
    """One copy of a row for each of its local experts, by (expert, row, k).

    >>> x = torch.tensor([[10.0], [20.0], [30.0]])
    >>> topk_idx = torch.tensor([[1, -1], [0, 1], [-1, 1]])
    >>> got = permute(x, topk_idx, num_experts=2, expert_alignment=2)
    >>> got.x.flatten().tolist(), got.offsets.tolist()  # expert 0 has row 1, expert 1 has all three
    ([20.0, 0.0, 10.0, 20.0, 30.0, 0.0], [2, 6])
    >>> got.row_of.tolist()
    [[2, -1], [0, 3], [-1, 4]]
    """
    row_of = torch.full(topk_idx_NK.shape, -1, dtype=torch.int64)
    rows: list[int | None] = []
    offsets = []
    for pairs in _pairs_by_expert(topk_idx_NK, num_experts):
        for pair in pairs:
            row, k = divmod(pair, topk_idx_NK.shape[1])
            row_of[row, k] = len(rows)
            rows.append(row)
        rows += [None] * (_round_up(len(pairs), expert_alignment) - len(pairs))
        offsets.append(len(rows))
    return Permuted(
        x=_take(x_ND, rows),
        scales=None if scales is None else _take(scales, rows),
        row_of=row_of,
        offsets=torch.tensor(offsets, dtype=torch.int32),
    )


def unpermute(y_MD: Tensor, row_of_NK: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """For each row n the sum over k of its experts' results, each times weights[n, k] if given.

    The sum starts from 0, adds by ascending k in float32 (float64 for float64), and is rounded
    once. A product is rounded before it is added: no fused multiply-add. A row without experts
    gives 0.

    >>> y = torch.tensor([[1.0], [2.0], [4.0]])
    >>> row_of = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
    >>> unpermute(y, row_of).tolist()
    [[5.0], [2.0], [0.0]]
    >>> unpermute(y, row_of, weights=torch.tensor([[0.5, 3.0], [9.0, 0.25], [9.0, 9.0]])).tolist()
    [[5.0], [0.5], [0.0]]
    """
    wide = torch.float64 if y_MD.dtype == torch.float64 else torch.float32
    out = torch.zeros(row_of_NK.shape[0], y_MD.shape[1], dtype=y_MD.dtype)
    for n, places in enumerate(row_of_NK.tolist()):
        total = torch.zeros(y_MD.shape[1], dtype=wide)
        for k, place in enumerate(places):
            if place == -1:
                continue
            term = y_MD[place].to(wide)
            if weights is not None:
                term = weights[n, k].to(wide) * term
            total = total + term
        out[n] = total.to(y_MD.dtype)
    return out


def unpermute_backward(
    grad_ND: Tensor, y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of unpermute's y [M, D] and weights [N, K]; grad is that of its result.

    A row of y gets its weight times grad, in float32 (float64 for float64) and rounded once. A
    weight gets the dot product of grad and its row of y, in float32 or float64: the product of
    element d is rounded and added to sum d % 16, and then the 16 sums are added by halves: the
    upper 8 to the lower 8, then 4 to 4, 2 to 2, 1 to 1. Everything else is zero.

    >>> grad, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.5, 7.0], [9.0, 9.0]])
    >>> row_of, weights = torch.tensor([[1, -1, 0]]), torch.tensor([[10.0, 5.0, 100.0]])
    >>> grad_y, grad_weights = unpermute_backward(grad, y, row_of, weights)
    >>> grad_y.tolist(), grad_weights.tolist()
    ([[100.0, 200.0], [10.0, 20.0], [0.0, 0.0]], [[14.5, 0.0, 11.0]])
    """
    wide = torch.float64 if y_MD.dtype == torch.float64 else torch.float32
    grad_y, grad_weights = torch.zeros_like(y_MD), torch.zeros_like(weights_NK)
    for n, places in enumerate(row_of_NK.tolist()):
        for k, place in enumerate(places):
            if place == -1:
                continue
            grad = grad_ND[n].to(wide)
            grad_y[place] = (weights_NK[n, k].to(wide) * grad).to(y_MD.dtype)
            grad_weights[n, k] = _dot(grad, y_MD[place].to(wide))
    return grad_y, grad_weights


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """The dot product, summed in the order that unpermute_backward describes."""
    sums = torch.zeros(16, dtype=one.dtype)
    for d, product in enumerate(one * other):
        sums[d % 16] += product
    while len(sums) > 1:
        low, high = sums.chunk(2)
        sums = low + high
    return sums[0]


def rearrange(dst: Array, src: Array) -> None:
    """dst[i, j, ...] = src[i, j, ...] at every index, whatever the strides: bytes move, not values.

    dst and src are two tensors or two numpy arrays that do not overlap. src may have an axis of
    stride 0; dst may not, since its elements would be written more than once.

    >>> dst = np.zeros((3, 2), dtype=np.int16)
    >>> rearrange(dst, np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int16).T[::-1])
    >>> dst.tolist()
    [[3, 6], [2, 5], [1, 4]]
    >>> column = torch.tensor([[7], [8]])
    >>> rearrange(out := torch.zeros(2, 3, dtype=torch.int64), column.expand(2, 3))
    >>> out.tolist()
    [[7, 7, 7], [8, 8, 8]]
    """
    if isinstance(src, Tensor) != isinstance(dst, Tensor):
        raise ValueError(f"src is a {type(src).__name__}, want a {type(dst).__name__} like dst")
    if src.shape != dst.shape:
        raise ValueError(f"src has shape {tuple(src.shape)}, want dst's {tuple(dst.shape)}")
    if src.dtype != dst.dtype:
        raise ValueError(f"src is {src.dtype}, want dst's {dst.dtype}")
    strides = dst.stride() if isinstance(dst, Tensor) else dst.strides
    for axis, (length, stride) in enumerate(zip(dst.shape, strides)):
        if stride == 0 and length > 1 and 0 not in dst.shape:  # numpy's empty arrays have strides 0
            raise ValueError(f"dst has stride 0 on axis {axis} of length {length}, want length 1")
    index: tuple[Any, ...]
    for index in np.ndindex(*dst.shape):
        element = (*index, ...)  # the ellipsis: a view of the element, not a number
        dst[element] = src[element]


def cast_to_fp8(
    x_ND: Tensor, *, round_scale: bool = False, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn values [N, D] and the scales [N, S] that undo the cast; D is a multiple of 128.

    A group's amax is max(|x|), at least 1e-4, in float32. Its scale is amax / 448. Its values are
    x * (1 / amax * 448) with every step rounded, which is how torch computes 448 / amax. With
    round_scale the scale is rounded up to a power of two, and the values are x * (1 / scale). With
    use_ue8m0 too, the scales are packed as in pack_ue8m0.

    >>> x = torch.tensor([[7.0, 3.5, -1.0] + [0.0] * 125])
    >>> values, scales = cast_to_fp8(x)
    >>> values[0, :3].tolist(), scales.tolist()  # 7 / 448 is a 64th
    ([448.0, 224.0, -64.0], [[0.015625]])
    >>> x[0, 0] = 6.0
    >>> values, scales = cast_to_fp8(x, round_scale=True)
    >>> values[0, :3].tolist(), scales.tolist()  # 6 / 448 is less, and rounded up to a 64th
    ([384.0, 224.0, -64.0], [[0.015625]])
    """
    num_rows, hidden = x_ND.shape
    if hidden % GROUP:
        raise ValueError(f"x has hidden size {hidden}, want a multiple of {GROUP}")
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 is True with round_scale=False, want round_scale=True")
    values = torch.zeros(num_rows, hidden, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(num_rows, hidden // GROUP, dtype=torch.float32)
    for row in range(num_rows):
        for s in range(hidden // GROUP):
            group = slice(s * GROUP, (s + 1) * GROUP)
            x = x_ND[row, group].float()
            amax = x.abs().amax().clamp(1e-4)
            scale, factor = amax / FP8_MAX, amax.reciprocal() * FP8_MAX
            if round_scale:
                scale.fill_(_round_up_to_power_of_two(scale.item()))
                factor = scale.reciprocal()
            values[row, group] = (x * factor).to(torch.float8_e4m3fn)
            scales[row, s] = scale
    return values, pack_ue8m0(scales) if use_ue8m0 else scales


def cast_back(x_fp8: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [N, D]: the products in float32, then rounded; scales in float32 or packed.

    >>> values, scales = cast_to_fp8(torch.tensor([[7.0, 3.5, -1.0] + [0.0] * 125]))
    >>> cast_back(values, scales)[0, :3].tolist()
    [7.0, 3.5, -1.0]
    """
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales)
    out = torch.zeros(x_fp8.shape, dtype=torch.bfloat16)
    for row in range(scales.shape[0]):
        for s in range(scales.shape[1]):
            group = slice(s * GROUP, (s + 1) * GROUP)
            out[row, group] = (x_fp8[row, group].float() * scales[row, s]).to(torch.bfloat16)
    return out


def pack_ue8m0(scales_NS: Tensor) -> Tensor:
    """int32 [N, S // 4]: the exponent bytes of powers of two, the first of four in the lowest byte.

    >>> [hex(word) for word in pack_ue8m0(torch.tensor([[1.0, 2.0, 4.0, 0.5]]))[0].tolist()]
    ['0x7e81807f']
    """
    if scales_NS.shape[1] % 4:
        raise ValueError(f"scales have {scales_NS.shape[1]} columns, want a multiple of 4")
    exponents = scales_NS.view(torch.int32) >> 23 & 0xFF
    packed = torch.zeros(scales_NS.shape[0], scales_NS.shape[1] // 4, dtype=torch.int32)
    for byte in range(4):
        packed |= exponents[:, byte::4] << 8 * byte
    return packed


def unpack_ue8m0(packed: Tensor) -> Tensor:
    """float32 [N, S]. inf and NaN were both packed as the byte 255, which becomes inf; 0 becomes 0.

    >>> unpack_ue8m0(torch.tensor([[0x7E81807F]], dtype=torch.int32)).tolist()
    [[1.0, 2.0, 4.0, 0.5]]
    """
    scales = torch.zeros(packed.shape[0], packed.shape[1] * 4, dtype=torch.float32)
    for byte in range(4):
        scales[:, byte::4] = ((packed >> 8 * byte & 0xFF) << 23).view(torch.float32)
    return scales


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _round_up_to_power_of_two(value: float) -> float:
    """The smallest power of two that is not below `value`, exactly; inf and NaN stay.

    >>> _round_up_to_power_of_two(0.25), _round_up_to_power_of_two(0.26)
    (0.25, 0.5)
    """
    fraction, exponent = math.frexp(value)  # value = fraction * 2**exponent, 0.5 <= fraction < 1
    if not math.isfinite(value) or fraction == 0.5:
        return value
    return math.ldexp(1.0, exponent)


def _pairs_by_expert(topk_idx: Tensor, num_experts: int) -> list[list[int]]:
    """The flat indices into topk_idx that chose each expert, ascending; -1 chose none."""
    pairs: list[list[int]] = [[] for _ in range(num_experts)]
    for pair, expert in enumerate(topk_idx.flatten().tolist()):
        if expert != -1:
            pairs[expert].append(pair)
    return pairs


def _take(x: Tensor, rows: Sequence[int | None]) -> Tensor:
    """x[rows], with zeros where there is no row."""
    out = torch.zeros(len(rows), x.shape[1], dtype=x.dtype)
    for m, row in enumerate(rows):
        if row is not None:
            out[m] = x[row]
    return out
