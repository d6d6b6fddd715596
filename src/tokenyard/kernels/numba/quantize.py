"""Rows to FP8 and back: groups of 128 elements, each in registers from load to store.

A plan holds what follows from a shape; the function that it returns only allocates and casts. Many
rows are shared among threads, and go past the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import int64, typeof
from torch import Tensor, bfloat16, float8_e4m3fn, from_numpy

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.fp8 import (
    bits_float,
    float_bits,
    group_amax,
    group_from_fp8,
    group_from_fp8_streaming,
    group_to_fp8,
    group_to_fp8_streaming,
)
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, LIKE, UINT8, pointer
from tokenyard.runtime import memory
from tokenyard.runtime.threads import in_threads
from tokenyard.wire.fp8 import FP8_MAX, GROUP, PACKED, PLAIN, ROUNDED

_MUCH = 1 << 21  # bytes from which a result is unlikely to be read again from the cache

# Groups whose scales are found before any of them is converted. One by one, the conversion of each
# would wait for its own scale, and fill the core's queues so that nothing else can run meanwhile.
_CHUNK = 8

_LEAST = np.float32(1e-4)
_ONE, _FP8_MAX = np.float32(1), np.float32(FP8_MAX)
_FRACTION, _INF = 0x7FFFFF, 0x7F800000  # of a float32's bits


@njit(nogil=True, cache=True, error_model="numpy")
def to_fp8_groups(x, values, scales, num_groups, kind, streaming, like):
    floats, exponents = pointer(scales, FLOAT32), pointer(scales, UINT8)
    group_bytes = GROUP * np.int64(like.itemsize)
    factors = np.empty(_CHUNK, np.float32)
    for begin in range(0, num_groups, _CHUNK):
        end = min(begin + _CHUNK, num_groups)
        for g in range(begin, end):
            factors[g - begin] = group_amax(x + g * group_bytes, like)
        for g in range(begin, end):
            amax = factors[g - begin]
            if amax < _LEAST:  # and not max(), since NaN must stay
                amax = _LEAST
            scale = amax / _FP8_MAX
            if kind == PLAIN:
                # In two steps, as torch computes 448 / amax: one step rounds otherwise.
                factors[g - begin] = _ONE / amax * _FP8_MAX
            else:
                bits = float_bits(scale)
                if bits <= _INF:  # and not NaN
                    scale = bits_float((bits + _FRACTION) & _INF)
                factors[g - begin] = _ONE / scale
            if kind == PACKED:
                exponents[g] = float_bits(scale) >> 23
            else:
                floats[g] = scale
        for g in range(begin, end):
            factor = factors[g - begin]
            if streaming:
                group_to_fp8_streaming(values + g * GROUP, x + g * group_bytes, factor, like)
            else:
                group_to_fp8(values + g * GROUP, x + g * group_bytes, factor, like)
    # Also for callers that do not stream: see `llvm.atomics`.
    fence_stores()


@njit(nogil=True, cache=True)
def _from_fp8_kernel(x, scales, out, num_groups, kind, streaming):
    floats, exponents = pointer(scales, FLOAT32), pointer(scales, UINT8)
    for group in range(num_groups):
        if kind == PACKED:
            scale = bits_float(np.int64(exponents[group]) << 23)
        else:
            scale = floats[group]
        source, target = x + group * GROUP, out + group * (2 * GROUP)
        if streaming:
            group_from_fp8_streaming(target, source, scale)
        else:
            group_from_fp8(target, source, scale)
    fence_stores()


def _model(num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """One element that stands for all: to make a tensor like it is quicker than to spell it out."""
    return torch.empty(1, 1, dtype=dtype, device="cpu").expand(num_rows, hidden)


def plan_to_fp8(
    num_rows: int, hidden: int, dtype: torch.dtype, round_scale: bool, use_ue8m0: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    num_scales = hidden // GROUP
    num_groups, like = num_rows * num_scales, LIKE[dtype]
    kind = PACKED if use_ue8m0 else ROUNDED if round_scale else PLAIN
    scales_shape = (num_rows, num_scales // 4 if use_ue8m0 else num_scales)
    scale = np.dtype(np.int32 if use_ue8m0 else np.float32)
    model = _model(num_rows, hidden, float8_e4m3fn)
    # The compiled function itself: the dispatcher would ask each argument's type at every call.
    kernel = to_fp8_groups.compile((int64,) * 6 + (typeof(like),))

    def cast(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        values = memory.empty_like(model)
        scales = from_numpy(memory.empty_array(scales_shape, scale))
        x, to, to_scales = x_ND.data_ptr(), values.data_ptr(), scales.data_ptr()
        kernel(x, to, to_scales, num_groups, kind, 0, like)
        return values, scales

    def cast_much(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        values = memory.empty(num_rows, hidden, dtype=float8_e4m3fn)
        scales = from_numpy(memory.empty_array(scales_shape, scale))
        x, to, to_scales = x_ND.data_ptr(), values.data_ptr(), scales.data_ptr()
        x_bytes, scale_bytes = GROUP * like.itemsize, 1 if use_ue8m0 else 4

        def part(begin: int, end: int) -> None:
            kernel(
                x + begin * x_bytes,
                to + begin * GROUP,
                to_scales + begin * scale_bytes,
                end - begin,
                kind,
                1,
                like,
            )

        in_threads(part, num_groups, num_groups * (x_bytes + GROUP))
        return values, scales

    return cast_much if num_rows * hidden >= _MUCH else cast


def plan_from_fp8(
    num_rows: int, hidden: int, use_ue8m0: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    num_groups = num_rows * (hidden // GROUP)
    kind, scale_bytes = (PACKED, 1) if use_ue8m0 else (PLAIN, 4)
    model = _model(num_rows, hidden, bfloat16)
    kernel = _from_fp8_kernel.compile((int64,) * 6)

    def cast_back(x_fp8: Tensor, scales_NS: Tensor) -> Tensor:
        out_ND = memory.empty_like(model)
        x, scales, out = x_fp8.data_ptr(), scales_NS.data_ptr(), out_ND.data_ptr()
        kernel(x, scales, out, num_groups, kind, 0)
        return out_ND

    def cast_much_back(x_fp8: Tensor, scales_NS: Tensor) -> Tensor:
        out_ND = memory.empty(num_rows, hidden, dtype=bfloat16)
        x, scales, out = x_fp8.data_ptr(), scales_NS.data_ptr(), out_ND.data_ptr()

        def part(begin: int, end: int) -> None:
            kernel(
                x + begin * GROUP,
                scales + begin * scale_bytes,
                out + begin * (2 * GROUP),
                end - begin,
                kind,
                1,
            )

        in_threads(part, num_groups, num_groups * 3 * GROUP)
        return out_ND

    return cast_much_back if 2 * num_rows * hidden >= _MUCH else cast_back
