"""The one place where uninitialised memory comes from.

`tokenyard.testing.poisoned` replaces `empty`, `empty_like` and `empty_array` with ones that fill
what they give with NaN or -2**31, so that a value which nobody wrote cannot pass for a zero. Call
them as `memory.empty`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_LINE = 64  # bytes that the memory moves at once

# For small results on CPU: torch.empty takes twice as long as torch.empty_like, and as
# torch.from_numpy(np.empty), which knows fewer dtypes.
empty_like = torch.empty_like
empty_array = np.empty


def empty(
    *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def empty_large(*shape: int, dtype: torch.dtype) -> Tensor:
    """For results of megabytes on CPU: they begin on a line, and numpy asks for huge pages.

    Where the system gives those to who asks, touching fresh memory takes a third of the time.
    """
    count = math.prod(shape)
    block = empty_array(count * dtype.itemsize + _LINE, np.uint8)
    offset = -block.ctypes.data % _LINE
    return torch.frombuffer(block, dtype=dtype, count=count, offset=offset).view(shape)


def as_bytes(x_ND: Tensor) -> Tensor:
    """The rows of a contiguous 2-D tensor as bytes: [N, D] -> [N, B] uint8."""
    if x_ND.stride(1) != 1:  # contiguous for torch if it is empty or has one column, but no view
        x_ND = x_ND.clone(memory_format=torch.contiguous_format)
    return x_ND.view(torch.uint8)
