"""The sums of combine and of unpermute: each element by one thread, in the order of `spec`.

No tree, no fused multiply-add: terms are added one after the other to a wide number, which is
rounded once. A program has one token and a block of its columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.launch import (
    NONE,
    blocks,
    first_bad,
    launch,
    numbers,
    power_of_two,
    read_first_bad,
)
from tokenyard.kernels.triton.numbers import FLOAT64, as_element, as_passed, kind_of, narrow, widen
from tokenyard.types import Route

_BYTES = 4096  # of a row that a program takes
_PAIRS = 256
_NONE = tl.constexpr(NONE)


def column_block(hidden: int, itemsize: int) -> int:
    """Elements of a row that a program takes."""
    return min(_BYTES // itemsize, power_of_two(hidden))


@triton.jit
def _reduce_kernel(
    tables,
    copy_start,
    copy_rank,
    copy_slot,
    bias_0,
    bias_1,
    out,
    hidden,
    num_ranks,
    num_nodes,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    SEVERAL_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`tables` has the address of each rank's rows, then its node.

    On one node copies are added to the biases. On several, each node's are added up and rounded
    first; a node that sent none adds a zero.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    zeros = tl.zeros([BLOCK], tl.float64 if KIND == FLOAT64 else tl.float32)
    total = zeros
    if NUM_BIASES > 0:
        total = total + widen(tl.load(bias_0 + token * hidden + columns, mask=inside), KIND)
    if NUM_BIASES > 1:
        total = total + widen(tl.load(bias_1 + token * hidden + columns, mask=inside), KIND)
    begin, end = tl.load(copy_start + token), tl.load(copy_start + token + 1)
    for node in range(num_nodes):
        partial = zeros if SEVERAL_NODES else total
        for copy in range(begin, end):
            rank = tl.load(copy_rank + copy)
            if tl.load(tables + num_ranks + rank) == node:
                rows = tl.load(tables + rank).to(tl.pointer_type(ELEMENT))
                slot = tl.load(copy_slot + copy).to(tl.int64)
                row = tl.multiple_of(rows, ALIGNED) + slot * hidden
                partial = partial + widen(tl.load(row + columns, mask=inside), KIND)
        if SEVERAL_NODES:
            total = total + widen(narrow(partial, KIND), KIND)
        else:
            total = partial
    tl.store(out + token * hidden + columns, narrow(total, KIND), mask=inside)


def reduce(
    rows_by_rank: Sequence[Tensor],
    route: Route,
    node_of_rank: Sequence[int],
    biases_TD: Sequence[Tensor],
    out_TD: Tensor,
) -> Tensor:
    addresses = [rows.data_ptr() for rows in rows_by_rank]
    reduce_at(addresses, route, node_of_rank, biases_TD, out_TD)
    return out_TD


def reduce_at(
    addresses: Sequence[int],
    route: Route,
    node_of_rank: Sequence[int],
    biases_TD: Sequence[Tensor],
    out_TD: Tensor,
) -> None:
    """`reduce` of contiguous rows that begin at these addresses, in this rank's memory or not."""
    num_tokens, hidden = out_TD.shape
    kind, itemsize = kind_of(out_TD.dtype), out_TD.element_size()
    block = column_block(hidden, itemsize)
    out = as_passed(out_TD)
    biases = [as_passed(bias.contiguous()) for bias in biases_TD]
    launch(
        _reduce_kernel,
        (num_tokens, blocks(hidden, block)),
        numbers([*addresses, *node_of_rank], out_TD.device),
        route.copy_start,
        route.copy_rank,
        route.copy_slot,
        *[*biases, out, out][:2],
        out,
        hidden,
        len(addresses),
        max(node_of_rank) + 1,
        KIND=kind,
        ELEMENT=as_element(kind),
        ALIGNED=math.gcd(16, *addresses),
        NUM_BIASES=len(biases),
        SEVERAL_NODES=max(node_of_rank) > 0,
        BLOCK=block,
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
