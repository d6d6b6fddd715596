"""Moving rows of bytes by index, and renaming the experts in them.

`copy_row` is how kernels copy a row. Where much is moved, long rows are streamed past the cache: a
kernel that calls it fences (`fence_stores`) before it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, prefetch, stream_line
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, copy_bytes, pointer
from tokenyard.runtime.threads import in_threads
from tokenyard.types import Route
from tokenyard.wire.columns import LINE

_LONG_ROW = 1024
MUCH = 1 << 22  # bytes that are unlikely to be read again from the cache
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
            prefetch(source + i + _AHEAD)  # also past the row's end: a prefetch cannot fail
        for c in range(count):
            for i in range(begin, end, LINE):
                stream_line(to[c] + i, source + i)


@njit(nogil=True, cache=True)
def streams(num_bytes, moved):
    """Whether rows go past the cache: `may_stream` for kernels."""
    return num_bytes >= _LONG_ROW and moved >= MUCH


def may_stream(num_bytes: int, moved: int) -> bool:
    """Whether rows go past the cache: long ones do, if all of them are too much to be read again
    from it.
    """
    return num_bytes >= _LONG_ROW and moved >= MUCH


@njit(nogil=True, cache=True)
def _pack_kernel(x, x_stride, index, out, out_stride, num_bytes, begin, end, streaming):
    tokens = pointer(index, INT32)
    for n in range(begin, end):
        token = np.int64(tokens[n]) if index != 0 else np.int64(n)
        copy_row(out + np.int64(n) * out_stride, x + token * x_stride, num_bytes, streaming)
    # Here, on the thread that streamed: another thread may raise the signal.
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
def scatter_rows(columns, places, lists, num_columns, num_ranks, begin, end, streaming, targets):
    """Write each of these tokens' rows to all places where it belongs: read once, written to all.

    `columns` is the address of three words a column: where it begins, the bytes of a row, and how
    far rows lie apart. `places` has for each column and rank the address of the rank's first row,
    or 0 if its rows are left out. `lists` points to copy_start, copy_rank and copy_slot of a Route;
    `targets` to room for as many addresses as there are ranks.
    """
    at, to, list_of = pointer(places, INT64), pointer(targets, INT64), pointer(lists, INT64)
    starts, ranks = pointer(list_of[0], INT32), pointer(list_of[1], INT32)
    slots = pointer(list_of[2], INT32)
    for j in range(num_columns):
        column = pointer(columns + 24 * j, INT64)
        width = column[1]
        for t in range(begin, end):
            row = column[0] + np.int64(t) * column[2]
            # The low bits of the width and of all targets: 0 if all of them are on lines.
            count, bits = 0, width
            for c in range(starts[t], starts[t + 1]):
                first = at[j * num_ranks + ranks[c]]
                if first != 0:
                    to[count] = first + np.int64(slots[c]) * width
                    bits |= to[count]
                    count += 1
            if streaming and width >= _LONG_ROW and bits % LINE == 0:
                stream_row_to(targets, count, row, width)
            else:
                for c in range(count):
                    copy_row(to[c], row, width, streaming and width >= _LONG_ROW)


@njit(nogil=True, cache=True)
def _scatter_kernel(columns, lists, blocks, firsts, rows, begin, end, streaming):
    num_columns, num_ranks = columns.shape[0], blocks.shape[0]
    places, targets = np.zeros((num_columns, num_ranks), np.int64), np.empty(num_ranks, np.int64)
    for r in range(num_ranks):
        at = blocks[r]
        for j in range(num_columns):
            width = columns[j, 1]
            if blocks[r] != 0:
                places[j, r] = at + firsts[r] * width
            at += whole_lines(rows[r] * width)
    addresses = columns.ctypes.data, places.ctypes.data, lists.ctypes.data
    scatter_rows(*addresses, num_columns, num_ranks, begin, end, streaming, targets.ctypes.data)
    fence_stores()


def scatter(
    columns: Sequence[Tensor],
    route: Route,
    blocks_R: np.ndarray,
    starts_R: np.ndarray,
    rows_R: np.ndarray,
) -> None:
    num_tokens = columns[0].shape[0]
    if num_tokens == 0:
        return
    values, width = _column_table(columns)
    listed = route.copy_start, route.copy_rank, route.copy_slot
    lists = np.array([one.data_ptr() for one in listed], np.int64)
    moved = route.copy_rank.shape[0] * width
    streaming = moved >= MUCH

    def part(begin: int, end: int) -> None:
        _scatter_kernel(values, lists, blocks_R, starts_R, rows_R, begin, end, streaming)

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
        # Other ranks wrote these ids: none outside the table may become an address.
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
