"""Who compiles: of the processes that want one kernel at the same time, one compiles it, and the
others load what it has kept.

A turn is a lock on a file beside the one that will hold the kernel. The system takes it back when
the process ends. A process that is stopped, or does not get on for another reason, is not waited
for: those that waited compile for themselves then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tokenyard.runtime.interrupts import look

try:
    import fcntl
except ImportError:  # Windows: everybody compiles
    fcntl = None  # type: ignore[assignment]

_LOOK = 0.02  # seconds between two looks at what another process compiles
_STUCK = 3.0  # seconds without any use of the processor after which it is not waited for

_STOPPED = -1

_given_up: set[int] = set()  # processes that were not waited for


def _nothing_to_do() -> bool:
    return False


@contextmanager
def turn(
    path: str, is_kept: Callable[[], bool], meanwhile: Callable[[], bool] = _nothing_to_do
) -> Iterator[None]:
    """Inside, it is this process that compiles, or there is no need to: `is_kept`. A process that
    waits does other work, as long as `meanwhile` finds some.
    """
    lock = _wait(path, is_kept, meanwhile) if fcntl is not None else None
    try:
        yield
    finally:
        if lock is not None:
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may hold the file open
            os.close(lock)


def is_taken(path: str) -> bool:
    """Whether a process compiles, or was about to when it ended."""
    return os.path.exists(path)


def _wait(path: str, is_kept: Callable[[], bool], meanwhile: Callable[[], bool]) -> int | None:
    """The locked file, or None: the kernel is there now, or nobody is worth waiting for."""
    used, since = None, time.monotonic()
    while True:
        look()
        try:
            lock = _try_lock(path)
        except OSError:  # a folder that cannot be written, or without locks
            return None
        if lock is not None:
            return lock
        if is_kept():
            return None
        if meanwhile():
            continue
        holder = _holder(path)
        before, used = used, _processor_time(holder)
        now = time.monotonic()
        if used != before:
            since = now
        if holder in _given_up or used == _STOPPED or now > since + _STUCK:
            if holder:
                _given_up.add(holder)
            return None
        time.sleep(_LOOK)


def _try_lock(path: str) -> int | None:
    """The file with its lock held; None if another process has the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file meanwhile: then the lock is of no use.
        if os.fstat(file).st_ino == os.stat(path).st_ino:
            os.pwrite(file, f"{os.getpid()} {_processes()}".ljust(60).encode(), 0)
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _holder(path: str) -> int:
    """The process that compiles, 0 if that cannot be read yet, or is one of another container."""
    with suppress(OSError, ValueError), open(path) as file:
        pid, processes = file.read().split()
        return int(pid) if processes == _processes() else 0
    return 0


def _processes() -> str:
    """Which table of processes this one is in."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _processor_time(pid: int) -> int | None:
    """The ticks of the processor that a process has used; None if that cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError, ValueError):
        return None
    return _STOPPED if state in "Tt" else int(fields[10]) + int(fields[11])
