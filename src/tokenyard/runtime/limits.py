"""How much memory this process may still take: what the machine has, and what its cgroups allow;
and how many files it may open.

Linux promises more memory than it has, and kills a process when the pages are written to. So code
that is about to reserve much calls `check` first. Where the system tells nothing (no /proc, no
cgroups) everything is allowed.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("tokenyard")

SPARE = 16 << 20  # bytes that must stay free for everything else
_SPARE_FILES = 64  # likewise, if they may be had
_UNLIMITED = 1 << 60
_ROOT = Path("/sys/fs/cgroup")
_FILES = {  # by cgroup version: the limit, the usage, and which part of the usage is reclaimable
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


class NoMemory(MemoryError):
    """There is too little memory. The message has the bytes that are needed and available."""


def check(num_bytes: int, what: str = "memory") -> None:
    """Raise NoMemory if taking so many bytes more could bring the out-of-memory killer."""
    left = available()
    if num_bytes + SPARE > left:
        raise NoMemory(
            f"{num_bytes} bytes of {what} are needed, {max(left - SPARE, 0)} are available"
        )


def available() -> int:
    """Bytes that this process could still take; a very large number if the system does not say."""
    return min([_of_machine(), *_of_cgroups()])


def _of_machine() -> int:
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _of_cgroups() -> Iterator[int]:
    """Bytes left in each memory cgroup of this process, and in each cgroup around those."""
    with suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if "memory" in controllers.split(","):
                yield from _of_branch(_ROOT / "memory", path, 1)
            elif not controllers:
                yield from _of_branch(_ROOT, path, 2)


def _of_branch(root: Path, path: str, version: int) -> Iterator[int]:
    limit, usage, reclaimable = _FILES[version]
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        if folder == root.parent:
            break
        # In a container the folders of this path may be missing, or the container is the root.
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text())
            if most > _UNLIMITED:
                continue
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield most - used + sum(int(stat.get(name, 0)) for name in reclaimable)


def allow_files(more: int, what: str) -> None:
    """Let this process open so many more files: raise its limit, if they do not fit, as far as the
    system lets it. Raises OSError if that is not enough.
    """
    try:
        import resource

        used = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # Windows, or no /proc
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = used + more + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    reach = need if hard == resource.RLIM_INFINITY else min(need, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (reach, hard))
        _log.info("this process may open %d files, was %d: for %s", reach, soft, what)
    if used + more > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        raise OSError(
            errno.EMFILE,
            f"{more} files are needed for {what}, beside {used} that are open, and this process "
            f"may open {hard}: raise its hard limit (ulimit -Hn)",
        )
