"""The LLVM that intrinsics are written in: several neighbouring elements at once.

`lanes` is how many; 1 means a scalar. A dtype is Numba's, as in `intrinsics.LIKE`; a kind is LLVM's
type of one element. LLVM splits vectors that are wider than the machine's.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types

LANES = 16  # float32 elements of a line, and of the widest registers
I32 = ir.IntType(32)


def element(dtype):
    """How elements of a numba dtype lie in memory."""
    return {
        types.uint16: ir.IntType(16),
        types.int16: ir.HalfType(),
        types.float32: ir.FloatType(),
        types.float64: ir.DoubleType(),
    }[dtype]


def wide(dtype):
    return types.float64 if dtype == types.float64 else types.float32


def vector(kind, lanes):
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def splat(kind, value, lanes):
    return kind(value) if lanes == 1 else ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def load(builder, pointer, index, kind, lanes):
    """`lanes` elements from pointer[index], at any alignment."""
    at = builder.gep(builder.bitcast(pointer, kind.as_pointer()), [index])
    return builder.load(builder.bitcast(at, vector(kind, lanes).as_pointer()), align=1)


def store(builder, value, pointer, index, kind, lanes, streaming=False):
    """If streaming, pointer[index] must be a multiple of the bytes that are stored."""
    at = builder.gep(builder.bitcast(pointer, kind.as_pointer()), [index])
    at = builder.bitcast(at, vector(kind, lanes).as_pointer())
    if streaming:
        stored = builder.store(value, at, align=lanes * _SIZES[kind])
        stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
    else:
        builder.store(value, at, align=1)


_SIZES = {
    ir.IntType(8): 1,
    ir.IntType(16): 2,
    ir.HalfType(): 2,
    ir.FloatType(): 4,
    ir.DoubleType(): 8,
}


def widen(builder, value, dtype, lanes):
    if dtype == types.uint16:
        bits = builder.shl(builder.zext(value, vector(I32, lanes)), splat(I32, 16, lanes))
        return builder.bitcast(bits, vector(ir.FloatType(), lanes))
    if dtype == types.int16:
        return builder.fpext(value, vector(ir.FloatType(), lanes))
    return value


def narrow(builder, value, dtype, lanes):
    """Round to nearest, ties to even."""
    if dtype == types.uint16:
        bits = builder.bitcast(value, vector(I32, lanes))
        odd = builder.and_(builder.lshr(bits, splat(I32, 16, lanes)), splat(I32, 1, lanes))
        up = builder.add(builder.add(bits, splat(I32, 0x7FFF, lanes)), odd)
        half = builder.lshr(up, splat(I32, 16, lanes))
        is_nan = builder.fcmp_unordered("uno", value, value)
        half = builder.select(is_nan, splat(I32, 0x7FC0, lanes), half)
        return builder.trunc(half, vector(ir.IntType(16), lanes))
    if dtype == types.int16:
        return builder.fptrunc(value, vector(ir.HalfType(), lanes))
    return value
