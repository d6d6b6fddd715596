"""Where a low-latency dispatch puts what arrives: memory of two results is used again."""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard.runtime import memory
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE
from tokenyard.wire.fp8 import NO_CAST
from tokenyard.wire.slots import SlotShape

_SMALL = 1 << 20  # bytes that may lie idle in the memory of a result


class Arrived(NamedTuple):
    """What a dispatch brings."""

    x: Tensor  # [L, S, D]
    scales: Tensor | None  # [L, S, scales], FP8 only
    counts: Tensor  # [L] int32


class Results:
    """Memory for two results, each used again once its tensors have died.

    It is kept from call to call, and goes back to the pool of the process (`runtime.memory`) when a
    call needs more, or far less. While two results are alive, a third has memory of its own.
    """

    def __init__(self) -> None:
        self._memory: list[np.ndarray | None] = [None] * 2
        self._lent: list[tuple[int, weakref.ref[np.ndarray]] | None] = [None] * 2

    def take(self, shape: SlotShape, number: int) -> Arrived:
        """Memory for what arrives. Rows and scales are the result whose life is watched."""
        num_local, num_slots, _ = shape.x_shape
        num_bytes, scales = num_local * num_slots * shape.row_bytes, None
        if shape.cast == NO_CAST:
            array = self._lend(num_bytes, number)
        else:
            x_bytes, width = round_up(num_bytes, LINE), shape.scale_bytes // 4
            array = self._lend(x_bytes + num_local * num_slots * shape.scale_bytes, number)
            scales = _view(array, x_bytes, (num_local, num_slots, width), shape.scales_dtype)
        return Arrived(
            _view(array, 0, shape.x_shape, shape.row_dtype),
            scales,
            from_numpy(memory.empty_array(num_local, np.int32)),
        )

    def release(self, number: int) -> None:
        """Call `number` failed: lend its memory again, even if a traceback still refers to it."""
        for place, lent in enumerate(self._lent):
            if lent is not None and lent[0] == number:
                self._lent[place] = None

    def _lend(self, num_bytes: int, number: int) -> np.ndarray:
        """Bytes for the result of a call."""
        for place, lent in enumerate(self._lent):
            if lent is None or lent[1]() is None:
                room = self._memory[place]
                if room is None or not num_bytes <= room.size <= 2 * num_bytes + _SMALL:
                    room = self._memory[place] = None  # so that the pool may lend it again
                    room = self._memory[place] = memory.take_bytes(num_bytes)
                array = room[:num_bytes]
                self._lent[place] = number, weakref.ref(array)
                return array
        return memory.take_bytes(num_bytes)


def _view(array: np.ndarray, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Part of an array as a tensor, which keeps the array alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(array, dtype=dtype, count=count, offset=begin).view(shape)
