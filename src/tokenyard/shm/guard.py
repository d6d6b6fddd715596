"""TOKENYARD_GUARD=1: what compiled code writes to ends at a page that nobody may touch.

For the hunt after writes that go astray, at the price of a system call or two for each tensor. Each
result, scratch memory, table and shared segment gets pages of its own, with a page without memory
before and behind. It ends at the page behind, but for what is left of a cache line. All is filled
with a pattern, and what lies around must still have it when the memory goes: else the process is
aborted, with a line that says so. Shared memory is only used again for results of the same size, so
that a result ends where its segment does.

All ranks of a machine must have the switch, or none. What kernels allocate inside is not guarded.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from array import array
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard.runtime import memory, pool, variables
from tokenyard.shm import segment
from tokenyard.types import round_up
from tokenyard.wire import int64s
from tokenyard.wire.columns import LINE

_PATTERN = 0xA7
_PAGE = mmap.PAGESIZE


def begin_from_environment() -> None:
    if variables.read("TOKENYARD_GUARD") != "0":
        _begin()


@cache
def _begin() -> None:
    """Guard all memory that is taken from now on, for the rest of the process."""
    reuse = pool.Pool._reuse

    def reuse_exactly(self: pool.Pool[Any], wanted: int, most: int) -> Any:
        return reuse(self, wanted, wanted)

    pool.size_class = lambda num_bytes: max(1, num_bytes)
    pool.Pool._reuse = reuse_exactly  # type: ignore[method-assign]
    pool.Pool._from_shelf = lambda *_: None  # type: ignore[method-assign]
    memory.LARGE = 1
    memory.take_bytes = _take_bytes
    memory.small = memory.empty  # type: ignore[assignment]
    memory.empty_like = _empty_like  # type: ignore[assignment]
    memory.empty_array = _empty_array  # type: ignore[assignment]
    int64s.new, int64s.address = _new_int64s, _address
    segment.file_bytes = lambda num_bytes: round_up(num_bytes, _PAGE)
    segment.map_file = _map


def _take_bytes(num_bytes: int) -> np.ndarray:
    return np.frombuffer(_map(-1, max(1, num_bytes), True), np.uint8)[:num_bytes]


def _empty_like(x: Tensor) -> Tensor:
    return memory.empty(*x.shape, dtype=x.dtype, device=x.device)


def _empty_array(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    return _take_bytes(count * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def _new_int64s(count: int) -> Any:
    """A view, which gives and takes whole numbers as an array does."""
    made = _take_bytes(8 * count)
    made[:] = 0
    return memoryview(made).cast("q")  # type: ignore[arg-type]


def _address(numbers: array[int]) -> int:
    return int(np.asarray(numbers).ctypes.data)


def _map(fd: int, num_bytes: int, is_own: bool) -> Any:
    """Map a file between guard pages, as `segment.map_file` does; for fd -1 memory of no file."""
    libc, size = segment.system(), round_up(num_bytes, _PAGE)
    begin = segment.find_place(size + 2 * _PAGE, _PAGE) + _PAGE
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    flags = kind | segment.MAP_FIXED | mmap.MAP_POPULATE
    if libc.mmap(begin, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != begin:
        error = segment.system_error()
        libc.munmap(begin - _PAGE, size + 2 * _PAGE)
        raise error
    first = begin + (size - num_bytes) // LINE * LINE
    behind = first + num_bytes
    if is_own:
        ctypes.memset(begin, _PATTERN, size)
        if fd >= 0:  # of which the library expects zeros
            ctypes.memset(first, 0, num_bytes)
    around = ((begin, first - begin), (behind, begin + size - behind)) if is_own else ()
    mapped = (ctypes.c_uint8 * num_bytes).from_address(first)
    weakref.finalize(mapped, _end, begin, size, around).atexit = False
    return mapped


def _end(begin: int, size: int, around: tuple[tuple[int, int], ...]) -> None:
    for place, num_bytes in around:
        if ctypes.string_at(place, num_bytes).count(_PATTERN) != num_bytes:
            os.write(2, b"tokenyard: bytes beside a result were written to\n")
            os.abort()
    segment.system().munmap(begin - _PAGE, size + 2 * _PAGE)
