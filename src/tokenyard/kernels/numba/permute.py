"""Rows to their local experts and back.

`place` finds each row's places, `spread` copies it there, `unpermute` sums what the experts made of
its copies.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard.kernels.numba.align import count_ids, slot_of
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, LIKE, UINT8, pointer
from tokenyard.kernels.numba.llvm.sums import sum_scaled
from tokenyard.kernels.numba.rows import copy_row, may_stream
from tokenyard.runtime import memory
from tokenyard.runtime.threads import in_threads
from tokenyard.types import Places
from tokenyard.wire.columns import LINE


@njit(nogil=True, cache=True)
def _place_pairs(ids, starts, places, numel):
    for i in range(numel):
        slot = slot_of(ids[i])
        place = places[i] + starts[slot]
        places[i] = place if slot > np.uint64(0) else -1


@njit(nogil=True, cache=True)
def _place_kernel(topk_idx, is_wide, numel, num_experts, alignment, row_of, offsets):
    """The number of rows, padding included; or -1 - p, where p is the first bad id's place.

    Wide ids are int64, others int32. A pair's rank is kept where its row will be.
    """
    starts = np.empty(num_experts + 1, np.int64)
    places, ends = pointer(row_of, INT64), pointer(offsets, INT32)
    if is_wide:
        first_bad = count_ids(pointer(topk_idx, INT64), starts, places, 0, numel, num_experts)
    else:
        first_bad = count_ids(pointer(topk_idx, INT32), starts, places, 0, numel, num_experts)
    if first_bad >= 0:
        return -1 - first_bad
    end = np.int64(0)
    for e in range(num_experts):
        count = starts[e + 1]
        starts[e + 1] = end
        end += (count + alignment - 1) // alignment * alignment
        ends[e] = end
    if is_wide:
        _place_pairs(pointer(topk_idx, INT64), starts, places, numel)
    else:
        _place_pairs(pointer(topk_idx, INT32), starts, places, numel)
    return end


def place(topk_idx_NK: Tensor, num_experts: int, expert_alignment: int) -> tuple[Places, int]:
    row_of = from_numpy(memory.empty_array(tuple(topk_idx_NK.shape), np.int64))
    offsets = from_numpy(memory.empty_array(num_experts, np.int32))
    num_rows = _place_kernel(
        topk_idx_NK.data_ptr(),
        topk_idx_NK.dtype is torch.int64,
        topk_idx_NK.numel(),
        num_experts,
        expert_alignment,
        row_of.data_ptr(),
        offsets.data_ptr(),
    )
    if num_rows < 0:
        return Places(row_of, offsets, 0), -1 - num_rows
    return Places(row_of, offsets, num_rows), -1


@njit(nogil=True, cache=True)
def _spread_kernel(
    x, x_stride, row_of, num_topk, out, out_stride, num_bytes, begin, end, streaming
):
    places = pointer(row_of, INT64)
    for n in range(begin, end):
        source = x + n * x_stride
        for i in range(n * num_topk, (n + 1) * num_topk):
            if places[i] < 0:
                continue
            target = out + places[i] * out_stride
            copy_row(target, source, num_bytes, streaming)
    fence_stores()


@njit(nogil=True, cache=True)
def _mark_kernel(row_of, numel, marks):
    """marks[m] = 1 for every row that a pair went to; how many pairs did."""
    places, marked = pointer(row_of, INT64), np.int64(0)
    for i in range(numel):
        if places[i] >= 0:
            marks[places[i]] = 1
            marked += 1
    return marked


@njit(nogil=True, cache=True)
def _zero_kernel(out, out_stride, num_bytes, marks, begin, end):
    for m in range(begin, end):
        if marks[m] == 0:
            row = pointer(out + m * out_stride, UINT8)
            for i in range(num_bytes):
                row[i] = 0


def spread(x_NB: Tensor, row_of_NK: Tensor, out_MB: Tensor) -> Tensor:
    (num_rows, num_topk), (num_places, num_bytes) = row_of_NK.shape, out_MB.shape
    x, x_stride = x_NB.data_ptr(), x_NB.stride(0)
    out, out_stride = out_MB.data_ptr(), out_MB.stride(0)
    row_of = row_of_NK.data_ptr()
    marks = np.zeros(num_places, np.uint8)
    num_copies = _mark_kernel(row_of, num_rows * num_topk, marks)
    streaming = may_stream(num_bytes, num_copies * num_bytes)

    def copy(begin: int, end: int) -> None:
        _spread_kernel(
            x, x_stride, row_of, num_topk, out, out_stride, num_bytes, begin, end, streaming
        )

    def zero(begin: int, end: int) -> None:
        _zero_kernel(out, out_stride, num_bytes, marks, begin, end)

    if num_copies:
        in_threads(copy, num_rows, num_copies * num_bytes)
    if num_copies < num_places:
        in_threads(zero, num_places, (num_places - num_copies) * num_bytes)
    return out_MB


@njit(nogil=True, cache=True)
def _find_outside(row_of, numel, num_rows):
    places = pointer(row_of, INT64)
    for i in range(numel):
        if places[i] < -1 or places[i] >= num_rows:
            return i
    return -1


@njit(nogil=True, cache=True)
def _unpermute_kernel(
    y, y_stride, row_of, weights, out, out_stride, hidden, begin, end, streaming, like, factors
):
    """`factors` is scratch for a row's K weights, wide; `weights` is 0 where all are 1."""
    places, given = pointer(row_of, INT64), pointer(weights, factors)
    num_topk = factors.shape[0]
    sources = np.empty(num_topk, np.int64)
    for n in range(begin, end):
        count = 0
        for i in range(n * num_topk, (n + 1) * num_topk):
            if places[i] >= 0:
                sources[count] = y + places[i] * y_stride
                factors[count] = given[i] if weights != 0 else 1
                count += 1
        target, terms = out + n * out_stride, sources.ctypes.data
        sum_scaled(target, terms, factors.ctypes.data, count, hidden, streaming, like)
    fence_stores()


def unpermute(y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor | None, out_ND: Tensor) -> int:
    (num_rows, num_topk), hidden = row_of_NK.shape, y_MD.shape[1]
    row_of = row_of_NK.data_ptr()
    # Before any thread starts: the kernel makes addresses of these numbers.
    first_bad = _find_outside(row_of, num_rows * num_topk, y_MD.shape[0])
    if first_bad >= 0:
        return first_bad
    like = LIKE[y_MD.dtype]
    wide = np.float64 if like.dtype == np.float64 else np.float32
    size = like.itemsize
    y, y_stride = y_MD.data_ptr(), y_MD.stride(0) * size
    out, out_stride = out_ND.data_ptr(), out_ND.stride(0) * size
    weights = 0 if weights_NK is None else weights_NK.data_ptr()
    streaming = (
        may_stream(hidden * size, num_rows * hidden * size) and out % LINE == 0 == out_stride % LINE
    )

    def part(begin: int, end: int) -> None:
        rows = y, y_stride, row_of, weights, out, out_stride, hidden
        _unpermute_kernel(*rows, begin, end, streaming, like, np.empty(num_topk, wide))

    if num_rows:
        in_threads(part, num_rows, (num_rows + y_MD.shape[0]) * hidden * size)
    return -1
