"""Limits of this process: descriptors, threads, files, addresses, locked memory, /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tokenyard.tools.doctor.findings import BAD, OK, WARN, Finding, read, size_text

PART = "limits"
_FEW_FILES = 256  # a rank has one descriptor for each segment of its own, and some for each peer
_FEW_THREADS = 64
_SMALL_FILE, _TINY_FILE = 1 << 30, 1 << 20
_SMALL_SPACE = 4 << 30
_PIDS = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")


def look() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not a POSIX system
        yield Finding(OK, PART, "this system tells no limits")
        return

    def soft(name: str) -> int | None:
        """The limit, None where there is none."""
        most = resource.getrlimit(getattr(resource, name))[0]
        return None if most == resource.RLIM_INFINITY else most

    yield from _files(soft("RLIMIT_NOFILE"))
    yield from _threads(soft("RLIMIT_NPROC"))
    yield from _sizes(soft("RLIMIT_FSIZE"), soft("RLIMIT_AS"))
    locked = soft("RLIMIT_MEMLOCK")
    told = "any" if locked is None else size_text(locked)
    yield Finding(OK, PART, f"locked memory (ulimit -l): {told}; tokenyard locks none")
    if os.path.isdir("/dev/shm"):
        room = os.statvfs("/dev/shm")
        told = size_text(room.f_frsize * room.f_blocks)
        what = f"/dev/shm holds {told}; tokenyard does not use it (torch's DataLoader does)"
        yield Finding(OK, PART, what)


def _files(most: int | None) -> Iterator[Finding]:
    told = "any number" if most is None else str(most)
    what = f"open files (ulimit -n): {told}"
    if most is not None and most < _FEW_FILES:
        yield Finding(WARN, PART, f"{what}, enough for a few ranks", "raise it: ulimit -n 4096")
    else:
        yield Finding(OK, PART, what)


def _threads(most: int | None) -> Iterator[Finding]:
    for path in _PIDS:
        text = read(path)
        if text is not None and text.isdigit():
            most = min(int(text), most or int(text))
    told = "any number" if most is None else str(most)
    what = f"threads (ulimit -u, pids of the cgroup): {told}"
    if most is not None and most < _FEW_THREADS:
        advice = "raise it: ulimit -u, or docker run --pids-limit; torch.distributed starts threads"
        yield Finding(WARN, PART, what, advice)
    else:
        yield Finding(OK, PART, what)


def _sizes(file: int | None, space: int | None) -> Iterator[Finding]:
    if file is not None and file < _SMALL_FILE:
        what = f"files, and so shared memory, of at most {size_text(file)} (ulimit -f)"
        level = BAD if file < _TINY_FILE else WARN
        yield Finding(level, PART, what, "raise it: ulimit -f unlimited")
    if space is not None and space < _SMALL_SPACE:
        what = f"addresses of at most {size_text(space)} (ulimit -v)"
        yield Finding(WARN, PART, what, "raise it: ulimit -v unlimited")
