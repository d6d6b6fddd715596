"""Segments for results: taken, given back when their tensors have died, and taken again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.shm.segment import Segment
from tokenyard.types import round_up

_IN_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}

_WINDOW = 128  # calls of Pool.take
_ALWAYS_KEPT = 1 << 20  # bytes


class Pool:
    """Segments for results, used again once the tensors that were given to the user have died.

    What lies idle is bounded by what was in use at once of late: an allocation like others of the
    last `_WINDOW` to `2 * _WINDOW` finds memory here, and a large one that was the only one of its
    kind goes back to the system.
    """

    def __init__(self, on_drop: Callable[[Segment], None] | None = None) -> None:
        """`on_drop` hears of segments that go back to the system, which peers may unmap."""
        self._on_drop = on_drop
        self._segments: dict[int, Segment] = {}  # by identity
        self._total = 0  # bytes of them all
        self._free: list[Segment] = []  # the longest idle first
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], Segment, int]] = {}
        self._in_use = 0  # bytes that were asked for and are not given back
        self._peaks = [0, 0]  # of those, before this window of calls and in it
        self._takes = 0
        # A tensor may die on any thread, and on this one while it holds the lock: the collector of
        # cycles runs wherever memory is allocated. It only ever adds to what is free.
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> tuple[Segment, np.ndarray]:
        """A segment with room, and its array: when that has died, the segment is free again."""
        wanted = size_class(num_bytes)
        with self._lock:
            self._note(wanted)
            segment: Segment | None = None
            for one in list(self._free):
                if wanted <= one.size <= wanted + wanted // 2 and (
                    not segment or one.size < segment.size
                ):
                    segment = one
            if segment is not None:
                self._free.remove(segment)
            self._trim(0 if segment else wanted)
            if segment is None:
                try:
                    segment = Segment(wanted)
                except SharedMemoryError:
                    self.trim()  # all that lies idle, before giving up
                    segment = Segment(wanted)
                self._segments[segment.identity] = segment
                self._total += segment.size
            array = segment.array()
            reference = weakref.ref(array, self._give_back)
            self._lent[id(reference)] = reference, segment, wanted
            self._in_use += wanted
        return segment, array

    def trim(self, most: int = 0) -> None:
        """Give idle segments back to the system until at most so many bytes are idle."""
        with self._lock:
            idle = sum(segment.size for segment in list(self._free))
            while self._free and idle > most:
                segment = self._free.pop(0)
                idle -= segment.size
                del self._segments[segment.identity]
                self._total -= segment.size
                if self._on_drop is not None:
                    self._on_drop(segment)
                segment.close()

    def _note(self, wanted: int) -> None:
        self._takes += 1
        if self._takes % _WINDOW == 0:
            self._peaks = [self._peaks[1], 0]
        self._peaks[1] = max(self._peaks[1], self._in_use + wanted)

    def _trim(self, more: int) -> None:
        """To three quarters more than was in use at once of late, `more` bytes included."""
        allowed = max(max(self._peaks) * 7 // 4, _ALWAYS_KEPT)
        excess = self._total + more - allowed
        if excess > 0 and self._free:
            self.trim(max(0, sum(segment.size for segment in list(self._free)) - excess))

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Rows in a segment that is free again when they have died."""
        _, array = self.take(num_rows * width * dtype.itemsize)
        return rows(array, 0, num_rows, width, dtype)

    def find(self, address: int, num_bytes: int) -> Segment | None:
        """The segment that these bytes lie in, if they lie in one."""
        for segment in self._segments.values():
            if segment.address <= address and address + num_bytes <= segment.address + segment.size:
                return segment
        return None

    def close(self) -> None:
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._free.clear()
            self._on_drop = None

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def _give_back(self, reference: weakref.ref[np.ndarray]) -> None:
        with self._lock:
            _, segment, wanted = self._lent.pop(id(reference))
            self._in_use -= wanted
            if segment.identity in self._segments:  # the pool may be closed by now
                self._free.append(segment)


def rows(
    array: np.ndarray | None, begin: int, num_rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Part of an array as a tensor, which keeps the array alive."""
    if num_rows == 0:
        return torch.empty(0, width, dtype=dtype)
    if dtype in _IN_NUMPY:  # quicker by a third
        return torch.from_numpy(np.ndarray((num_rows, width), _IN_NUMPY[dtype], array, begin))
    flat = torch.frombuffer(array, dtype=dtype, count=num_rows * width, offset=begin)
    return flat.view(num_rows, width)


def size_class(num_bytes: int) -> int:
    """Rounded up by an eighth at most, so that results of nearly one size use one segment.

    >>> size_class(1), size_class(65_537), size_class(1_000_000)
    (65536, 73728, 1048576)
    """
    step = 1 << max(12, num_bytes.bit_length() - 4)  # whole pages
    return max(1 << 16, round_up(num_bytes, step))
