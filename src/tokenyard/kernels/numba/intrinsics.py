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

# One compiled kernel serves each of these.
LIKE: dict[torch.dtype, np.ndarray] = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}

LANES = 16
_I32 = ir.IntType(32)


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


def _element(dtype):
    """How elements of a numba dtype lie in memory."""
    return {
        types.uint16: ir.IntType(16),
        types.int16: ir.HalfType(),
        types.float32: ir.FloatType(),
        types.float64: ir.DoubleType(),
    }[dtype]


def _wide(dtype):
    return types.float64 if dtype == types.float64 else types.float32


def _vector(kind, lanes):
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def _splat(kind, value, lanes):
    return kind(value) if lanes == 1 else ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _load(builder, pointer, index, kind, lanes):
    """`lanes` elements from pointer[index], at any alignment."""
    at = builder.gep(builder.bitcast(pointer, kind.as_pointer()), [index])
    return builder.load(builder.bitcast(at, _vector(kind, lanes).as_pointer()), align=1)


def _store(builder, value, pointer, index, kind, lanes):
    at = builder.gep(builder.bitcast(pointer, kind.as_pointer()), [index])
    builder.store(value, builder.bitcast(at, _vector(kind, lanes).as_pointer()), align=1)


def _widen(builder, value, dtype, lanes):
    if dtype == types.uint16:
        bits = builder.shl(builder.zext(value, _vector(_I32, lanes)), _splat(_I32, 16, lanes))
        return builder.bitcast(bits, _vector(ir.FloatType(), lanes))
    if dtype == types.int16:
        return builder.fpext(value, _vector(ir.FloatType(), lanes))
    return value


def _narrow(builder, value, dtype, lanes):
    """Round to nearest, ties to even."""
    if dtype == types.uint16:
        bits = builder.bitcast(value, _vector(_I32, lanes))
        odd = builder.and_(builder.lshr(bits, _splat(_I32, 16, lanes)), _splat(_I32, 1, lanes))
        up = builder.add(builder.add(bits, _splat(_I32, 0x7FFF, lanes)), odd)
        half = builder.lshr(up, _splat(_I32, 16, lanes))
        is_nan = builder.fcmp_unordered("uno", value, value)
        half = builder.select(is_nan, _splat(_I32, 0x7FC0, lanes), half)
        return builder.trunc(half, _vector(ir.IntType(16), lanes))
    if dtype == types.int16:
        return builder.fptrunc(value, _vector(ir.HalfType(), lanes))
    return value


def _make(lanes):
    """The three steps of a sum, for `lanes` neighbouring elements at once."""

    @intrinsic
    def add(typingctx, total, rows, index, at):
        """total[index:] += wide(rows[at:])"""
        dtype = rows.dtype
        sig = types.void(types.CPointer(_wide(dtype)), rows, types.int64, types.int64)

        def codegen(context, builder, signature, args):
            total, rows, index, at = args
            wide = _element(_wide(dtype))
            term = _widen(builder, _load(builder, rows, at, _element(dtype), lanes), dtype, lanes)
            term = builder.fadd(_load(builder, total, index, wide, lanes), term)
            _store(builder, term, total, index, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def fold(typingctx, total, partial, index, like):
        """total[index:] += wide(narrow(partial[index:])): a node's partial sum, rounded"""
        dtype = like.dtype
        sum_type = types.CPointer(_wide(dtype))
        sig = types.void(sum_type, sum_type, types.int64, like)

        def codegen(context, builder, signature, args):
            total, partial, index, _ = args
            wide = _element(_wide(dtype))
            term = _narrow(builder, _load(builder, partial, index, wide, lanes), dtype, lanes)
            term = _widen(builder, term, dtype, lanes)
            term = builder.fadd(_load(builder, total, index, wide, lanes), term)
            _store(builder, term, total, index, wide, lanes)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def put(typingctx, out, at, total, index):
        """out[at:] = narrow(total[index:])"""
        dtype = out.dtype
        sig = types.void(out, types.int64, types.CPointer(_wide(dtype)), types.int64)

        def codegen(context, builder, signature, args):
            out, at, total, index = args
            wide = _element(_wide(dtype))
            value = _narrow(builder, _load(builder, total, index, wide, lanes), dtype, lanes)
            _store(builder, value, out, at, _element(dtype), lanes)
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
            narrow, wide = _element(dtype), _element(_wide(dtype))
            sums = [
                cgutils.alloca_once_value(builder, _splat(wide, 0.0, LANES))
                for _ in range(WIDE_LANES // LANES)
            ]
            addresses = builder.inttoptr(sources, at.type.as_pointer())
            with cgutils.for_range(builder, count) as loop:
                row = builder.load(builder.gep(addresses, [loop.index]))
                pointer = builder.inttoptr(row, narrow.as_pointer())
                for i, total in enumerate(sums):
                    place = builder.add(at, at.type(i * LANES))
                    term = _load(builder, pointer, place, narrow, LANES)
                    term = _widen(builder, term, dtype, LANES)
                    builder.store(builder.fadd(builder.load(total), term), total)
            pointer = builder.inttoptr(out, narrow.as_pointer())
            for i, total in enumerate(sums):
                value = _narrow(builder, builder.load(total), dtype, LANES)
                place = builder.gep(pointer, [builder.add(at, at.type(i * LANES))])
                place = builder.bitcast(place, value.type.as_pointer())
                if streaming:
                    store = builder.store(value, place, align=dtype.bitwidth // 8 * LANES)
                    store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
                else:
                    builder.store(value, place, align=1)
            return context.get_dummy_value()

        return sig, codegen

    return sum_rows


sum_rows, sum_rows_streaming = _make_sum(False), _make_sum(True)
