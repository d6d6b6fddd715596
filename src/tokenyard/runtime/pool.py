"""Memory that is used again when its tensors have died: the one allocator of the library.

A `Pool` lends regions and sees when they come back. Its maker decides what a region is made of:
`runtime.memory` lends memory of this process, `shm.pool` segments that other ranks map.
Choose it for memory that is large, or that others must hear of: for small local tensors malloc is
quicker. Regions that lie idle go back to the system

- when a pool holds far more than was in use at once of late (see `Pool`),
- when the system has no memory for a new region: then those of all pools of the process,
- when `trim` is called.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from tokenyard.errors import SharedMemoryError
from tokenyard.runtime.limits import NoMemory
from tokenyard.types import round_up

_WINDOW = 128  # calls of Pool.take
_PATIENCE = 5.0  # seconds of a window, where much is needed again and again
_SMALLEST = 1 << 16  # bytes of a region
_MOST_ON_SHELF = 1 << 20  # bytes of a region that stays lent
_MOST_SHELVED = 4  # such regions


class Region(Protocol):
    """Memory of one piece, from a new cache line on."""

    size: int  # bytes
    address: int

    def array(self) -> np.ndarray:
        """All of it as bytes: a new array each time, which every slice and tensor of it keeps."""
        ...

    def close(self) -> None:
        """Give it back to the system, as soon as its last array has died."""
        ...


R = TypeVar("R", bound=Region)


def _num_holders(lent: tuple[np.ndarray, Any]) -> int:
    """How many hold an array: the pair, this call, and whatever was made of the array."""
    return sys.getrefcount(lent[0])


_ALONE = _num_holders((np.empty(0), None))


class Pool(Generic[R]):
    """Regions of one kind: lent, given back when the array that was lent has died, lent again.

    All regions together take at most three quarters more than was in use at once during the last
    one or two windows of 128 calls of `take`, or `spare` bytes if that is more. So a request like
    other recent ones finds memory here, and a large one that was the only one of its kind does not
    stay. Where as much is needed again soon after it went, as by a server's prompts between many
    small steps, windows last five seconds or more, until one or two of those need far less. At most
    `most_idle` bytes are idle at any time.
    """

    def __init__(
        self,
        make: Callable[[int], R],
        *,
        on_drop: Callable[[R], None] | None = None,
        spare: int = 1 << 20,
        most_idle: int = 1 << 62,
    ) -> None:
        """`make` gives a region of so many bytes, or raises MemoryError or SharedMemoryError.
        `on_drop` hears of each region that goes back to the system before the pool is closed.
        """
        self._make, self._on_drop = make, on_drop
        self._spare, self._most_idle = spare, most_idle
        self._regions: dict[int, R] = {}  # by id
        self._total = 0  # bytes of them all
        self._free: list[R] = []  # the longest idle first
        self._idle = 0  # bytes of these
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], R, int]] = {}
        self._in_use = 0  # bytes that were asked for and are not given back
        self._peaks = [0, 0]  # the most of those at once, in the last window of calls and in this
        self._takes = 0  # in this window
        self._window_ends = self._patience = 0.0  # when, at the earliest; seconds of a window
        self._gone, self._gone_at = 0, 0.0  # the last peak that was left far behind, and when
        # An array may die on any thread, and on this one while it holds the lock: the collector of
        # cycles runs wherever memory is allocated. So what it leaves is put here without a lock,
        # and no step below counts on `_free` to stay as it was.
        self._dead: deque[tuple[Any, R, int]] = deque()
        self._lock = threading.RLock()
        self._shelf: list[tuple[np.ndarray, R]] = []  # lent, and perhaps held by nobody else
        key = id(self)
        _pools[key] = weakref.ref(self, lambda _: _pools.pop(key, None))

    def take(self, num_bytes: int) -> tuple[R, np.ndarray]:
        """A region with room for so many bytes, and its array: when that has died, the region is
        free again.
        """
        wanted = size_class(num_bytes)
        with self._lock:
            if self._dead:
                self._settle()
            region = self._reuse(wanted, wanted + wanted // 2)
            self._takes += 1
            if self._takes >= _WINDOW:
                self._next_window()
            self._in_use += wanted
            if self._in_use > self._peaks[1]:
                self._peaks[1] = self._in_use
            if self._free:
                self._trim_to_peak(0 if region else wanted)
        if region is None:
            region = self._fresh(wanted)
        return region, self._lend(region, wanted)

    def _lend(self, region: R, wanted: int) -> np.ndarray:
        array = region.array()
        reference = weakref.ref(array, self._give_back)
        self._lent[id(reference)] = reference, region, wanted
        return array

    def take_small(self, num_bytes: int) -> tuple[R, np.ndarray]:
        """Take little memory, quicker than `take` does where that happens again and again: a few
        small regions stay lent. One is lent again when only the pool holds its array: first the one
        that was lent last, which the processor's cache may still have.
        """
        most = 2 * num_bytes if num_bytes > _SMALLEST // 2 else _SMALLEST
        found = self._from_shelf(num_bytes, most)
        if found is not None:
            return found
        region, array = self.take(num_bytes)
        if region.size <= _MOST_ON_SHELF:
            shelf = self._shelf
            shelf.append((array, region))
            if len(shelf) > _MOST_SHELVED:
                del shelf[0]
        return region, array

    def take_idle(self, num_bytes: int, likely: int) -> tuple[R, np.ndarray] | None:
        """Take memory that lies idle, however much larger it is; None if none lies idle. At most
        `likely` bytes of it count as in use, unless `needed` says that more are.
        """
        found = self._from_shelf(num_bytes, sys.maxsize)
        if found is None and (self._free or self._dead):
            wanted = size_class(likely)
            with self._lock:
                self._takes += 1
                if self._takes >= _WINDOW:
                    self._next_window()
                self._settle()
                region = self._reuse(num_bytes, sys.maxsize)
                if region is None:
                    return None
                self._in_use += wanted
            found = region, self._lend(region, wanted)
        return found

    def needed(self, num_bytes: int) -> None:
        """Note that `num_bytes` of one region were in use at once."""
        self._peaks[1] = max(self._peaks[1], size_class(num_bytes))

    def _from_shelf(self, num_bytes: int, most: int) -> tuple[R, np.ndarray] | None:
        shelf = self._shelf
        for _ in range(len(shelf)):
            try:
                one = shelf.pop()  # another thread does not find it, until this one holds it
            except IndexError:
                break
            if _num_holders(one) == _ALONE and num_bytes <= one[1].size <= most:
                array, region = one
                shelf.append(one)
                self._takes += 1
                if self._takes >= _WINDOW:
                    self._next_window()
                return region, array
            shelf.insert(0, one)
        return None

    def trim(self, most: int = 0) -> None:
        """Give idle regions back to the system, the longest idle first, until at most so many
        bytes are idle.
        """
        self._shelf = []
        self._trim(most)

    def _trim(self, most: int) -> None:
        with self._lock:
            if self._dead:
                self._settle()
            while self._idle > most and self._free:
                region = self._free.pop(0)
                self._idle -= region.size
                self._total -= region.size
                del self._regions[id(region)]
                if self._on_drop is not None:
                    self._on_drop(region)
                region.close()

    @property
    def in_use(self) -> int:
        """Bytes that were asked for, rounded up (`size_class`), and are not given back."""
        self._shelf = []
        with self._lock:
            self._settle()
            return self._in_use

    @property
    def idle(self) -> int:
        """Bytes of regions that are ready to be lent."""
        self._shelf = []
        with self._lock:
            self._settle()
            return self._idle

    def find(self, address: int, num_bytes: int) -> R | None:
        """The region that these bytes lie in, if they lie in one."""
        for region in list(self._regions.values()):
            if region.address <= address and address + num_bytes <= region.address + region.size:
                return region
        return None

    def close(self) -> None:
        """Give all regions back. One that is lent lives until its array has died, and no longer."""
        self._shelf = []
        with self._lock:
            self._on_drop = None
            for region in self:
                region.close()
            self._regions.clear()
            self._free.clear()
            self._dead.clear()
            self._idle = self._total = 0

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._regions.values()))

    def _reuse(self, wanted: int, most: int) -> R | None:
        """The smallest idle region with room, unless it is larger than `most`."""
        found: R | None = None
        for one in self._free:
            if wanted <= one.size <= most and (not found or one.size < found.size):
                found = one
        if found is not None:
            try:
                self._free.remove(found)
            except ValueError:  # trimmed by an array that died just now
                return None
            self._idle -= found.size
        return found

    def _next_window(self) -> None:
        now, self._takes = time.monotonic(), 0
        if now < self._window_ends:
            return
        with self._lock:
            self._settle()
            before = max(self._peaks)
            self._peaks = [self._peaks[1], self._in_use]
            if before > max(self._spare, max(self._peaks) * 7 // 4):
                self._gone, self._gone_at, self._patience = before, now, 0.0
            self._window_ends = now + self._patience
            self._trim_to_peak(0)

    def _trim_to_peak(self, more: int) -> None:
        """Down to three quarters more than was in use at once, with `more` bytes yet to come."""
        allowed = max(max(self._peaks) * 7 // 4, self._spare)
        excess = self._total + more - allowed
        if excess > 0:
            self._trim(max(0, self._idle - excess))

    def _fresh(self, size: int) -> R:
        """Made without the lock: the system may take long to find so much memory."""
        is_soon = time.monotonic() < self._gone_at + 2 * _PATIENCE
        if is_soon and self._gone <= 2 * self._in_use <= 4 * self._gone:
            self._patience = _PATIENCE
        try:
            try:
                region = self._make(size)
            except (MemoryError, SharedMemoryError):
                trim()
                region = self._make(size)
        except BaseException as error:
            with self._lock:
                self._in_use -= size
                self._peaks = [self._in_use, self._in_use]  # so much was never in use
            held = sum(pool.in_use for pool in _all())
            if held and isinstance(error, (NoMemory, SharedMemoryError)):
                error.args = (f"{error}; results that are still held take {held} bytes",)
            raise
        with self._lock:
            self._regions[id(region)] = region
            self._total += region.size
        return region

    def _give_back(self, reference: weakref.ref[np.ndarray]) -> None:
        """A dying array waits for nobody: the thread that has the lock, or has it next, settles."""
        self._dead.append(self._lent.pop(id(reference)))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Add what the dead have left to what is free."""
        while self._dead:
            _, region, wanted = self._dead.popleft()
            self._in_use -= wanted
            if id(region) in self._regions:  # the pool may be closed by now
                self._free.append(region)
                self._idle += region.size
        if self._idle > self._most_idle:
            self._trim(self._most_idle)


_pools: dict[int, weakref.ref[Pool[Any]]] = {}  # all of this process, by id


def trim() -> None:
    """Give all memory of this process that lies idle in pools back to the system."""
    for pool in _all():
        pool.trim()


def _all() -> list[Pool[Any]]:
    found = [reference() for reference in list(_pools.values())]
    return [pool for pool in found if pool is not None]


def size_class(num_bytes: int) -> int:
    """Rounded up by an eighth at most, so that results of nearly one size use one region.

    >>> size_class(1), size_class(65_537), size_class(1_000_000)
    (65536, 73728, 1048576)
    """
    if num_bytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(12, num_bytes.bit_length() - 4)  # whole pages
    return round_up(num_bytes, step)
