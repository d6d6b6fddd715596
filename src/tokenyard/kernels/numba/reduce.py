"""The sum of combine: each token's rows, wherever they lie, added up in float32 or float64.

On one node the sums of 128 elements stay in registers while all ranks' pieces are added, and leave
by streaming stores. Across nodes the sums are kept in L1.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from torch import Tensor

from tokenyard.kernels.base import NodeOfRank, Tensors
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, LIKE, pointer
from tokenyard.kernels.numba.llvm.sums import (
    add_lanes,
    add_one,
    fold_lanes,
    fold_one,
    put_lanes,
    put_one,
    sum_plain,
)
from tokenyard.kernels.numba.llvm.vectors import LANES
from tokenyard.runtime.threads import in_threads
from tokenyard.types import Route
from tokenyard.wire.columns import LINE

_STREAMING = 1 << 20  # bytes from which a result is unlikely to be read again from the cache
NO_NODE = -1  # the home of a bias
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
def _sum_nodes(out, sources, homes, count, num_nodes, hidden, like, total, partial):
    rows, home = pointer(sources, INT64), pointer(homes, INT32)
    for d in range(0, hidden, _PIECE):
        width = min(_PIECE, hidden - d)
        for i in range(width):
            total[i] = 0
        for c in range(count):
            if home[c] == NO_NODE:
                _add_piece(total, pointer(rows[c], like), d, width)
        for node in range(num_nodes):
            for i in range(width):
                partial[i] = 0
            for c in range(count):
                if home[c] == node:
                    _add_piece(partial, pointer(rows[c], like), d, width)
            # Rounded as it would be if a relay of that node had made the sum.
            _fold_piece(total, partial, width, like)
        _put_piece(pointer(out, like), d, total, width)


@njit(nogil=True, cache=True)
def sum_token(out, sources, homes, count, num_nodes, hidden, streaming, like, sums):
    """out[:] = the sum of `count` rows, whose addresses `sources` points to, in their order.

    Where there are several nodes, the rows of each are summed and rounded first; `homes` points to
    the node of each row, an int32, NO_NODE for biases, which come before all nodes. `sums` is from
    `scratch`. (Addresses, since arrays are counted whenever they are handed on.)
    """
    total = pointer(sums.ctypes.data, sums)
    if num_nodes == 1:
        sum_plain(out, sources, count, hidden, streaming, like)
    else:
        partial = pointer(sums.ctypes.data + _PIECE * sums.itemsize, sums)
        _sum_nodes(out, sources, homes, count, num_nodes, hidden, like, total, partial)


@cache
def node_table(node_of_rank: tuple[int, ...]) -> np.ndarray:
    """The node of each rank, as an array."""
    return np.array(node_of_rank, np.int32)


def scratch(like: np.ndarray) -> np.ndarray:
    """Room for two pieces of sums, for one thread."""
    return np.empty(2 * _PIECE, np.float64 if like.dtype == np.float64 else np.float32)


def may_stream(out: int, row_bytes: int, moved: int) -> bool:
    """Whether rows of sums go past the cache: whole lines, too many to be read again from it."""
    return moved >= _STREAMING and out % LINE == 0 and row_bytes % LINE == 0


streams_sums = njit(nogil=True, cache=True)(may_stream)  # for kernels


@njit(nogil=True, cache=True)
def _reduce_kernel(
    bases, nodes, copy_start, copy_rank, copy_slot, out, hidden, begin, end, streaming, like, sums
):
    """`bases` are addresses: of each rank's rows, and after them of the biases."""
    starts, ranks = pointer(copy_start, INT32), pointer(copy_rank, INT32)
    slots, row_bytes = pointer(copy_slot, INT32), hidden * np.int64(like.itemsize)
    num_ranks, num_nodes = nodes.shape[0], np.int64(1)
    for r in range(num_ranks):
        num_nodes = max(num_nodes, np.int64(nodes[r]) + 1)
    num_biases = bases.shape[0] - num_ranks
    sources = np.empty(bases.shape[0], np.int64)
    homes = np.full(bases.shape[0], NO_NODE, np.int32)
    for t in range(begin, end):
        for b in range(num_biases):
            sources[b] = bases[num_ranks + b] + t * row_bytes
        count = num_biases
        for c in range(starts[t], starts[t + 1]):
            sources[count] = bases[ranks[c]] + np.int64(slots[c]) * row_bytes
            homes[count] = nodes[ranks[c]]
            count += 1
        sum_token(
            out + t * row_bytes,
            sources.ctypes.data,
            homes.ctypes.data,
            count,
            num_nodes,
            hidden,
            streaming,
            like,
            sums,
        )
    fence_stores()


def reduce(
    rows_ND: Tensor, route: Route, node_of_rank: NodeOfRank, biases_TD: Tensors, out_TD: Tensor
) -> Tensor:
    counts = np.array(route.send_counts, np.int64)
    first_rows = np.cumsum(counts) - counts
    addresses = rows_ND.data_ptr() + first_rows * (rows_ND.shape[1] * rows_ND.element_size())
    reduce_at(addresses, route, node_of_rank, biases_TD, out_TD)
    return out_TD


def reduce_at(
    bases_R: np.ndarray, route: Route, node_of_rank: NodeOfRank, biases_TD: Tensors, out_TD: Tensor
) -> None:
    """Sum as `reduce` does, given the address of each rank's first row."""
    num_tokens, hidden = out_TD.shape
    if num_tokens == 0:
        return
    like = LIKE[out_TD.dtype]
    bases = bases_R
    if biases_TD:
        biases = [bias.data_ptr() for bias in biases_TD]
        bases = np.concatenate((bases_R, np.array(biases, np.int64)))
    lists = (route.copy_start.data_ptr(), route.copy_rank.data_ptr(), route.copy_slot.data_ptr())
    nodes = node_table(tuple(node_of_rank))
    out, row_bytes = out_TD.data_ptr(), hidden * like.itemsize
    moved = (route.copy_rank.shape[0] + num_tokens) * row_bytes
    streaming = may_stream(out, row_bytes, moved)

    def part(begin: int, end: int) -> None:
        sums = scratch(like)
        _reduce_kernel(bases, nodes, *lists, out, hidden, begin, end, streaming, like, sums)

    in_threads(part, num_tokens, moved)
