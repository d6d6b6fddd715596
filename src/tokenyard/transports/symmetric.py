"""Memory that ranks of one machine share.

A segment is anonymous (memfd), reserved when it is made, so that a full machine is an error and
not a SIGBUS later, and sealed, so that nobody can shrink it under a reader. Peers open it through
/proc/<pid>/fd: nothing has a name, so nothing is left behind, whoever dies. Linux only.

A descriptor's number is used again, so a rank that tells of a segment also tells its *identity*, a
number that no other segment has. The segment bears it as a label, which whoever opens the
descriptor reads back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.runtime import limits
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

_WORTH_A_LOOK = 4 << 20  # bytes; what is left is asked for only if more is to be reserved
_PIECE = 64 << 20  # bytes that are reserved between two looks
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_WINDOW = 128  # calls of Pool.take
_ALWAYS_KEPT = 1 << 20  # bytes
LINE = 64  # bytes of a cache line: rows begin on one, and a signal has one to itself


def why_not() -> str | None:
    """Why this system has no such memory; None if it has."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return "this system has no memfd or no pidfd (they are Linux's)"
    return None if os.path.isdir("/proc/self/fd") else "/proc is not mounted"


class Segment:
    """Memory of this process that others may map. It lives as long as an array of it does."""

    def __init__(self, num_bytes: int) -> None:
        self.size = num_bytes
        self.identity = int.from_bytes(os.urandom(8), "little") >> 1
        try:
            self.fd = os.memfd_create(_label(self.identity), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise cannot(num_bytes, error) from error
        try:
            _reserve(self.fd, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = _map(self.fd, num_bytes)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            os.close(self.fd)
            raise cannot(num_bytes, error) from error
        self.address = int(self.array().ctypes.data)

    @property
    def told(self) -> tuple[int, int, int]:
        """What others need to map it, as `attach` takes it."""
        return self.fd, self.size, self.identity

    def array(self) -> np.ndarray:
        """All of it as bytes. Tensors made of its slices keep this very array alive."""
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Others can no longer map it. Who has, and arrays of this process, keep the memory."""
        os.close(self.fd)


class Gone(OSError):
    """The segment that was told of is no longer there: its owner has closed it, or has died."""


def attach(pid: int, fd: int, num_bytes: int, identity: int) -> np.ndarray:
    """A peer's segment, as bytes of this process. Gone if it is no longer there, and
    SharedMemoryError if this process cannot map it.
    """
    label, theirs = f"/memfd:{_label(identity)} (deleted)", f"/proc/{pid}/fd/{fd}"
    try:
        if os.readlink(theirs) != label:  # a socket, say, could not even be opened
            raise Gone("another file has its descriptor")
        mine = os.open(theirs, os.O_RDWR | os.O_CLOEXEC)
    except Gone:
        raise
    except (FileNotFoundError, ProcessLookupError) as error:
        raise Gone(str(error)) from error
    except OSError as error:
        raise cannot(num_bytes, error) from error
    try:
        if os.readlink(f"/proc/self/fd/{mine}") != label:
            raise Gone("another file has its descriptor by now")
        if os.fstat(mine).st_size != num_bytes:
            raise Gone("it is not as large as was told")
        return np.frombuffer(_map(mine, num_bytes), np.uint8)
    except Gone:
        raise
    except (OSError, ValueError, OverflowError) as error:
        raise cannot(num_bytes, error) from error
    finally:
        os.close(mine)


def cannot(num_bytes: int, error: Exception) -> SharedMemoryError:
    """Why there is no such memory, and what to do about it."""
    if isinstance(error, limits.NoMemory):
        return SharedMemoryError(str(error))
    remedy = _REMEDIES.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    if not remedy:
        remedy = f"{limits.available()} are available"
    return SharedMemoryError(f"{num_bytes} bytes of shared memory are needed: {error}; {remedy}")


_PERMISSION = (
    "ranks that share memory must run as one user, in one container, where they may read each "
    "other's /proc/<pid>/fd (kernel.yama.ptrace_scope below 2); else take transport='collective'"
)
_REMEDIES = {
    errno.EMFILE: "this process has no file descriptor left, raise its limit with `ulimit -n`",
    errno.ENFILE: "the machine has no file descriptor left, raise the sysctl fs.file-max",
    errno.ENOMEM: "no memory or address space is left, look at `ulimit -v` and vm.max_map_count",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
}


def _map(fd: int, num_bytes: int) -> Any:
    """Map a file for as long as this object lives. (Python's mmap would keep a copy of the
    descriptor besides, of which a process may have a thousand.)
    """
    libc = _libc()
    address = libc.mmap(None, num_bytes, _READ_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mapped = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(mapped, libc.munmap, address, num_bytes).atexit = False
    return mapped


@cache
def _libc() -> Any:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _label(identity: int) -> str:
    return f"tokenyard-{identity:x}"


def _reserve(fd: int, num_bytes: int) -> None:
    """Piece by piece, since others may be taking the same memory: the system gives out pages until
    it kills somebody.
    """
    if num_bytes >= _WORTH_A_LOOK:
        limits.check(num_bytes, "shared memory")
    for begin in range(0, num_bytes, _PIECE):
        if begin:
            limits.check(min(_PIECE, num_bytes - begin), "shared memory")
        os.posix_fallocate(fd, begin, min(_PIECE, num_bytes - begin))


class Probe:
    """A little memory of this process, by which others find out whether they can use it."""

    def __init__(self) -> None:
        """Raises SharedMemoryError if there is not even that."""
        self._segment = Segment(mmap.PAGESIZE)
        self.words = os.getpid(), self._segment.fd, self._segment.identity

    def close(self) -> None:
        self._segment.close()


def why_not_attached(pid: int, fd: int, identity: int) -> str | None:
    """Why the memory of the process that said these words (Probe) cannot be used here, and what
    helps; None if it can. A process of that number in another container is not it, and the same
    machine's may be out of bounds.
    """
    share = "in containers, let ranks share a PID namespace (docker run --pid)"
    try:
        attach(pid, fd, mmap.PAGESIZE, identity)
    except Gone as error:
        if isinstance(error.__cause__, OSError):
            return f"process {pid} is not to be seen here; {share}, and /proc without hidepid"
        return f"process {pid} is another one here; {share}"
    except SharedMemoryError as error:
        if not isinstance(error.__cause__, PermissionError):
            return str(error)
        why = f"{error.__cause__.strerror} for process {pid}"
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
    return None


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
