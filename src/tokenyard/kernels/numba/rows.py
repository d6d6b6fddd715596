"""Moving rows of bytes by index, and renaming the experts in them.

`copy_row` is how kernels copy a row. Where much is moved, long rows are streamed past the cache:
whoever calls it fences (`fence_stores`) before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, from_numpy

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, prefetch, stream_line
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, copy_bytes, pointer
from tokenyard.runtime import memory
from tokenyard.runtime.threads import in_threads
from tokenyard.types import Route, SentPairs
from tokenyard.wire.columns import LINE

_LONG_ROW = 1024
_MUCH = 1 << 22  # bytes that are unlikely to be read again from the cache
_PIECE = 512  # bytes of a row that go to all its ranks before the next ones
_AHEAD = 1024  # bytes that are read before they are needed


@njit(nogil=True, cache=True)
def whole_lines(num_bytes):
    """Bytes of the cache lines that so many bytes take: columns of rows begin on lines."""
    return (num_bytes + LINE - 1) // LINE * LINE


@njit(nogil=True, cache=True)
def _stream_row(target, source, num_bytes):
    """Whole lines by streaming stores, the ends the ordinary way."""
    head = min((-target) % LINE, num_bytes)
    if head > 0:
        copy_bytes(target, source, head)
    lines = (num_bytes - head) // LINE
    for i in range(lines):
        stream_line(target + head + i * LINE, source + head + i * LINE)
    done = head + lines * LINE
    if done < num_bytes:
        copy_bytes(target + done, source + done, num_bytes - done)


@njit(nogil=True, cache=True)
def copy_row(target, source, num_bytes, streaming):
    if streaming:
        _stream_row(target, source, num_bytes)
    else:
        copy_bytes(target, source, num_bytes)


@njit(nogil=True, cache=True)
def stream_row_to(targets, count, source, num_bytes):
    """Whole lines of a row to the `count` addresses that `targets` points to, all on lines: each
    piece is read once, and the next ones are on their way meanwhile.
    """
    to = pointer(targets, INT64)
    for begin in range(0, num_bytes, _PIECE):
        end = min(begin + _PIECE, num_bytes)
        for i in range(begin, end, LINE):
            prefetch(source + i + _AHEAD)
        for c in range(count):
            for i in range(begin, end, LINE):
                stream_line(to[c] + i, source + i)


@njit(nogil=True, cache=True)
def streams(num_bytes, moved):
    """As `may_stream`, inside kernels."""
    return num_bytes >= _LONG_ROW and moved >= _MUCH


def may_stream(num_bytes: int, moved: int) -> bool:
    """Whether rows go past the cache: long ones do, if all of them are too much to be read again
    from it.
    """
    return num_bytes >= _LONG_ROW and moved >= _MUCH


@njit(nogil=True, cache=True)
def _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end, streaming):
    tokens = pointer(index, INT32)
    for n in range(begin, end):
        token = np.int64(tokens[n]) if index != 0 else np.int64(n)
        copy_row(out + np.int64(n) * out_stride, x + token * x_stride, num_bytes, streaming)
    fence_stores()


def pack(x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor:
    num_rows, num_bytes = out_NB.shape
    index = 0 if index_N is None else index_N.data_ptr()
    x, x_stride = x_TB.data_ptr(), x_TB.stride(0)
    out, out_stride = out_NB.data_ptr(), out_NB.stride(0)

    streaming = may_stream(num_bytes, num_rows * num_bytes)

    def part(begin: int, end: int) -> None:
        _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end, streaming)

    if num_rows:
        in_threads(part, num_rows, num_rows * num_bytes)
    return out_NB


@njit(nogil=True, cache=True)
def _targets(columns, blocks, firsts, rows):
    """[columns, R]: where this rank's first row of each column goes in each rank's block."""
    targets = np.empty((columns.shape[0], blocks.shape[0]), np.int64)
    for r in range(blocks.shape[0]):
        at = blocks[r]
        for j in range(columns.shape[0]):
            width = columns[j, 1]
            targets[j, r] = at + firsts[r] * width
            at += whole_lines(rows[r] * width)
    return targets


@njit(nogil=True, cache=True)
def _scatter_kernel(columns, starts, ranks, slots, blocks, firsts, rows, begin, end, much):
    first, to, at = pointer(starts, INT32), pointer(ranks, INT32), pointer(slots, INT32)
    targets = _targets(columns, blocks, firsts, rows)
    together = np.empty(blocks.shape[0], np.int64)
    for t in range(begin, end):
        for j in range(columns.shape[0]):
            row, width = columns[j, 0] + np.int64(t) * columns[j, 2], columns[j, 1]
            if much and width >= _LONG_ROW and width % LINE == 0:
                count, bits = 0, np.int64(0)
                for c in range(first[t], first[t + 1]):
                    if blocks[to[c]] != 0:
                        together[count] = targets[j, to[c]] + np.int64(at[c]) * width
                        bits |= together[count]
                        count += 1
                if bits % LINE == 0:
                    stream_row_to(together.ctypes.data, count, row, width)
                    continue
            for c in range(first[t], first[t + 1]):
                if blocks[to[c]] != 0:
                    target = targets[j, to[c]] + np.int64(at[c]) * width
                    copy_row(target, row, width, much and width >= _LONG_ROW)
    fence_stores()


def scatter(
    columns: Sequence[Tensor],
    route: Route,
    blocks_R: np.ndarray,
    starts_R: np.ndarray,
    rows_R: np.ndarray,
) -> None:
    """Each token's row into its slot in each of its ranks' memory: read once, written to all.

    A rank's block has `rows` rows of each column, one column after the other, each from a new cache
    line. This rank's rows begin with number `starts` there. Where a block is 0, rows for that rank
    are left out. Rows of a column may lie apart, as they do in records.
    """
    num_tokens = columns[0].shape[0]
    if num_tokens == 0:
        return
    values, width = _column_table(columns)
    starts, ranks = route.copy_start.data_ptr(), route.copy_rank.data_ptr()
    slots, moved = route.copy_slot.data_ptr(), route.copy_rank.shape[0] * width
    much = moved >= _MUCH

    def part(begin: int, end: int) -> None:
        _scatter_kernel(values, starts, ranks, slots, blocks_R, starts_R, rows_R, begin, end, much)

    in_threads(part, num_tokens, moved)


@njit(nogil=True, cache=True)
def _place_pairs_kernel(topk_idx, rank_of_expert, following, num_pairs, places, ranks):
    """`following` has the next row of each expert, and is counted up."""
    ids, homes = pointer(topk_idx, INT64), pointer(rank_of_expert, INT32)
    place_of, rank_of = pointer(places, INT64), pointer(ranks, INT32)
    for i in range(num_pairs):
        expert = ids[i]
        if expert < 0:
            place_of[i] = -1
            rank_of[i] = -1
        else:
            place_of[i] = following[expert]
            rank_of[i] = homes[expert]
            following[expert] += 1


def place_pairs(
    topk_idx_TK: Tensor, rank_of_expert_E: Tensor, first_E: np.ndarray
) -> tuple[Tensor, Tensor]:
    """[T, K] int64 and int32: the row of each pair on its expert's rank, and that rank; -1 where
    there is no expert. An expert's rows begin with number `first`.
    """
    places = from_numpy(memory.empty_array(tuple(topk_idx_TK.shape), np.int64))
    ranks = from_numpy(memory.empty_array(tuple(topk_idx_TK.shape), np.int32))
    _place_pairs_kernel(
        topk_idx_TK.data_ptr(),
        rank_of_expert_E.data_ptr(),
        first_E.copy(),
        topk_idx_TK.numel(),
        places.data_ptr(),
        ranks.data_ptr(),
    )
    return places, ranks


@njit(nogil=True, cache=True)
def _scatter_pairs_kernel(columns, places, ranks, num_topk, blocks, rows, begin, end, much):
    place_of, rank_of = pointer(places, INT64), pointer(ranks, INT32)
    targets = _targets(columns, blocks, np.zeros_like(rows), rows)
    together = np.empty(num_topk, np.int64)
    for t in range(begin, end):
        for j in range(columns.shape[0]):
            row, width = columns[j, 0] + np.int64(t) * columns[j, 2], columns[j, 1]
            count, bits = 0, width
            for i in range(t * num_topk, (t + 1) * num_topk):
                if place_of[i] >= 0:
                    together[count] = targets[j, rank_of[i]] + place_of[i] * width
                    bits |= together[count]
                    count += 1
            streaming = much and width >= _LONG_ROW
            if streaming and bits % LINE == 0:
                stream_row_to(together.ctypes.data, count, row, width)
            else:
                for c in range(count):
                    copy_row(together[c], row, width, streaming)
    fence_stores()


def scatter_by_expert(columns: Sequence[Tensor], sent: SentPairs, blocks_R: np.ndarray) -> None:
    """Each token's row to the place of each of its pairs: read once, written to all.

    A rank's block has `sent.rows_R` rows of each column, one column after the other, each from a
    new cache line.
    """
    num_tokens, num_topk = sent.place_TK.shape
    if num_tokens == 0:
        return
    values, width = _column_table(columns)
    places, ranks = sent.place_TK.data_ptr(), sent.rank_TK.data_ptr()
    moved = num_tokens * num_topk * width
    rows_R, much = sent.rows_R, moved >= _MUCH

    def part(begin: int, end: int) -> None:
        _scatter_pairs_kernel(values, places, ranks, num_topk, blocks_R, rows_R, begin, end, much)

    in_threads(part, num_tokens, moved)


def _column_table(columns: Sequence[Tensor]) -> tuple[np.ndarray, int]:
    """[columns, 3] int64: where each begins, the bytes of a row, and how far rows lie apart. And
    the bytes of a row of all columns.
    """
    table, width = [], 0
    for column in columns:
        each = column.shape[1] * column.element_size()
        table.append((column.data_ptr(), each, column.stride(0) * column.element_size()))
        width += each
    return np.array(table, np.int64), width


@njit(nogil=True, cache=True)
def localise_kernel(topk_idx, topk_weights, table, num_pairs, num_experts):
    ids = pointer(topk_idx, INT64)
    weights = pointer(topk_weights, FLOAT32)
    local = pointer(table, INT64)
    for i in range(num_pairs):
        expert = ids[i]
        here = local[expert] if 0 <= expert < num_experts else -1
        ids[i] = here
        if here < 0 and topk_weights != 0:
            weights[i] = 0.0


def localise(
    topk_idx_NK: Tensor, topk_weights_NK: Tensor | None, local_of_expert_E: Tensor
) -> None:
    localise_kernel(
        topk_idx_NK.data_ptr(),
        0 if topk_weights_NK is None else topk_weights_NK.data_ptr(),
        local_of_expert_E.data_ptr(),
        topk_idx_NK.numel(),
        local_of_expert_E.shape[0],
    )
