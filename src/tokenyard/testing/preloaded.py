"""What the server that ranks are forked from has imported: torch, numba, and what both have to do
before a first call. Ranks that start from it are ready in a tenth of the time.
"""

from __future__ import annotations

import numpy.ma  # noqa: F401 (numba asks whether an array is a masked one)
from numba.core.registry import cpu_target

import tokenyard.buffer
import tokenyard.kernels.numba
import tokenyard.testing  # noqa: F401

# Numba's tables of what it can compile, which it fills when it first compiles or loads a kernel.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
