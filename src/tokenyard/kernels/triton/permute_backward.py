"""The gradients of unpermute: rows times weights, and a dot product for each weight.

A dot product has the order of `spec`: 16 sums, of which element d goes to sum d % 16, then these by
halves. A program has the pairs of a few rows, and walks along all of them 16 elements at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.floats import FLOAT64, as_passed, kind_of, narrow, widen
from tokenyard.kernels.triton.launch import blocks, launch, read_first_bad
from tokenyard.kernels.triton.permute import find_outside, zero_unwritten
from tokenyard.kernels.triton.reduce import column_block
from tokenyard.runtime.memory import as_bytes
from tokenyard.types import UnpermuteGrads

_PAIRS = 32  # whose dot products a program makes
LANES = tl.constexpr(16)  # sums of a dot product


@triton.jit
def _scale_kernel(
    grad,
    row_of,
    weights,
    grad_y,
    written,
    num_topk,
    hidden,
    grad_stride,
    grad_y_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is read once, and written to each of its places, times that place's weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = widen(tl.load(grad + row * grad_stride + columns, mask=inside), KIND)
    for k in range(num_topk):
        place = tl.load(row_of + row * num_topk + k)
        if place >= 0:
            scaled = narrow(tl.load(weights + row * num_topk + k) * values, KIND)
            tl.store(grad_y + place * grad_y_stride + columns, scaled, mask=inside)
            tl.store(written + place, 1)


@triton.jit
def _halve(sums, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """[PAIRS, 2 * HALF] -> [PAIRS, HALF]: the first half of the columns plus the second."""
    low, high = tl.split(tl.permute(tl.reshape(sums, [PAIRS, 2, HALF]), [0, 2, 1]))
    return low + high


@triton.jit
def _dot_kernel(
    grad,
    y,
    row_of,
    grad_weights,
    num_pairs,
    num_topk,
    hidden,
    grad_stride,
    y_stride,
    KIND: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    place = tl.load(row_of + pairs, mask=pairs < num_pairs, other=-1)
    there = place >= 0
    row = (pairs.to(tl.int32) // num_topk).to(tl.int64)  # pairs are fewer than 2**31
    one = grad + (row * grad_stride)[:, None]
    other = y + (tl.where(there, place, 0) * y_stride)[:, None]
    sums = tl.zeros([PAIRS, LANES], tl.float64 if KIND == FLOAT64 else tl.float32)
    for first in range(0, hidden, LANES):
        columns = first + tl.arange(0, LANES)
        mask = there[:, None] & (columns < hidden)[None, :]
        left = widen(tl.load(one + columns[None, :], mask=mask, other=0), KIND)
        right = widen(tl.load(other + columns[None, :], mask=mask, other=0), KIND)
        sums = sums + left * right
    sums = _halve(_halve(_halve(_halve(sums, PAIRS, 8), PAIRS, 4), PAIRS, 2), PAIRS, 1)
    tl.store(grad_weights + pairs, tl.reshape(sums, [PAIRS]), mask=pairs < num_pairs)


def unpermute_backward(
    grad_ND: Tensor, y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor, out: UnpermuteGrads
) -> int:
    (num_rows, num_topk), hidden = row_of_NK.shape, y_MD.shape[1]
    found = read_first_bad(find_outside(row_of_NK, y_MD.shape[0]))
    if found >= 0:
        return found
    written = torch.zeros(y_MD.shape[0], dtype=torch.int8, device=y_MD.device)
    kind, block = kind_of(y_MD.dtype), column_block(hidden, y_MD.element_size())
    launch(
        _scale_kernel,
        (num_rows, blocks(hidden, block)),
        as_passed(grad_ND),
        row_of_NK,
        weights_NK,
        as_passed(out.y),
        written,
        num_topk,
        hidden,
        grad_ND.stride(0),
        out.y.stride(0),
        KIND=kind,
        BLOCK=block,
    )
    zero_unwritten(as_bytes(out.y), written)
    launch(
        _dot_kernel,
        (blocks(row_of_NK.numel(), _PAIRS),),
        as_passed(grad_ND),
        as_passed(y_MD),
        row_of_NK,
        out.weights,
        row_of_NK.numel(),
        num_topk,
        hidden,
        grad_ND.stride(0),
        y_MD.stride(0),
        KIND=kind,
        PAIRS=_PAIRS,
    )
    return -1
