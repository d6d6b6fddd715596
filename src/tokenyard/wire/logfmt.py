"""The numbers of LogFMT, by which a low-latency combine may send bfloat16 rows (see `spec.logfmt`).

All kernel sets compute with these, so that they give the same bits: libraries differ in the last
bit of a logarithm or a power.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

GROUP = 128  # elements that have a largest and a smallest magnitude of their own
MOST_CODE = 511  # nine bits; 0 stands for 0, and a sign has a bit of its own
STEPS = 510  # between the smallest and the largest magnitude
CLIP = 32  # powers of two below the largest magnitude: what is smaller counts as that small

# exp2(f) for f in -0.5..0.5: the sum of these times f**k, in float64 by Horner's rule. The part
# that is left out is below 1e-15.
EXP2 = tuple(math.log(2) ** k / math.factorial(k) for k in range(13))
# log2(h) for h just above 1: the sum of these times s**(2k + 1), with s = (h - 1) / (h + 1).
LOG2 = tuple(2 / math.log(2) / (2 * k + 1) for k in range(5))


def block_of(hidden: int) -> int:
    """The elements that are cast together or not at all, as DeepEP's kernels load them."""
    return 1024 if hidden % 1024 == 0 else 512


@cache
def log2_table() -> np.ndarray:
    """[32768] float32: log2 of every magnitude of bfloat16, by its bits."""
    magnitudes = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
    return np.array([_log2(one) for one in magnitudes.tolist()], np.float32)


def _log2(magnitude: float) -> float:
    if magnitude == 0:
        return -math.inf
    return math.log2(magnitude) if math.isfinite(magnitude) else magnitude
