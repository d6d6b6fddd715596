"""Rows to their local experts and back.

`place` finds each row's places, `spread` copies it there, `unpermute` sums what the experts made of
its copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.align import ByExpert
from tokenyard.kernels.triton.floats import FLOAT64, as_passed, kind_of, narrow, widen
from tokenyard.kernels.triton.launch import NONE, blocks, first_bad, launch, read_first_bad
from tokenyard.kernels.triton.reduce import column_block
from tokenyard.kernels.triton.rows import row_shape
from tokenyard.runtime import memory
from tokenyard.types import Places

_PAIRS = 256
_NONE = tl.constexpr(NONE)


@triton.jit
def _spread_kernel(
    x,
    row_of,
    out,
    written,
    num_rows,
    num_topk,
    num_places,
    width,
    x_stride,
    out_stride,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A row is read once, and written to each of its places, which are marked as written."""
    x, out = x.to(tl.pointer_type(ELEMENT)), out.to(tl.pointer_type(ELEMENT))
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < num_rows
    read = x + (rows * x_stride * GROUP)[:, None]
    for first in range(0, width * GROUP, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (columns < width * GROUP)[None, :]
        values = tl.load(read + columns[None, :], mask=live[:, None] & inside)
        for k in range(num_topk):
            place = tl.load(row_of + rows * num_topk + k, mask=live, other=-1)
            goes = (place >= 0) & (place < num_places)
            write = out + (place * out_stride * GROUP)[:, None]
            tl.store(write + columns[None, :], values, mask=goes[:, None] & inside)
            if first == 0:  # once a row, not for each block of columns
                tl.store(written + place, 1, mask=goes)


@triton.jit
def _zero_kernel(
    out,
    written,
    num_rows,
    width,
    out_stride,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Zeros where nothing was written."""
    out = out.to(tl.pointer_type(ELEMENT))
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    empty = tl.load(written + rows, mask=rows < num_rows, other=1) == 0
    write = out + (rows * out_stride * GROUP)[:, None]
    zeros = tl.zeros([ROWS, COLUMNS], ELEMENT)
    for first in range(0, width * GROUP, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        mask = empty[:, None] & (columns < width * GROUP)[None, :]
        tl.store(write + columns[None, :], zeros, mask=mask)


def spread(x_NB: Tensor, row_of_NK: Tensor, out_MB: Tensor) -> Tensor:
    (num_rows, num_topk), (num_places, num_bytes) = row_of_NK.shape, out_MB.shape
    if num_places == 0 or num_bytes == 0:
        return out_MB
    written = torch.zeros(num_places, dtype=torch.int8, device=out_MB.device)
    shape = row_shape(x_NB, out_MB)
    launch(
        _spread_kernel,
        (blocks(num_rows, shape.constants["ROWS"]),),
        x_NB,
        row_of_NK,
        out_MB,
        written,
        num_rows,
        num_topk,
        num_places,
        *shape[:3],
        **shape.constants,
    )
    zero_unwritten(out_MB, written)
    return out_MB


def zero_unwritten(out_MB: Tensor, written_M: Tensor) -> None:
    shape = row_shape(out_MB, out_MB)
    launch(
        _zero_kernel,
        (blocks(out_MB.shape[0], shape.constants["ROWS"]),),
        out_MB,
        written_M,
        out_MB.shape[0],
        shape.width,
        shape.out_stride,
        **shape.constants,
    )


@triton.jit
def _outside_kernel(row_of, first_bad, num_pairs, num_rows, PAIRS: tl.constexpr):
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    place = tl.load(row_of + pairs, mask=pairs < num_pairs, other=-1)
    bad = (place < -1) | (place >= num_rows)
    tl.atomic_min(first_bad + pairs * 0, pairs, mask=bad, sem="relaxed")


def find_outside(row_of_NK: Tensor, num_rows: int) -> Tensor:
    """A counter with the first place in row_of that is no row of -1..M-1."""
    bad, pairs = first_bad(row_of_NK.device), row_of_NK.numel()
    grid = (blocks(pairs, _PAIRS),)
    launch(_outside_kernel, grid, row_of_NK, bad, pairs, num_rows, PAIRS=_PAIRS)
    return bad


@triton.jit
def _unpermute_kernel(
    y,
    row_of,
    weights,
    out,
    first_bad,
    num_topk,
    hidden,
    y_stride,
    out_stride,
    KIND: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros([BLOCK], tl.float64 if KIND == FLOAT64 else tl.float32)
    # With a bad place the call raises when the host reads the counter: nothing is read along it.
    if tl.load(first_bad) == _NONE:
        for k in range(num_topk):
            place = tl.load(row_of + row * num_topk + k)
            if place >= 0:
                term = widen(tl.load(y + place * y_stride + columns, mask=inside), KIND)
                if HAS_WEIGHTS:
                    term = tl.load(weights + row * num_topk + k) * term
                total = total + term
        tl.store(out + row * out_stride + columns, narrow(total, KIND), mask=inside)


def unpermute(y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor | None, out_ND: Tensor) -> int:
    (num_rows, num_topk), hidden = row_of_NK.shape, y_MD.shape[1]
    bad = find_outside(row_of_NK, y_MD.shape[0])
    block = column_block(hidden, y_MD.element_size())
    launch(
        _unpermute_kernel,
        (num_rows, blocks(hidden, block)),
        as_passed(y_MD),
        row_of_NK,
        bad if weights_NK is None else weights_NK,
        as_passed(out_ND),
        bad,
        num_topk,
        hidden,
        y_MD.stride(0),
        out_ND.stride(0),
        KIND=kind_of(y_MD.dtype),
        HAS_WEIGHTS=weights_NK is not None,
        BLOCK=block,
    )
    return read_first_bad(bad)


def place(topk_idx_NK: Tensor, num_experts: int, expert_alignment: int) -> tuple[Places, int]:
    """Waits for the device once, for the number of rows and of the first bad index."""
    pairs = ByExpert(topk_idx_NK, num_experts, expert_alignment)
    row_of = memory.empty(*topk_idx_NK.shape, dtype=torch.int64, device=topk_idx_NK.device)
    pairs.place(row_of, inverse=False)
    found = read_first_bad(pairs.first_bad)
    num_rows = int(pairs.ends[-1]) if num_experts else 0
    return Places(row_of, pairs.ends, num_rows), found
