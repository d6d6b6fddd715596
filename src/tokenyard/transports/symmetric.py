"""Segment that ranks of one machine share.

A segment is anonymous (memfd), reserved when it is made, so that a full machine is an error and
not a SIGBUS later, and sealed, so that nobody can shrink it under a reader. Peers open it through
/proc/<pid>/fd: nothing has a name, so nothing is left behind, whoever dies. Linux only.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.types import round_up

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


_IN_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}

LINE = 64  # bytes of a cache line: rows begin on one, and a signal has one to itself


def why_not() -> str | None:
    """Why this system has no such memory; None if it has."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return "this system has no memfd or no pidfd (they are Linux's)"
    return None if os.path.isdir("/proc/self/fd") else "/proc is not mounted"


class Segment:
    """Segment of this process that others may map. It lives as long as an array of it does."""

    def __init__(self, num_bytes: int) -> None:
        self.size = num_bytes
        self.fd = os.memfd_create("tokenyard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = mmap.mmap(self.fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise SharedMemoryError(
                f"{num_bytes} bytes of shared memory are needed, {_available()} are available "
                f"({error})"
            ) from error
        self.address = int(self.array().ctypes.data)

    def array(self) -> np.ndarray:
        """All of it as bytes. Tensors made of its slices keep this very array alive."""
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Others can no longer map it. Who has, and arrays of this process, keep the memory."""
        os.close(self.fd)


def attach(pid: int, fd: int, num_bytes: int) -> np.ndarray:
    """A peer's segment, as bytes of this process. OSError if it is no longer there."""
    mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        shared = mmap.mmap(mine, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return np.frombuffer(shared, np.uint8)
    except ValueError as error:  # smaller than it should be, so another file by now
        raise OSError(str(error)) from error
    finally:
        os.close(mine)


class Probe:
    """A little memory of this process, by which others find out whether they can use it."""

    def __init__(self) -> None:
        """Raises SharedMemoryError if there is not even that."""
        self._segment = Segment(mmap.PAGESIZE)
        nonce = int.from_bytes(os.urandom(7), "little")
        self._segment.array()[:8].view(np.int64)[0] = nonce
        self.words = os.getpid(), self._segment.fd, nonce

    def close(self) -> None:
        self._segment.close()


def why_not_attached(pid: int, fd: int, nonce: int) -> str | None:
    """Why the memory of the process that said these words (Probe) cannot be used here, and what
    helps; None if it can. A process of that number in another container is not it, and the same
    machine's may be out of bounds.
    """
    share = "in containers, let ranks share a PID namespace (docker run --pid)"
    try:
        found = int(attach(pid, fd, mmap.PAGESIZE)[:8].view(np.int64)[0])
    except PermissionError as error:
        why = f"{error.strerror} for process {pid}"
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return f"{why}; {share}"
        if owner != os.geteuid():
            return (
                f"{why}, which is of user {owner}, while this one is of user {os.geteuid()}; "
                "run all ranks as one user"
            )
        return f"{why}; run all ranks with the same groups, and under the same security profile"
    except FileNotFoundError:
        return f"process {pid} is not to be seen here; {share}, and /proc without hidepid"
    except OSError as error:
        return str(error)
    return None if found == nonce else f"process {pid} is another one here; {share}"


class Pool:
    """Segment for results, used again once the tensors that were given to the user have died."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._free: list[Segment] = []
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], Segment]] = {}
        # A tensor may die on any thread, and on this one while it holds the lock: the collector of
        # cycles runs wherever memory is allocated.
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> tuple[Segment, np.ndarray]:
        """A segment with room, and its array: when that has died, the segment is free again."""
        wanted = size_class(num_bytes)
        with self._lock:
            segment: Segment | None = None
            for one in self._free:
                if wanted <= one.size <= 2 * wanted and (not segment or one.size < segment.size):
                    segment = one
            if segment is not None:
                self._free.remove(segment)
        if segment is None:
            segment = Segment(wanted)
            self._segments.append(segment)
        array = segment.array()
        reference = weakref.ref(array, self._give_back)
        self._lent[id(reference)] = reference, segment
        return segment, array

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Rows in a segment that is free again when they have died."""
        _, array = self.take(num_rows * width * dtype.itemsize)
        return rows(array, 0, num_rows, width, dtype)

    def find(self, address: int, num_bytes: int) -> Segment | None:
        """The segment that these bytes lie in, if they lie in one."""
        for segment in self._segments:
            if segment.address <= address and address + num_bytes <= segment.address + segment.size:
                return segment
        return None

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def _give_back(self, reference: weakref.ref[np.ndarray]) -> None:
        with self._lock:
            self._free.append(self._lent.pop(id(reference))[1])


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


def _available() -> int:
    """Bytes that the kernel thinks could be had."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
