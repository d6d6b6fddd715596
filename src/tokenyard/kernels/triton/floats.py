"""Numbers as kernels read and write them: device functions that give the same bits everywhere.

bfloat16 and float8 are moved as integers and converted by integer arithmetic. The interpreter cuts
bfloat16 off instead of rounding it, and devices differ in what FP8 does above its range.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# What the elements of a row are. Sums are kept in float64 for the first, else in float32.
FLOAT64 = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
BFLOAT16 = tl.constexpr(3)  # passed as int16

KINDS = {
    torch.float64: FLOAT64,
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
}

ABS = tl.constexpr(0x7FFFFFFF)  # of a float32's bits
INF = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)


def kind_of(dtype: torch.dtype) -> int:
    return KINDS[dtype].value


def as_element(kind: int) -> Any:
    """The type of memory that rows of this kind are."""
    return (tl.float64, tl.float32, tl.float16, tl.int16)[kind]


def as_passed(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@triton.jit
def widen(x, KIND: tl.constexpr):
    """Exact: to float64 for float64, else to float32."""
    if KIND == BFLOAT16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FLOAT64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def to_bfloat16(x):
    """The bits, as int16, of a float32 rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & ABS
    size = tl.where(size > INF, NAN, size)  # NaNs would carry into the sign
    rounded = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """A wide number rounded to its kind, once."""
    if KIND == BFLOAT16:
        return to_bfloat16(x)
    elif KIND == FLOAT16:
        return x.to(tl.float16)
    else:
        return x
