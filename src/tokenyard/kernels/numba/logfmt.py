"""Rows as a receiver of LogFMT has them (`spec.logfmt`): each group in one pass after its ends."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, LIKE, pointer
from tokenyard.runtime.threads import in_threads
from tokenyard.wire import logfmt as wire
from tokenyard.wire.logfmt import CLIP, GROUP, MOST_CODE, STEPS, block_of, log2_table

_EXP2, _LOG2 = np.array(wire.EXP2), np.array(wire.LOG2)
_BFLOAT16, _UINT32 = LIKE[torch.bfloat16], np.empty(0, np.uint32)
_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_STEPS, _CLIP = np.float32(STEPS), np.float32(CLIP)


@njit(nogil=True, cache=True)
def _exp2(power):
    wide = np.float64(power)
    whole = math.floor(wide + 0.5)
    part, total = wide - whole, 0.0
    for k in range(len(_EXP2) - 1, -1, -1):
        total = total * part + _EXP2[k]
    return np.float32(math.ldexp(total, np.int32(whole)))


@njit(nogil=True, cache=True)
def _log2_near_one(value):
    wide = np.float64(value)
    ratio = (wide - 1.0) / (wide + 1.0)
    square, total = ratio * ratio, 0.0
    for k in range(len(_LOG2) - 1, -1, -1):
        total = total * square + _LOG2[k]
    return np.float32(total * ratio)


@njit(nogil=True, cache=True, error_model="numpy")
def _logfmt_kernel(y, out, table, num_blocks, block):
    bits, floats, logs = pointer(y, _BFLOAT16), pointer(out, FLOAT32), pointer(table, FLOAT32)
    raw = pointer(out, _UINT32)
    highs, lows = np.empty(block // GROUP, np.float32), np.empty(block // GROUP, np.float32)
    for b in range(num_blocks):
        begin, casts = b * block, True
        for g in range(block // GROUP):
            most, least = np.int64(0), np.int64(0x7FFF)
            for i in range(begin + g * GROUP, begin + (g + 1) * GROUP):
                size = np.int64(bits[i]) & 0x7FFF  # ordered as the magnitudes are, NaN the largest
                most, least = max(most, size), min(least, size)
            high = logs[most]
            low = max(logs[least], high - _CLIP)
            casts = casts and high < _ZERO and low < high
            highs[g], lows[g] = high, low
        # One group that cannot be cast keeps its whole block as it is.
        if not casts:
            for i in range(begin, begin + block):
                raw[i] = np.int64(bits[i]) << 16
            continue
        for g in range(block // GROUP):
            high, low = highs[g], lows[g]
            step = (high - low) / _STEPS
            per_step = _ONE / step
            middle = (_ONE + _exp2(step)) * _HALF
            first = _TWO - _log2_near_one(middle) * per_step - low * per_step
            for i in range(begin + g * GROUP, begin + (g + 1) * GROUP):
                word = np.int64(bits[i])
                place = max(logs[word & 0x7FFF] * per_step + first, _ZERO)
                code = min(np.int64(math.floor(place)), MOST_CODE)
                value = _ZERO
                if code:
                    value = _exp2(np.float32(code - 1) * step + low)
                floats[i] = -value if word >> 15 else value


def logfmt(y_ND: Tensor, out_ND: Tensor) -> None:
    """Encode bfloat16 rows and decode them again, into float32 rows."""
    num_rows, hidden = y_ND.shape
    block = block_of(hidden)
    y, out, table = y_ND.data_ptr(), out_ND.data_ptr(), int(log2_table().ctypes.data)

    def part(begin: int, end: int) -> None:
        at = begin * hidden
        _logfmt_kernel(y + 2 * at, out + 4 * at, table, (end - begin) * hidden // block, block)

    assert y_ND.dtype is torch.bfloat16
    in_threads(part, num_rows, 6 * y_ND.numel())
