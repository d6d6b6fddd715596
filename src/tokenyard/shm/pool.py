"""Segments for rows that other ranks write or read: lent and used again, as `runtime.pool` says.

Peers keep a segment mapped until its owner gives it back to the system (`on_drop`). Limits: Linux,
and one process's segments; what lives as long as the Buffer (mailboxes, rings) is not taken here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime.pool import Pool
from tokenyard.shm.segment import Segment

KEPT = 1 << 20  # bytes of a block that stays lent from call to call
# What numpy calls a dtype, or another one of its size.
_IN_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.int16),
}


class SegmentPool(Pool[Segment]):
    def __init__(self, on_drop: Callable[[Segment], None] | None = None) -> None:
        """`on_drop` hears of segments that go back to the system, which peers may unmap."""
        super().__init__(Segment, on_drop=on_drop)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Rows in a segment that is free again when they have died."""
        _, array = self.take_small(num_rows * width * dtype.itemsize)
        return rows(array, 0, num_rows, width, dtype)


def rows(
    array: np.ndarray | None, begin: int, num_rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Part of an array as a tensor, which keeps the array alive."""
    if num_rows == 0:
        return torch.empty(0, width, dtype=dtype, device="cpu")
    if dtype in _IN_NUMPY:  # quicker by a third
        made = torch.from_numpy(np.ndarray((num_rows, width), _IN_NUMPY[dtype], array, begin))
        return made if made.dtype is dtype else made.view(dtype)
    flat = torch.frombuffer(array, dtype=dtype, count=num_rows * width, offset=begin)
    return flat.view(num_rows, width)
