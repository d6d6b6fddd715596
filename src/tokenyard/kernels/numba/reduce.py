"""The sum of combine: each token's rows, wherever they lie, added up in float32 or float64.

On one node the sums of 128 elements stay in registers while all ranks' pieces are added, and leave
by streaming stores. Across nodes, and for what is left of a row, they are kept in L1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from torch import Tensor

from tokenyard.kernels.numba.atomics import LINE
from tokenyard.kernels.numba.intrinsics import (
    LANES,
    LIKE,
    WIDE_LANES,
    add_lanes,
    add_one,
    fold_lanes,
    fold_one,
    pointer,
    put_lanes,
    put_one,
    sum_rows,
    sum_rows_streaming,
)
from tokenyard.kernels.numba.threads import in_channels
from tokenyard.types import Route

_INT32 = np.empty(0, np.int32)
_STREAMING = 1 << 20  # bytes from which a result is unlikely to be read again from the cache
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
def _sum_token(out, sources, count, hidden, streaming, like, sums):
    """out[:] = the sum of `count` rows, whose addresses are in `sources`."""
    addresses = sources.ctypes.data
    whole = hidden - hidden % WIDE_LANES
    if streaming:
        for d in range(0, whole, WIDE_LANES):
            sum_rows_streaming(out, addresses, count, d, like)
    else:
        for d in range(0, whole, WIDE_LANES):
            sum_rows(out, addresses, count, d, like)
    if whole < hidden:
        total, target = pointer(sums.ctypes.data, sums), pointer(out, like)
        for i in range(hidden - whole):
            total[i] = 0
        for c in range(count):
            _add_piece(total, pointer(sources[c], like), whole, hidden - whole)
        _put_piece(target, whole, total, hidden - whole)


@njit(nogil=True, cache=True)
def _reduce_kernel(
    bases, copy_start, copy_rank, copy_slot, biases, out, hidden, begin, end, streaming, like, sums
):
    """One node. `bases[r]` is the address of rank r's rows; `sums` is scratch for a piece, wide."""
    starts, ranks, slots = (
        pointer(copy_start, _INT32),
        pointer(copy_rank, _INT32),
        pointer(copy_slot, _INT32),
    )
    row_bytes = hidden * np.int64(like.itemsize)
    num_biases = biases.shape[0]
    sources = np.empty(num_biases + bases.shape[0], np.int64)
    for t in range(begin, end):
        for b in range(num_biases):
            sources[b] = biases[b] + t * row_bytes
        count = num_biases
        for c in range(starts[t], starts[t + 1]):
            sources[count] = bases[ranks[c]] + np.int64(slots[c]) * row_bytes
            count += 1
        _sum_token(out + t * row_bytes, sources, count, hidden, streaming, like, sums)


@njit(nogil=True, cache=True)
def _reduce_nodes_kernel(
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
    """Several nodes, whose partial sums are rounded. `sums` is scratch for two pieces, wide."""
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
        for d in range(0, hidden, _PIECE):
            count = min(_PIECE, hidden - d)
            for i in range(count):
                total[i] = 0
            for b in range(biases.shape[0]):
                _add_piece(total, pointer(biases[b], like), row + d, count)
            for node in range(num_nodes):
                for i in range(count):
                    partial[i] = 0
                for c in range(starts[t], starts[t + 1]):
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
    addresses = np.array([rows.data_ptr() for rows in rows_by_rank], np.int64)
    reduce_at(addresses, route, node_of_rank, biases_TD, out_TD)
    return out_TD


def reduce_at(
    addresses_R: np.ndarray,
    route: Route,
    node_of_rank: Sequence[int],
    biases_TD: Sequence[Tensor],
    out_TD: Tensor,
) -> None:
    """As reduce, given where each rank's first row lies."""
    num_tokens, hidden = out_TD.shape
    if num_tokens == 0:
        return
    like = LIKE[out_TD.dtype]
    wide = np.float64 if like.dtype == np.float64 else np.float32
    biases = np.array([bias.data_ptr() for bias in biases_TD], np.int64)
    lists = (route.copy_start.data_ptr(), route.copy_rank.data_ptr(), route.copy_slot.data_ptr())
    num_nodes = max(node_of_rank) + 1
    out, row_bytes = out_TD.data_ptr(), hidden * like.itemsize
    moved = (route.copy_rank.shape[0] + num_tokens) * row_bytes
    streaming = moved >= _STREAMING and out % LINE == 0 and row_bytes % LINE == 0

    def part(begin: int, end: int) -> None:
        sums = np.empty(2 * _PIECE, wide)
        if num_nodes == 1:
            _reduce_kernel(
                addresses_R, *lists, biases, out, hidden, begin, end, streaming, like, sums
            )
        else:
            nodes = np.array(node_of_rank, np.int32)
            _reduce_nodes_kernel(
                addresses_R, *lists, nodes, num_nodes, biases, out, hidden, begin, end, like, sums
            )

    in_channels(part, num_tokens, moved)
