"""What Numba has no word for: typed pointers from addresses, copies, and wide sums of narrow
floats.

Kernels take addresses (`tensor.data_ptr()`) rather than arrays: an array costs a call three times
what a number does, besides making it of a tensor, and torch has dtypes that numpy lacks. A `like`
argument is an empty array whose dtype says how to read memory; Numba has no half floats on CPU, so
uint16 stands for bfloat16 and int16 for float16, which is safe because no integers are ever summed.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tokenyard.kernels.numba import vectors

# One compiled kernel serves each of these.
LIKE: dict[torch.dtype, np.ndarray] = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}

LANES = vectors.LANES


@intrinsic
def pointer(typingctx, address, like):
    """address -> a pointer to elements of like's dtype."""
    sig = types.CPointer(like.dtype)(types.int64, like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return sig, codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """libc's memcpy of `count` bytes between two addresses."""
    sig = types.void(types.int64, types.int64, types.int64)

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8).as_pointer()
        flag = ir.IntType(1)
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, ir.IntType(64)])
        target, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        builder.call(memcpy, [target, source, args[2], flag(0)])
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def trailing_zeros(typingctx, word):
    """The index of the lowest set bit of a uint64 that is not 0."""
    sig = types.uint64(types.uint64)

    def codegen(context, builder, signature, args):
        return builder.cttz(args[0], ir.IntType(1)(1))

    return sig, codegen


def _make(lanes):
    """The three steps of a sum, for `lanes` neighbouring elements at once."""

    @intrinsic
    def add(typingctx, total, rows, index, at):
        """total[index:] += wide(rows[at:])"""
        dtype = rows.dtype
        sig = types.void(types.CPointer(vectors.wide(dtype)), rows, types.int64, types.int64)

        def codegen(context, builder, signature, args):
            total, rows, index, at = args
            wide = vectors.element(vectors.wide(dtype))
            term = vectors.widen(
                builder,
                vectors.load(builder, rows, at, vectors.element(dtype), lanes),
                dtype,
                lanes,
            )
            term = builder.fadd(vectors.load(builder, total, index, wide, lanes), term)
            vectors.store(builder, term, total, index, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def fold(typingctx, total, partial, index, like):
        """total[index:] += wide(narrow(partial[index:])): a node's partial sum, rounded"""
        dtype = like.dtype
        sum_type = types.CPointer(vectors.wide(dtype))
        sig = types.void(sum_type, sum_type, types.int64, like)

        def codegen(context, builder, signature, args):
            total, partial, index, _ = args
            wide = vectors.element(vectors.wide(dtype))
            term = vectors.narrow(
                builder, vectors.load(builder, partial, index, wide, lanes), dtype, lanes
            )
            term = vectors.widen(builder, term, dtype, lanes)
            term = builder.fadd(vectors.load(builder, total, index, wide, lanes), term)
            vectors.store(builder, term, total, index, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def put(typingctx, out, at, total, index):
        """out[at:] = narrow(total[index:])"""
        dtype = out.dtype
        sig = types.void(out, types.int64, types.CPointer(vectors.wide(dtype)), types.int64)

        def codegen(context, builder, signature, args):
            out, at, total, index = args
            wide = vectors.element(vectors.wide(dtype))
            value = vectors.narrow(
                builder, vectors.load(builder, total, index, wide, lanes), dtype, lanes
            )
            vectors.store(builder, value, out, at, vectors.element(dtype), lanes)
            return context.get_dummy_value()

        return sig, codegen

    return add, fold, put


add_lanes, fold_lanes, put_lanes = _make(LANES)
add_one, fold_one, put_one = _make(1)


WIDE_LANES = 8 * LANES  # eight vectors of sums fit the registers, and 128 elements are whole lines


def _make_sum(streaming):
    @intrinsic
    def sum_rows(typingctx, out, sources, count, at, like):
        """out[at:] = narrow(0 + sources[0][at:] + sources[1][at:] ...), WIDE_LANES elements.

        `sources` points to `count` addresses of rows, `out` is the address of a row; `at` counts
        elements. The sums stay in registers. If streaming, out + at must be on a line's boundary.
        """
        dtype = like.dtype
        sig = types.void(types.int64, types.int64, types.int64, types.int64, like)

        def codegen(context, builder, signature, args):
            out, sources, count, at, _ = args
            narrow, wide = vectors.element(dtype), vectors.element(vectors.wide(dtype))
            sums = [
                cgutils.alloca_once_value(builder, vectors.splat(wide, 0.0, LANES))
                for _ in range(WIDE_LANES // LANES)
            ]
            addresses = builder.inttoptr(sources, at.type.as_pointer())
            with cgutils.for_range(builder, count) as loop:
                row = builder.load(builder.gep(addresses, [loop.index]))
                pointer = builder.inttoptr(row, narrow.as_pointer())
                for i, total in enumerate(sums):
                    place = builder.add(at, at.type(i * LANES))
                    term = vectors.load(builder, pointer, place, narrow, LANES)
                    term = vectors.widen(builder, term, dtype, LANES)
                    builder.store(builder.fadd(builder.load(total), term), total)
            pointer = builder.inttoptr(out, narrow.as_pointer())
            for i, total in enumerate(sums):
                value = vectors.narrow(builder, builder.load(total), dtype, LANES)
                place = builder.add(at, at.type(i * LANES))
                vectors.store(builder, value, pointer, place, narrow, LANES, streaming)
            return context.get_dummy_value()

        return sig, codegen

    return sum_rows


sum_rows, sum_rows_streaming = _make_sum(False), _make_sum(True)
