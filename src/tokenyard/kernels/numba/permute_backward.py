"""The gradients of unpermute: each row of grad is read once for all its experts.

A weight's gradient is a dot product, whose terms are added in the order of `spec`: 16 sums, of
which element d goes to sum d % 16, and then these by halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm import vectors
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import INT64, LIKE, pointer
from tokenyard.kernels.numba.llvm.sums import _broadcast, _put
from tokenyard.kernels.numba.llvm.vectors import LANES
from tokenyard.kernels.numba.permute import _find_outside, _mark_kernel, _zero_kernel
from tokenyard.kernels.numba.rows import may_stream
from tokenyard.runtime.threads import in_threads
from tokenyard.types import UnpermuteGrads
from tokenyard.wire import int64s
from tokenyard.wire.columns import LINE

# The words of a call's table. Strides are in bytes; what has one, or is in rows, is an address.
_GRAD, _GRAD_STRIDE, _Y, _Y_STRIDE, _GRAD_Y, _GRAD_Y_STRIDE = range(6)
_ROW_OF, _WEIGHTS, _GRAD_WEIGHTS = range(6, 9)  # addresses of [N, K]
_NUM_TOPK, _HIDDEN, _STREAMING = range(9, 12)
_WORDS = 12


def _make(lanes: Any, streaming: Any = False) -> Any:
    @intrinsic
    def scale_and_dot(typingctx, out, grad, y, weight, sums, begin, end, like):
        """For d in range(begin, end, lanes), and `lanes` elements at once:

        out[d] = narrow(weight * grad[d]); sums[0] += grad[d] * y[d]

        The first three and `sums` are addresses; `sums` are wide, and kept in a register meanwhile.
        If streaming, out + begin must be on a line's boundary.
        """
        dtype = like.dtype
        i64 = types.int64
        sig = types.void(i64, i64, i64, vectors.wide(dtype), i64, i64, i64, like)

        def codegen(context, builder, signature, args):
            out, grad, y, weight, sums, begin, end, _ = args
            narrow, wide = vectors.element(dtype), vectors.element(vectors.wide(dtype))
            out, grad, y = (builder.inttoptr(one, narrow.as_pointer()) for one in (out, grad, y))
            sums = builder.inttoptr(sums, wide.as_pointer())
            weight = _broadcast(builder, weight, lanes)
            zero = begin.type(0)
            total = cgutils.alloca_once_value(
                builder, vectors.load(builder, sums, zero, wide, lanes)
            )
            with cgutils.for_range_slice(builder, begin, end, begin.type(lanes)) as (at, _):
                term = vectors.widen(
                    builder, vectors.load(builder, grad, at, narrow, lanes), dtype, lanes
                )
                other = vectors.widen(
                    builder, vectors.load(builder, y, at, narrow, lanes), dtype, lanes
                )
                value = vectors.narrow(builder, builder.fmul(weight, term), dtype, lanes)
                _put(builder, value, out, at, dtype, lanes, streaming)
                product = builder.fmul(term, other)
                builder.store(builder.fadd(builder.load(total), product), total)
            vectors.store(builder, builder.load(total), sums, zero, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    return scale_and_dot


_many = _make(LANES)
_many_streaming = _make(LANES, streaming=True)
_one = _make(1)


@njit(nogil=True, cache=True)
def _scale_and_dot(out, grad, y, weight, sums, hidden, streaming, like):
    """out[:] = weight * grad; returns the dot product of grad and y. `sums` is scratch, LANES."""
    size = like.itemsize
    whole = hidden - hidden % LANES
    sums[:] = 0
    address = sums.ctypes.data
    if streaming:
        _many_streaming(out, grad, y, weight, address, 0, whole, like)
    else:
        _many(out, grad, y, weight, address, 0, whole, like)
    for d in range(whole, hidden):
        lane = address + (d - whole) * sums.itemsize
        _one(out + d * size, grad + d * size, y + d * size, weight, lane, 0, 1, like)
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            sums[lane] += sums[half + lane]
        half //= 2
    return sums[0]


@njit(nogil=True, cache=True)
def _unpermute_backward_kernel(table, begin, end, like, sums):
    words = pointer(table, INT64)
    grad, grad_stride = words[_GRAD], words[_GRAD_STRIDE]
    y, y_stride = words[_Y], words[_Y_STRIDE]
    grad_y, grad_y_stride = words[_GRAD_Y], words[_GRAD_Y_STRIDE]
    num_topk, hidden, streaming = words[_NUM_TOPK], words[_HIDDEN], words[_STREAMING] != 0
    places = pointer(words[_ROW_OF], INT64)
    given, out = pointer(words[_WEIGHTS], sums), pointer(words[_GRAD_WEIGHTS], sums)
    for n in range(begin, end):
        source = grad + n * grad_stride
        for i in range(n * num_topk, (n + 1) * num_topk):
            if places[i] < 0:
                out[i] = 0
                continue
            target = grad_y + places[i] * grad_y_stride
            result = y + places[i] * y_stride
            out[i] = _scale_and_dot(target, source, result, given[i], sums, hidden, streaming, like)
    fence_stores()


def unpermute_backward(
    grad_ND: Tensor, y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor, out: UnpermuteGrads
) -> int:
    (num_rows, num_topk), (num_places, hidden) = row_of_NK.shape, y_MD.shape
    row_of, numel = row_of_NK.data_ptr(), row_of_NK.numel()
    first_bad = _find_outside(row_of, numel, num_places)
    if first_bad >= 0:
        return first_bad
    like = LIKE[y_MD.dtype]
    wide = np.float64 if like.dtype == np.float64 else np.float32
    size, row_bytes = like.itemsize, hidden * like.itemsize
    grad_y, grad_y_stride = out.y.data_ptr(), out.y.stride(0) * size
    marks = np.zeros(num_places, np.uint8)
    num_copies = _mark_kernel(row_of, numel, marks)
    streaming = may_stream(row_bytes, num_copies * row_bytes) and grad_y % LINE == 0
    streaming = streaming and grad_y_stride % LINE == 0
    table = int64s.new(_WORDS)
    table[_GRAD] = grad_ND.data_ptr()
    table[_GRAD_STRIDE] = grad_ND.stride(0) * size
    table[_Y] = y_MD.data_ptr()
    table[_Y_STRIDE] = y_MD.stride(0) * size
    table[_ROW_OF] = row_of
    table[_WEIGHTS] = weights_NK.data_ptr()
    table[_NUM_TOPK] = num_topk
    table[_GRAD_Y] = grad_y
    table[_GRAD_Y_STRIDE] = grad_y_stride
    table[_GRAD_WEIGHTS] = out.weights.data_ptr()
    table[_HIDDEN] = hidden
    table[_STREAMING] = streaming
    call = int64s.address(table)

    def part(begin: int, end: int) -> None:
        _unpermute_backward_kernel(call, begin, end, like, np.empty(LANES, wide))

    def zero(begin: int, end: int) -> None:
        _zero_kernel(grad_y, grad_y_stride, row_bytes, marks, begin, end)

    if num_rows:
        in_threads(part, num_rows, 2 * num_copies * row_bytes)
    if num_copies < num_places:
        in_threads(zero, num_places, (num_places - num_copies) * row_bytes)
    return -1
