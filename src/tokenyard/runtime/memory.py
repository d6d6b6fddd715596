"""Uninitialised memory of this process: the only module that allocates it.

`tokenyard.testing.poisoned` replaces `empty`, `empty_like`, `empty_array` and `take_bytes` with
functions that fill what they give with NaN or -2**31, so that a value which nobody wrote cannot
pass for a zero, and `shm.guard` with some that see writes outside. Therefore call them through the
module, as `memory.empty`.

Large results come from a pool, and their memory is used again when they have died. Memory that is
new costs much: the system fills each page with zeros when it is first touched, and malloc gives
what is freed above 32 MB back at once. A fresh result of 100 MB takes three times as long as the
copy that fills it. `trim` gives what lies idle, of all pools of the process, back to the system.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime import limits, pool
from tokenyard.wire.columns import LINE

small = torch.empty  # results that are surely small; wants device="cpu"
# Quicker still for those on CPU: torch.empty takes twice as long as torch.empty_like, and as
# torch.from_numpy(np.empty), which knows fewer dtypes.
empty_like = torch.empty_like
empty_array = np.empty
trim = pool.trim

LARGE = 1 << 22  # bytes; from here on numpy asks for huge pages, which torch does not
_WORTH_A_LOOK = 64 << 20  # bytes; from here on the system is asked whether it has as many
_ALWAYS_KEPT = 256 << 20  # bytes that may lie idle, however little is in use
_MOST_IDLE = 1 << 30  # bytes that may lie idle, however much was in use


class LocalRegion:
    """Memory that no other process sees."""

    def __init__(self, num_bytes: int) -> None:
        """Raises MemoryError, rather than wait for the out-of-memory killer, if there is too
        little.
        """
        if num_bytes >= _WORTH_A_LOOK:
            limits.check(num_bytes)
        block = np.empty(num_bytes + LINE, np.uint8)
        begin = -block.ctypes.data % LINE
        self.size, self.address = num_bytes, block.ctypes.data + begin
        # numpy lets slices of a slice of `block` keep `block`; slices of an array that was made
        # of a memoryview keep that array, which is the one that the pool watches.
        self._bytes = block[begin : begin + num_bytes].data

    def array(self) -> np.ndarray:
        return np.frombuffer(self._bytes, np.uint8)

    def close(self) -> None:
        """The memory goes when the last reference to it does."""


_local = pool.Pool(LocalRegion, spare=_ALWAYS_KEPT, most_idle=_MOST_IDLE)


def held() -> int:
    """Bytes of all large results of this process, and of those that lie idle."""
    return sum(region.size for region in _local)


def empty(
    *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE or torch.device(device).type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)  # half the time of empty(shape)
    return torch.from_numpy(take_bytes(num_bytes)).view(dtype).view(shape)


def take_bytes(num_bytes: int) -> np.ndarray:
    """Bytes from a cache line's boundary on. When the array, its slices and all tensors made of
    them have died, their memory is used again.
    """
    return _local.take(num_bytes)[1][:num_bytes]


def as_bytes(x_ND: Tensor) -> Tensor:
    """The rows of a contiguous 2-D tensor as bytes: [N, D] -> [N, B] uint8."""
    if x_ND.stride(1) != 1:  # contiguous for torch if it is empty or has one column, but no view
        x_ND = x_ND.clone(memory_format=torch.contiguous_format)
    return x_ND.view(torch.uint8)
