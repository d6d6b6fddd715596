"""One piece of memory that ranks of one machine share.

A segment is anonymous (memfd). It is reserved when it is made, so that a full machine is an error
and not a SIGBUS later, and sealed, so that nobody can shrink it under a reader. Peers get its
descriptor (`shm.processes`): it has no name, so it is not left behind, whoever dies. Linux only.

Linux uses the number of a closed descriptor again. So a rank that tells of a segment also tells its
*identity*, a number that no other segment has. The segment has it as its label, and a peer that
opens the descriptor compares the label.

A forked child has no part in it: there its descriptors are closed, and its addresses stay taken but
have no memory, so that a child which reads a result dies of it instead of reading later rows.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from functools import cache
from typing import Any

import numpy as np

from tokenyard.errors import SharedMemoryError
from tokenyard.runtime import limits
from tokenyard.shm import processes
from tokenyard.shm.processes import Gone, Wait
from tokenyard.types import round_up

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


_WORTH_A_LOOK = 4 << 20  # bytes; for smaller segments nobody asks how much memory is left
_PIECE = 64 << 20  # bytes that are reserved before asking again
_FAILED = ctypes.c_void_p(-1).value
_HUGE_SECONDS = 3e-3  # that a huge page may take; one takes 1e-3 where memory is at hand
_ASKING = 0.01  # of a process's time, at most, for huge pages that take longer
MAP_FIXED, _MADV_COLLAPSE, _MFD_NOEXEC_SEAL = 0x10, 25, 8  # of Linux; Python does not name them
_NO_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if hasattr(mmap, "MAP_ANONYMOUS") else 0

_mapped: dict[int, int] = {}  # addresses and bytes, of these and of peers'


def why_not() -> str | None:
    """Why ranks cannot share memory on this system; None if they can."""
    if not (hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
        return "this system has no memfd or no pidfd (they are Linux's)"
    return None


class Segment:
    """Memory of this process that peers may map. It lives as long as an array of it does."""

    def __init__(self, num_bytes: int) -> None:
        _see_to_forks()
        self.size = num_bytes
        self.identity = int.from_bytes(os.urandom(8), "little") >> 1
        try:
            self.fd = _create(processes.label(self.identity))
        except OSError as error:
            raise cannot(num_bytes, error) from error
        try:
            _reserve(self.fd, file_bytes(num_bytes))
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
            self._map = map_file(self.fd, num_bytes, is_own=True)
        except BaseException as error:
            os.close(self.fd)
            if isinstance(error, (OSError, ValueError, OverflowError, MemoryError)):
                raise cannot(num_bytes, error) from error
            raise  # Ctrl-C, while the system finds so much memory
        self.address = int(self.array().ctypes.data)
        # What a peer needs to map it, as `attach` takes it.
        self.told = self.fd, num_bytes, self.identity
        processes.own_segments[self.identity] = self

    def array(self) -> np.ndarray:
        """All of it as bytes: a new array each time, which all its slices and tensors keep."""
        return np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Peers can no longer map it. Existing mappings, and arrays of this process, keep the
        memory.
        """
        if processes.own_segments.pop(self.identity, None) is not None:
            os.close(self.fd)


def attach(
    process: int, fd: int, num_bytes: int, identity: int, wait: Wait, place: int | None = None
) -> np.ndarray:
    """Map a peer's segment; to a `place` of the caller's it can only be read, and the caller has
    its array. Raises Gone if it no longer exists, SharedMemoryError if this process cannot map it,
    and what `wait` raises if its owner does not answer.
    """
    try:
        mine = processes.open_segment(process, fd, identity, wait)
    except (Gone, TimeoutError):
        raise
    except OSError as error:
        raise cannot(num_bytes, error) from error
    try:
        if os.fstat(mine).st_size != file_bytes(num_bytes):
            raise Gone("it is not as large as was told")
        if place is not None:
            map_at(place, mine, num_bytes)
            return np.empty(0, np.uint8)
        return np.frombuffer(map_file(mine, num_bytes, is_own=False), np.uint8)
    except Gone:
        raise
    except (OSError, ValueError, OverflowError) as error:
        raise cannot(num_bytes, error) from error
    finally:
        os.close(mine)


def cannot(num_bytes: int, error: Exception) -> SharedMemoryError:
    """The error that says why shared memory could not be had, and what to do about it."""
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
    errno.EFBIG: "this process may write no files of that size, raise its limit with `ulimit -f`",
    errno.ENOSYS: "the system's kernel, or a seccomp filter, has no such call",
    errno.EREMOTEIO: "that process has reached a limit, look at its `ulimit -n`",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
}


def file_bytes(num_bytes: int) -> int:
    """Bytes of the file of a segment of so many bytes (`shm.guard` takes whole pages)."""
    return num_bytes


def map_file(fd: int, num_bytes: int, is_own: bool) -> Any:
    """Map a file for as long as the returned object lives. (Python's mmap would keep a duplicate of
    the descriptor, and a process may have only about a thousand of those.)

    A large one begins on a huge page's boundary, so that the system can map it by huge pages, and
    its owner asks for them. An owner that is refused goes on with pages as they are.
    """
    libc, huge, flags, place = system(), huge_page(), mmap.MAP_SHARED, None
    allowed = mmap.PROT_READ | mmap.PROT_WRITE
    if 0 < 2 * huge <= num_bytes:
        place, flags = find_place(num_bytes, huge), flags | MAP_FIXED
        if is_own and libc.mmap(place, num_bytes, allowed, flags, fd, 0) == place:
            _ask_for_huge_pages(place, num_bytes // huge, huge)
    address = libc.mmap(place, num_bytes, allowed, flags | mmap.MAP_POPULATE, fd, 0)
    if address in (None, _FAILED):
        error = system_error()
        if place is not None:
            libc.munmap(place, num_bytes)
        raise error
    return keep_mapped(address, num_bytes)


def keep_mapped(address: int, num_bytes: int) -> Any:
    """The object with whose death these addresses are unmapped."""
    _see_to_forks()
    mapped = (ctypes.c_uint8 * num_bytes).from_address(address)
    _mapped[address] = num_bytes
    weakref.finalize(mapped, _unmap, address).atexit = False
    return mapped


def keep_apart(address: int, num_bytes: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of all these bytes, and of a part of them: with the death of the first the pages are
    unmapped that the second does not need.
    """
    first, last = begin // mmap.PAGESIZE * mmap.PAGESIZE, round_up(end, mmap.PAGESIZE)
    cuts = (0, first), (first, min(last, num_bytes)), (last, num_bytes)
    pieces = [keep_mapped(address + low, high - low) for low, high in cuts if low < high]
    part = np.empty(0, np.uint8)
    if begin < end:
        part = np.frombuffer(pieces[first > 0], np.uint8)[begin - first : end - first]
    everything: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(everything, pieces.clear).atexit = False
    return np.frombuffer(everything, np.uint8), part


def map_at(place: int, fd: int, num_bytes: int) -> None:
    """Map a file to addresses that `find_place` has found, only to be read."""
    flags = mmap.MAP_SHARED | MAP_FIXED | mmap.MAP_POPULATE
    if system().mmap(place, num_bytes, mmap.PROT_READ, flags, fd, 0) != place:
        raise system_error()


def allow_writing(address: int, num_bytes: int) -> None:
    """Let this process write to all pages that these bytes touch, whatever `map_at` has there."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    if system().mprotect(begin, address + num_bytes - begin, mmap.PROT_READ | mmap.PROT_WRITE):
        raise system_error()


_no_asking_before = 0.0  # on the clock of time.monotonic


def _ask_for_huge_pages(place: int, count: int, huge: int) -> None:
    """Page by page, for as long as they are quick to come. Where the system must first move others
    out of the way, or a virtual machine's host finds the memory, one takes ten milliseconds or
    more, and pages as they are take two: then this process asks no more for a while.
    """
    global _no_asking_before
    before = time.monotonic()
    if before < _no_asking_before:
        return
    for page in range(count):
        if system().madvise(place + page * huge, huge, _MADV_COLLAPSE):
            return
        now = time.monotonic()
        if now - before > _HUGE_SECONDS:
            _no_asking_before = now + (now - before) / _ASKING
            return
        before = now


def _unmap(address: int) -> None:
    system().munmap(address, _mapped.pop(address))


@cache
def _see_to_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """In a forked child: take away the memory of the parent's mappings, and close its segments."""
    for address, num_bytes in list(_mapped.items()):
        system().mmap(address, num_bytes, 0, _NO_MEMORY | MAP_FIXED, -1, 0)
    for segment in list(processes.own_segments.values()):
        segment.close()


def find_place(num_bytes: int, step: int) -> int:
    """Addresses for so many bytes, from a multiple of `step` on, taken but without memory."""
    libc = system()
    end = round_up(num_bytes, mmap.PAGESIZE) + step
    begin = libc.mmap(None, end, 0, _NO_MEMORY, -1, 0)
    if begin in (None, _FAILED):
        raise system_error()
    end += begin
    place = round_up(begin, step)
    after = place + round_up(num_bytes, mmap.PAGESIZE)
    for first, last in ((begin, place), (after, end)):
        if first < last:
            libc.munmap(first, last - first)
    return place


def system_error() -> OSError:
    """The error of the last call of libc."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@cache
def huge_page() -> int:
    """Bytes of a huge page, 0 where the system has none."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


@cache
def system() -> Any:
    """The C library, for what Python does not know of maps."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _create(label: str) -> int:
    """A file that cannot be run, which some systems insist on (vm.memfd_noexec=2)."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3 does not know the flag
            raise
        return os.memfd_create(label, flags)


def _reserve(fd: int, num_bytes: int) -> None:
    """Reserve pages piece by piece, and check before each piece: other processes may be taking the
    same memory, and the system gives out pages until it kills one of them.
    """
    if num_bytes >= _WORTH_A_LOOK:
        limits.check(num_bytes, "shared memory")
    for begin in range(0, num_bytes, _PIECE):
        if begin:
            limits.check(min(_PIECE, num_bytes - begin), "shared memory")
        os.posix_fallocate(fd, begin, min(_PIECE, num_bytes - begin))


class Probe:
    """One page of this process, by which peers find out whether they can map its memory."""

    def __init__(self) -> None:
        """Raises SharedMemoryError without a page of memory, or a way to name it to others."""
        if not os.path.isdir("/proc/self/fd"):
            raise SharedMemoryError("/proc is not mounted; mount it, as containers usually do")
        self._segment = Segment(mmap.PAGESIZE)
        self.words = processes.own_address(), self._segment.fd, self._segment.identity

    def close(self) -> None:
        self._segment.close()


def why_not_attached(seconds: float, process: int, fd: int, identity: int) -> str | None:
    """Why this process cannot map the memory of the one whose Probe has these words, and what
    helps; None if it can. In another container that pid may be another process, or none, and on
    this machine the process may belong to another user.
    """
    share = "in containers, let ranks share a PID namespace (docker run --pid) or a folder "
    share += "(TOKENYARD_SHARED_FOLDER)"
    name, in_folder = f"process {process}", processes.is_in_folder(process)
    if in_folder:
        name = processes.place(process)
        share = "let TOKENYARD_SHARED_FOLDER be one folder of this machine for all of them"
    if in_folder != processes.is_in_folder(processes.own_address()):
        return "only one of them listens in TOKENYARD_SHARED_FOLDER; set it for all of them"
    try:
        attach(process, fd, mmap.PAGESIZE, identity, processes.within(seconds))
    except (Gone, TimeoutError) as error:
        if in_folder:
            return f"{name}: {error.strerror or error}; {share}"
        if isinstance(error.__cause__, OSError):
            return f"{name} is not to be seen here; {share}, and /proc without hidepid"
        return f"{name} is another one here; {share}"
    except SharedMemoryError as error:
        if not isinstance(error.__cause__, PermissionError):
            return str(error)
        why = f"{error.__cause__.strerror} for {name}"
        try:
            owner = os.stat(processes.place(process)).st_uid
        except OSError:
            return f"{why}; {share}"
        if owner != os.geteuid():
            return (
                f"{why}, which is of user {owner}, while this one is of user {os.geteuid()}; "
                "run all ranks as one user"
            )
        return f"{why}; run all ranks with the same groups, and under the same security profile"
    return None
