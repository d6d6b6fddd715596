"""The one place where uninitialised memory comes from.

`tokenyard.testing.poisoned` replaces both functions with ones that fill what they give with NaN or
-2**31, so that a value which nobody wrote cannot pass for a zero. Call them as `memory.empty`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# For small results on CPU: torch.from_numpy(np.empty) takes half as long as torch.empty.
empty_array = np.empty


def empty(
    *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def as_bytes(x_ND: Tensor) -> Tensor:
    """The rows of a contiguous 2-D tensor as bytes: [N, D] -> [N, B] uint8."""
    if x_ND.stride(1) != 1:  # contiguous for torch if it is empty or has one column, but no view
        x_ND = x_ND.clone(memory_format=torch.contiguous_format)
    return x_ND.view(torch.uint8)
