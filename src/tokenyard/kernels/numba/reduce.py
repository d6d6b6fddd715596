"""The sum of combine: each token's rows, wherever they lie, added up in float32 or float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from torch import Tensor

from tokenyard.kernels.numba.intrinsics import (
    LANES,
    LIKE,
    add_lanes,
    add_one,
    fold_lanes,
    fold_one,
    pointer,
    put_lanes,
    put_one,
)
from tokenyard.kernels.numba.threads import in_channels
from tokenyard.types import Route

_INT32 = np.empty(0, np.int32)
_PIECE = 512  # elements of a row whose sum is kept in L1 while all ranks' pieces are added


@njit(nogil=True, cache=True)
def _add_piece(total, rows, at, count):
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        add_lanes(total, rows, i, at + i)
    for i in range(whole, count):
        add_one(total, rows, i, at + i)


@njit(nogil=True, cache=True)
def _fold_piece(total, partial, count, like):
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        fold_lanes(total, partial, i, like)
    for i in range(whole, count):
        fold_one(total, partial, i, like)


@njit(nogil=True, cache=True)
def _put_piece(out, at, total, count):
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        put_lanes(out, at + i, total, i)
    for i in range(whole, count):
        put_one(out, at + i, total, i)


@njit(nogil=True, cache=True)
def _reduce_kernel(
    bases,
    copy_start,
    copy_rank,
    copy_slot,
    nodes,
    num_nodes,
    biases,
    out,
    hidden,
    begin,
    end,
    like,
    sums,
):
    """`bases[r]` is the address of rank r's rows; `sums` is scratch for two pieces, wide."""
    starts, ranks, slots = (
        pointer(copy_start, _INT32),
        pointer(copy_rank, _INT32),
        pointer(copy_slot, _INT32),
    )
    target = pointer(out, like)
    total = pointer(sums.ctypes.data, sums)
    partial = pointer(sums.ctypes.data + _PIECE * sums.itemsize, sums)
    for t in range(begin, end):
        row = np.int64(t) * hidden
        first, last = np.int64(starts[t]), np.int64(starts[t + 1])
        for d in range(0, hidden, _PIECE):
            count = min(_PIECE, hidden - d)
            for i in range(count):
                total[i] = 0
            for b in range(biases.shape[0]):
                _add_piece(total, pointer(biases[b], like), row + d, count)
            if num_nodes == 1:
                for c in range(first, last):
                    rows = pointer(bases[ranks[c]], like)
                    _add_piece(total, rows, np.int64(slots[c]) * hidden + d, count)
            else:
                for node in range(num_nodes):
                    for i in range(count):
                        partial[i] = 0
                    for c in range(first, last):
                        if nodes[ranks[c]] == node:
                            rows = pointer(bases[ranks[c]], like)
                            _add_piece(partial, rows, np.int64(slots[c]) * hidden + d, count)
                    _fold_piece(total, partial, count, like)
            _put_piece(target, row + d, total, count)


def reduce(
    rows_by_rank: Sequence[Tensor],
    route: Route,
    node_of_rank: Sequence[int],
    biases_TD: Sequence[Tensor],
    out_TD: Tensor,
) -> Tensor:
    num_tokens, hidden = out_TD.shape
    like = LIKE[out_TD.dtype]
    wide = np.float64 if like.dtype == np.float64 else np.float32
    bases = np.array([rows.data_ptr() for rows in rows_by_rank], np.int64)
    nodes = np.array(node_of_rank, np.int32)
    biases = np.array([bias.data_ptr() for bias in biases_TD], np.int64)

    def part(begin: int, end: int) -> None:
        _reduce_kernel(
            bases,
            route.copy_start.data_ptr(),
            route.copy_rank.data_ptr(),
            route.copy_slot.data_ptr(),
            nodes,
            max(node_of_rank) + 1,
            biases,
            out_TD.data_ptr(),
            hidden,
            begin,
            end,
            like,
            np.empty(2 * _PIECE, wide),
        )

    if num_tokens:
        moved = (route.copy_rank.shape[0] + num_tokens) * hidden * out_TD.element_size()
        in_channels(part, num_tokens, moved)
    return out_TD
