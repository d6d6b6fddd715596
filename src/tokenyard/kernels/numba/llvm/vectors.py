"""The LLVM that intrinsics are written in: several neighbouring elements at once.

`lanes` is how many; 1 means a scalar. A dtype is Numba's, as in `pointers.LIKE`; a kind is LLVM's
type of one element. LLVM splits vectors that are wider than the machine's.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from tokenyard.kernels.numba.llvm.machine import processor

LANES = 16  # float32 elements of a line, and of the widest registers
I32 = ir.IntType(32)


def element(dtype: Any) -> Any:
    """How elements of a numba dtype lie in memory."""
    return {
        types.uint16: ir.IntType(16),
        types.int16: ir.IntType(16),
        types.float32: ir.FloatType(),
        types.float64: ir.DoubleType(),
    }[dtype]


def wide(dtype: Any) -> Any:
    return types.float64 if dtype == types.float64 else types.float32


def vector(kind: Any, lanes: Any) -> Any:
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def splat(kind: Any, value: Any, lanes: Any) -> Any:
    return kind(value) if lanes == 1 else ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def load(builder: Any, pointer: Any, index: Any, kind: Any, lanes: Any) -> Any:
    """`lanes` elements from pointer[index], at any alignment."""
    at = builder.gep(builder.bitcast(pointer, kind.as_pointer()), [index])
    return builder.load(builder.bitcast(at, vector(kind, lanes).as_pointer()), align=1)


def store(
    builder: Any,
    value: Any,
    pointer: Any,
    index: Any,
    kind: Any,
    lanes: Any,
    streaming: Any = False,
) -> None:
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
    ir.FloatType(): 4,
    ir.DoubleType(): 8,
}


def widen(builder: Any, value: Any, dtype: Any, lanes: Any) -> Any:
    if dtype == types.uint16:
        bits = builder.shl(builder.zext(value, vector(I32, lanes)), splat(I32, 16, lanes))
        return builder.bitcast(bits, vector(ir.FloatType(), lanes))
    if dtype == types.int16:
        return _from_half(builder, value, lanes)
    return value


def narrow(builder: Any, value: Any, dtype: Any, lanes: Any) -> Any:
    """Round to nearest, ties to even."""
    if dtype == types.uint16:
        bits = builder.bitcast(value, vector(I32, lanes))
        odd = builder.and_(builder.lshr(bits, splat(I32, 16, lanes)), splat(I32, 1, lanes))
        up = builder.add(builder.add(bits, splat(I32, 0x7FFF, lanes)), odd)
        half = builder.lshr(up, splat(I32, 16, lanes))
        # Rounded like a number, a NaN could become infinity, or carry into the sign.
        is_nan = builder.fcmp_unordered("uno", value, value)
        half = builder.select(is_nan, splat(I32, 0x7FC0, lanes), half)
        return builder.trunc(half, vector(ir.IntType(16), lanes))
    if dtype == types.int16:
        return _to_half(builder, value, lanes)
    return value


def widen_pair(builder: Any, pointer: Any, index: Any, dtype: Any, lanes: Any) -> list[Any]:
    """2 * lanes elements from pointer[index] as two wide vectors, in the order that is quickest:
    bfloat16 by even and odd places, which takes no shuffle. `narrow_pair` puts them back.
    """
    kind = element(dtype)
    if dtype == types.uint16:
        at = builder.gep(builder.bitcast(pointer, kind.as_pointer()), [index])
        words = load(builder, at, index.type(0), I32, lanes)
        even = builder.shl(words, splat(I32, 16, lanes))
        odd = builder.and_(words, splat(I32, 0xFFFF0000, lanes))
        return [builder.bitcast(one, vector(ir.FloatType(), lanes)) for one in (even, odd)]
    places = index, builder.add(index, index.type(lanes))
    return [
        widen(builder, load(builder, pointer, place, kind, lanes), dtype, lanes) for place in places
    ]


def narrow_pair(builder: Any, pair: Any, dtype: Any, lanes: Any) -> dict[int, Any]:
    """What `widen_pair` read, rounded: by the place of its first element, what to store there."""
    first, second = (narrow(builder, one, dtype, lanes) for one in pair)
    if dtype == types.uint16:
        even, odd = (builder.zext(one, vector(I32, lanes)) for one in (first, second))
        return {0: builder.or_(even, builder.shl(odd, splat(I32, 16, lanes)))}
    return {0: first, lanes: second}


def _from_half(builder: Any, value: Any, lanes: Any) -> Any:
    """Exactly, without instructions for it too.

    Fraction and exponent, moved to their places, make a float32 but for the difference of the two
    biases, 112, and that once more for infinity and NaN, which becomes quiet. Where the exponent is
    0, a float32 has a leading 1 that float16 has not: with an exponent of one more, that is 2**-14.
    """
    float_lanes, int_lanes = vector(ir.FloatType(), lanes), vector(I32, lanes)
    if processor().converts_float16:
        halves = builder.bitcast(value, vector(ir.HalfType(), lanes))
        return builder.fpext(halves, float_lanes)

    def number(n: Any) -> Any:
        return splat(I32, n, lanes)

    words = builder.zext(value, int_lanes)
    magnitude = builder.and_(words, number(0x7FFF))
    bits = builder.shl(magnitude, number(13))
    tiny = builder.bitcast(builder.add(bits, number(113 << 23)), float_lanes)
    tiny = builder.fsub(tiny, splat(ir.FloatType(), 2.0**-14, lanes))
    normal = builder.add(bits, number(112 << 23))
    last = builder.add(bits, number(224 << 23))
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7C00))
    last = builder.select(is_nan, builder.or_(last, number(0x400000)), last)
    is_last = builder.icmp_unsigned(">=", magnitude, number(0x7C00))
    is_tiny = builder.icmp_unsigned("<", magnitude, number(0x400))
    found = builder.select(is_last, last, normal)
    found = builder.select(is_tiny, builder.bitcast(tiny, int_lanes), found)
    sign = builder.shl(builder.and_(words, number(0x8000)), number(16))
    return builder.bitcast(builder.or_(found, sign), float_lanes)


def _to_half(builder: Any, value: Any, lanes: Any) -> Any:
    """Rounded to nearest, ties to even, without instructions for it too.

    Below 2**-14, the sum with 0.5 has the float16 as its last bits, rounded by the adder. Others
    are rounded as integers, and what then reaches 2**16 is infinity.
    """
    float_lanes, int_lanes = vector(ir.FloatType(), lanes), vector(I32, lanes)
    if processor().converts_float16:
        halves = builder.fptrunc(value, vector(ir.HalfType(), lanes))
        return builder.bitcast(halves, vector(ir.IntType(16), lanes))

    def number(n: Any) -> Any:
        return splat(I32, n, lanes)

    bits = builder.bitcast(value, int_lanes)
    magnitude = builder.and_(bits, number(0x7FFFFFFF))
    tiny = builder.fadd(builder.bitcast(magnitude, float_lanes), splat(ir.FloatType(), 0.5, lanes))
    tiny = builder.sub(builder.bitcast(tiny, int_lanes), number(126 << 23))
    odd = builder.and_(builder.lshr(magnitude, number(13)), number(1))
    normal = builder.add(builder.sub(magnitude, number((112 << 23) - 0xFFF)), odd)
    normal = builder.lshr(normal, number(13))
    found = builder.select(builder.icmp_unsigned("<", magnitude, number(113 << 23)), tiny, normal)
    is_large = builder.icmp_unsigned(">=", magnitude, number(143 << 23))
    found = builder.select(is_large, number(0x7C00), found)
    is_nan = builder.icmp_unsigned(">", magnitude, number(0x7F800000))
    found = builder.select(is_nan, number(0x7E00), found)
    sign = builder.and_(builder.lshr(bits, number(16)), number(0x8000))
    return builder.trunc(builder.or_(found, sign), vector(ir.IntType(16), lanes))
