"""LogFMT: what is left of a bfloat16 row that a low-latency combine sends as 10-bit logarithms.

DeepEP V1 defines it in its combine kernel. Each group of 128 elements has a largest and a smallest
magnitude, both bfloat16. Between their logarithms lie 510 steps; an element becomes a sign and the
number of the nearest step in nine bits, 0 for a zero. Groups are cast by blocks of 512 elements
(1024 where they divide the row), and only if every group of a block has a largest magnitude below
1 that differs from its smallest; other blocks travel as they are. The receiver does not round what
it decodes: sums take it as float32.

DeepEP takes logarithms and powers from a GPU's approximate instructions, so their last bits are
its own. Here both are correct to the last bit or the one before, and the same everywhere. A block
with a NaN is not cast.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tokenyard.wire.logfmt import CLIP, EXP2, GROUP, LOG2, MOST_CODE, STEPS, block_of

_F = np.float32


def logfmt(row_D: Tensor) -> Tensor:
    """[D] float32: what the receiver of a row has.

    >>> row = torch.full((512,), 0.25).bfloat16()
    >>> row[:4] = torch.tensor([0.5, 0.0, -0.3, 0.26])
    >>> row[128::128] = 0.5  # in each group the largest differs from the smallest
    >>> got = logfmt(row)
    >>> got[:2].tolist(), got[0].item() == got[128].item(), float((got[2] + 0.3).abs()) < 0.02
    ([0.5, 0.0], True, True)
    """
    values = row_D.to(torch.float32).tolist()
    out: list[float] = []
    each = block_of(len(values))
    for begin in range(0, len(values), each):
        block = values[begin : begin + each]
        groups = [block[first : first + GROUP] for first in range(0, each, GROUP)]
        if all(_can_cast(group) for group in groups):
            out += [value for group in groups for value in _cast(group)]
        else:
            out += block
    return torch.tensor(out, dtype=torch.float32)


def _log2(value: float) -> np.float32:
    return _F(math.log2(value)) if value else _F(-math.inf)


def _ends(group: list[float]) -> tuple[np.float32, np.float32]:
    """The logarithms of the largest and of the smallest magnitude."""
    most, least = max(map(abs, group)), min(map(abs, group))
    high = _log2(most)
    return high, max(_log2(least), high - _F(CLIP))


def _can_cast(group: list[float]) -> bool:
    if not all(map(math.isfinite, group)):
        return False
    high, low = _ends(group)
    return bool(high < 0 and low < high)


def _cast(group: list[float]) -> list[float]:
    """Encoded and decoded again, with every step in float32."""
    high, low = _ends(group)
    step = (high - low) / _F(STEPS)
    per_step = _F(1) / step
    # Halfway between two steps means halfway between their values, not between their logarithms.
    middle = (_F(1) + _F(exp2(float(step)))) * _F(0.5)
    first = _F(2) - _F(_log2_near_one(float(middle))) * per_step - low * per_step
    decoded = []
    for value in group:
        place = max(_log2(abs(value)) * per_step + first, _F(0))
        code = min(math.floor(place), MOST_CODE)
        size = exp2(float(_F(code - 1) * step + low)) if code else 0.0
        decoded.append(math.copysign(float(_F(size)), value))
    return decoded


def exp2(power: float) -> float:
    whole = math.floor(power + 0.5)
    total = 0.0
    for factor in reversed(EXP2):
        total = total * (power - whole) + factor
    return math.ldexp(total, whole)


def _log2_near_one(value: float) -> float:
    ratio = (value - 1) / (value + 1)
    square, total = ratio * ratio, 0.0
    for factor in reversed(LOG2):
        total = total * square + factor
    return total * ratio
