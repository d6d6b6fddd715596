"""float8_e4m3fn in vectors: the largest of a group, and the group to and from eight bits.

A group is 128 elements, whose scale and factor are the kernel's business. Everything is as torch
does it, bit for bit, on any machine: no approximate reciprocals, no fused multiply-add.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tokenyard.kernels.numba.llvm import vectors
from tokenyard.kernels.numba.llvm.vectors import I32, LANES, splat, vector
from tokenyard.wire.columns import LINE
from tokenyard.wire.fp8 import GROUP

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_FLOAT = ir.FloatType()


def _umax(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _joined(builder: Any, parts: Any) -> Any:
    """Vectors of equal length, one after the other, as one."""
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


@intrinsic
def float_bits(typingctx, value):
    """The bits of a float32 as an int64, never negative."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.bitcast(args[0], I32), ir.IntType(64))

    return types.int64(types.float32), codegen


@intrinsic
def bits_float(typingctx, bits):
    """The float32 that has these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.trunc(args[0], I32), _FLOAT)

    return types.float32(types.int64), codegen


@intrinsic
def group_amax(typingctx, address, like):
    """max(|x|) of a group as float32; NaN if there is one.

    Without their signs, floats are ordered as their bits are, and NaN comes last. So the search is
    one of integers, as narrow as the floats.
    """
    dtype = like.dtype
    sig = types.float32(types.int64, like)

    def codegen(context, builder, signature, args):
        bits = ir.IntType(dtype.bitwidth)
        lanes = 8 * LINE // dtype.bitwidth
        pointer = builder.inttoptr(args[0], bits.as_pointer())
        unsigned = splat(bits, (1 << dtype.bitwidth - 1) - 1, lanes)
        largest = splat(bits, 0, lanes)
        for i in range(0, GROUP, lanes):
            part = vectors.load(builder, pointer, I32(i), bits, lanes)
            largest = _umax(builder, largest, builder.and_(part, unsigned))
        reduce = builder.module.declare_intrinsic(
            f"llvm.vector.reduce.umax.v{lanes}i{dtype.bitwidth}",
            fnty=ir.FunctionType(bits, [largest.type]),
        )
        amax = builder.call(reduce, [largest])
        amax = builder.bitcast(amax, vectors.element(dtype))
        return vectors.widen(builder, amax, dtype, 1)

    return sig, codegen


def _to_e4m3(builder: Any, value: Any, sign_mask: Any) -> Any:
    """float32 lanes, at most 464 or NaN, to eight bits; signs only where sign_mask is 0x80.

    Adding 2**20 times the value's own power of two pushes all but three bits of its fraction out,
    rounded by the adder to nearest, ties to even; below 2**-6, where e4m3 has subnormals, the power
    stays 2**-6. The low bits of the sum's fraction are then the code but for its exponent, e * 8,
    which is added as an integer; 56 stands for the difference of the two biases, modulo 256.
    """
    bits = builder.bitcast(value, vector(I32, LANES))
    power = builder.and_(bits, splat(I32, 0x7F800000, LANES))
    power = _umax(builder, power, splat(I32, 121 << 23, LANES))
    large = builder.bitcast(builder.add(power, splat(I32, (20 << 23) + 56, LANES)), value.type)
    positive = builder.bitcast(builder.and_(bits, splat(I32, 0x7FFFFFFF, LANES)), value.type)
    total = builder.bitcast(builder.fadd(positive, large), bits.type)
    code = builder.add(total, builder.lshr(power, splat(I32, 20, LANES)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    code = builder.select(is_nan, splat(I32, 0x7F, LANES), code)
    sign = builder.and_(builder.lshr(bits, splat(I32, 24, LANES)), sign_mask)
    return builder.trunc(builder.or_(code, sign), vector(_I8, LANES))


def _from_e4m3(builder: Any, codes: Any) -> Any:
    """Eight bits to float32 lanes, exactly.

    Three bits of fraction and four of exponent, moved to their places, make a float32 w: the value,
    unless the exponent is 0, for a float32 adds a leading 1 to any fraction and e4m3 does not.
    Then the value is 2w - 2**-6, which is less than w there and nowhere else.
    """
    words = builder.zext(codes, vector(I32, LANES))
    magnitude = builder.and_(words, splat(I32, 0x7F, LANES))
    bits = builder.shl(magnitude, splat(I32, 20, LANES))
    bits = builder.add(bits, splat(I32, 120 << 23, LANES))
    w = builder.bitcast(bits, vector(_FLOAT, LANES))
    subnormal = builder.fadd(w, builder.fsub(w, splat(_FLOAT, 2.0**-6, LANES)))
    value = builder.select(builder.fcmp_ordered("<", w, subnormal), w, subnormal)
    is_nan = builder.icmp_unsigned("==", magnitude, splat(I32, 0x7F, LANES))
    value = builder.select(is_nan, splat(_FLOAT, math.nan, LANES), value)
    sign = builder.shl(words, splat(I32, 24, LANES))
    sign = builder.and_(sign, splat(I32, 0x80000000, LANES))
    return builder.bitcast(builder.or_(builder.bitcast(value, sign.type), sign), value.type)


def _spread(builder: Any, value: Any) -> Any:
    """A scalar in all lanes."""
    lanes = vector(value.type, LANES)
    one = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, splat(I32, 0, LANES))


def _make(streaming: Any) -> Any:
    @intrinsic
    def group_to_fp8(typingctx, out, address, factor, like):
        """out[:] = (x * factor) as float8_e4m3fn, a group. If streaming, out must begin a line.

        |x| * factor is at most 464, from where e4m3 would overflow, or NaN. A factor made of the
        group's largest errs by 2**-21 of it, so that none comes beyond 448.001.
        """
        dtype = like.dtype
        sig = types.void(types.int64, types.int64, types.float32, like)

        def codegen(context, builder, signature, args):
            out, address, factor, _ = args
            narrow = vectors.element(dtype)
            source = builder.inttoptr(address, narrow.as_pointer())
            target = builder.inttoptr(out, _I8.as_pointer())
            # A NaN that meets a NaN keeps either's sign, as the machine likes: torch keeps the
            # factor's, which has none.
            is_nan = builder.fcmp_unordered("uno", factor, factor)
            sign_mask = _spread(builder, builder.select(is_nan, I32(0), I32(0x80)))
            factor = _spread(builder, factor)
            for line in range(0, GROUP, LINE):
                codes = []
                for i in range(line, line + LINE, LANES):
                    x = vectors.load(builder, source, I32(i), narrow, LANES)
                    x = builder.fmul(vectors.widen(builder, x, dtype, LANES), factor)
                    codes.append(_to_e4m3(builder, x, sign_mask))
                codes = _joined(builder, codes)
                vectors.store(builder, codes, target, I32(line), _I8, LINE, streaming)
            return context.get_dummy_value()

        return sig, codegen

    @intrinsic
    def group_from_fp8(typingctx, out, address, scale):
        """out[:] = (x * scale) as bfloat16, a group. If streaming, out must begin a line."""
        sig = types.void(types.int64, types.int64, types.float32)

        def codegen(context, builder, signature, args):
            out, address, scale = args
            source = builder.inttoptr(address, _I8.as_pointer())
            target = builder.inttoptr(out, _I16.as_pointer())
            scale = _spread(builder, scale)
            for line in range(0, GROUP, LINE // 2):
                halves = []
                for i in range(line, line + LINE // 2, LANES):
                    x = vectors.load(builder, source, I32(i), _I8, LANES)
                    x = builder.fmul(_from_e4m3(builder, x), scale)
                    halves.append(vectors.narrow(builder, x, types.uint16, LANES))
                halves = _joined(builder, halves)
                vectors.store(builder, halves, target, I32(line), _I16, LINE // 2, streaming)
            return context.get_dummy_value()

        return sig, codegen

    return group_to_fp8, group_from_fp8


group_to_fp8, group_from_fp8 = _make(False)
group_to_fp8_streaming, group_from_fp8_streaming = _make(True)
