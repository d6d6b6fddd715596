"""Rows to FP8 and back: a program has some groups of 128 elements, each with its scale.

Largest numbers are found among bits: without its sign a float32 is as large as its bits, and NaN
is larger than all, which is how `spec` wants it. Divisions are IEEE's; `/` would be approximate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.floats import ABS, INF, as_passed, kind_of, to_bfloat16, widen
from tokenyard.kernels.triton.launch import blocks, launch
from tokenyard.runtime import memory
from tokenyard.wire import fp8

GROUP = tl.constexpr(fp8.GROUP)
_FP8_MAX = tl.constexpr(fp8.FP8_MAX)
_GROUPS = 16  # of a program

PLAIN = tl.constexpr(fp8.PLAIN)
PACKED = tl.constexpr(fp8.PACKED)

_LEAST = tl.constexpr(0x38D1B717)  # the bits of 1e-4
_FRACTION = tl.constexpr(0x7FFFFF)
_OVER = tl.constexpr(0x43F00000)  # 480: what is as large rounds to more than 448, so to NaN
_NORMAL = tl.constexpr(0x3C800000)  # 2**-6, the least normal number of e4m3


@triton.jit
def _to_e4m3(x):
    """The codes, as int8: rounded to nearest, ties to even; NaN for NaN and above the range."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & ABS
    small = size.to(tl.float32, bitcast=True) + 16384.0  # leaves a subnormal's bits at the end
    subnormal = small.to(tl.int32, bitcast=True) - 0x46800000  # the bits of 16384
    fits = tl.where(size < _OVER, size, 0)
    normal = (fits - (120 << 23) + _FRACTION // 16 + ((fits >> 20) & 1)) >> 20
    code = tl.where(size < _NORMAL, subnormal, tl.where(size < _OVER, normal, 0x7F))
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _from_e4m3(code):
    """Exact. The exponent moves by 120; subnormals are counted in 2**-9."""
    bits = code.to(tl.int32) & 0xFF
    size = bits & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    whole = tl.where(size == 0x7F, 0x7FC00000, value.to(tl.int32, bitcast=True))
    return (whole | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _to_fp8_kernel(
    x,
    values,
    scales,
    num_groups,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = groups < num_groups
    where = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = widen(tl.load(x + where, mask=inside[:, None], other=0), KIND)
    size = row.to(tl.int32, bitcast=True) & ABS
    amax = tl.maximum(tl.max(size, 1), _LEAST).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full([GROUPS], _FP8_MAX, tl.float32))
    one = tl.full([GROUPS], 1.0, tl.float32)
    if SCALES == PLAIN:
        # In two steps, as torch computes 448 / amax: one step rounds otherwise.
        factor = tl.div_rn(one, amax) * _FP8_MAX
        tl.store(scales + groups, scale, mask=inside)
    else:
        bits = scale.to(tl.int32, bitcast=True)
        # A NaN keeps its bits, to which _FRACTION cannot be added without overflow.
        finite = tl.where(bits > INF, 0, bits)
        bits = tl.where(bits > INF, bits, (finite + _FRACTION) & INF)
        scale = bits.to(tl.float32, bitcast=True)
        factor = tl.div_rn(one, scale)
        if SCALES == PACKED:
            tl.store(scales + groups, (bits >> 23).to(tl.int8), mask=inside)
        else:
            tl.store(scales + groups, scale, mask=inside)
    tl.store(values + where, _to_e4m3(row * factor[:, None]), mask=inside[:, None])


@triton.jit
def _from_fp8_kernel(x, scales, out, num_groups, SCALES: tl.constexpr, GROUPS: tl.constexpr):
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = groups < num_groups
    where = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scale = tl.load(scales + groups, mask=inside, other=0)
    if SCALES == PACKED:
        scale = ((scale.to(tl.int32) & 0xFF) << 23).to(tl.float32, bitcast=True)
    row = _from_e4m3(tl.load(x + where, mask=inside[:, None], other=0))
    tl.store(out + where, to_bfloat16(row * scale[:, None]), mask=inside[:, None])


def cast_into(x_ND: Tensor, values: Tensor, scales: Tensor, kind: int, how: int) -> None:
    """Cast into memory that is there: values as int8, scales as float32, or as int8 if packed."""
    num_groups = x_ND.numel() // fp8.GROUP
    launch(
        _to_fp8_kernel,
        (blocks(num_groups, _GROUPS),),
        as_passed(x_ND),
        values,
        scales,
        num_groups,
        KIND=kind,
        SCALES=how,
        GROUPS=_GROUPS,
    )


def plan_to_fp8(
    num_rows: int, hidden: int, dtype: torch.dtype, round_scale: bool, use_ue8m0: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    num_scales = hidden // fp8.GROUP
    kind = kind_of(dtype)
    how = fp8.PACKED if use_ue8m0 else fp8.ROUNDED if round_scale else fp8.PLAIN
    packed = (num_rows, num_scales // 4)

    def cast(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        device = x_ND.device
        values = memory.empty(num_rows, hidden, dtype=torch.float8_e4m3fn, device=device)
        if use_ue8m0:
            scales = memory.empty(*packed, dtype=torch.int32, device=device)
        else:
            scales = memory.empty(num_rows, num_scales, dtype=torch.float32, device=device)
        cast_into(
            x_ND.detach(),
            values.view(torch.int8),
            scales.view(torch.int8) if use_ue8m0 else scales,
            kind,
            how,
        )
        return values, scales

    return cast


def plan_from_fp8(
    num_rows: int, hidden: int, use_ue8m0: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    num_groups = num_rows * (hidden // fp8.GROUP)
    how = fp8.PACKED if use_ue8m0 else fp8.PLAIN

    def cast_back(x_fp8: Tensor, scales_NS: Tensor) -> Tensor:
        out = memory.empty(num_rows, hidden, dtype=torch.bfloat16, device=x_fp8.device)
        scales_NS = scales_NS.detach()
        launch(
            _from_fp8_kernel,
            (blocks(num_groups, _GROUPS),),
            x_fp8.detach().view(torch.int8),
            scales_NS.view(torch.int8) if use_ue8m0 else scales_NS,
            out.view(torch.int16),
            num_groups,
            SCALES=how,
            GROUPS=_GROUPS,
        )
        return out

    return cast_back
