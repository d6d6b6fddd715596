"""Moving rows of bytes by index, and renaming the experts in them.

A program moves a tile: some rows, and all their columns block by block. Rows are moved in granules,
16 bytes where addresses, strides and width allow it (see `launch.words`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.launch import blocks, launch, power_of_two, words

_TILE = 1024  # elements of a program's step, of four bytes at most
_PAIRS = 256


class _Shape(NamedTuple):
    """Rows of two memories in granules."""

    width: int
    x_stride: int
    out_stride: int
    constants: dict[str, Any]


def row_shape(x_NB: Tensor, out_MB: Tensor) -> _Shape:
    width, x_stride, out_stride = x_NB.shape[1], x_NB.stride(0), out_MB.stride(0)
    addresses = x_NB.data_ptr(), out_MB.data_ptr()
    granule = math.gcd(16, width, x_stride, out_stride, *addresses)
    element, group, _ = words(granule)
    columns = min(_TILE, power_of_two(width // granule * group))
    constants = {
        "ELEMENT": element,
        "GROUP": group,
        "ROWS": max(1, _TILE // columns),
        "COLUMNS": columns,
    }
    return _Shape(width // granule, x_stride // granule, out_stride // granule, constants)


@triton.jit
def _pack_kernel(
    x,
    index,
    out,
    num_rows,
    width,
    x_stride,
    out_stride,
    HAS_INDEX: tl.constexpr,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    x, out = x.to(tl.pointer_type(ELEMENT)), out.to(tl.pointer_type(ELEMENT))
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    source = rows
    if HAS_INDEX:
        source = tl.load(index + rows, mask=live, other=0).to(tl.int64)
    read = x + (source * x_stride * GROUP)[:, None]
    write = out + (rows * out_stride * GROUP)[:, None]
    for first in range(0, width * GROUP, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        mask = live[:, None] & (columns < width * GROUP)[None, :]
        tl.store(write + columns[None, :], tl.load(read + columns[None, :], mask=mask), mask=mask)


def pack(x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor:
    num_rows, num_bytes = out_NB.shape
    if num_rows == 0 or num_bytes == 0:
        return out_NB
    shape = row_shape(x_TB, out_NB)
    launch(
        _pack_kernel,
        (blocks(num_rows, shape.constants["ROWS"]),),
        x_TB,
        x_TB if index_N is None else index_N,
        out_NB,
        num_rows,
        *shape[:3],
        HAS_INDEX=index_N is not None,
        **shape.constants,
    )
    return out_NB


@triton.jit
def _localise_kernel(
    topk_idx,
    topk_weights,
    local_of_expert,
    num_pairs,
    num_experts,
    HAS_WEIGHTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    live = pairs < num_pairs
    expert = tl.load(topk_idx + pairs, mask=live, other=-1)
    known = (expert >= 0) & (expert < num_experts)
    local = tl.load(local_of_expert + tl.where(known, expert, 0), mask=known, other=-1)
    tl.store(topk_idx + pairs, local, mask=live)
    if HAS_WEIGHTS:
        tl.store(topk_weights + pairs, 0.0, mask=live & (local < 0))


def localise(
    topk_idx_NK: Tensor, topk_weights_NK: Tensor | None, local_of_expert_E: Tensor
) -> None:
    num_pairs = topk_idx_NK.numel()
    launch(
        _localise_kernel,
        (blocks(num_pairs, _PAIRS),),
        topk_idx_NK,
        topk_idx_NK if topk_weights_NK is None else topk_weights_NK,
        local_of_expert_E,
        num_pairs,
        local_of_expert_E.shape[0],
        HAS_WEIGHTS=topk_weights_NK is not None,
        PAIRS=_PAIRS,
    )
