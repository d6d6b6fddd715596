"""How much memory this process may still take: what the machine has, and what its cgroups allow.

Linux gives out pages that it does not have, and kills somebody when they are written to. So whoever
is about to reserve much asks here first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SPARE = 16 << 20  # bytes that are left to everything else
_UNLIMITED = 1 << 60
_ROOT = Path("/sys/fs/cgroup")
_FILES = {  # the limit, what counts against it, and what of that can be had back: by version
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


class NoMemory(MemoryError):
    """There is not as much memory, with the bytes needed and available."""


def check(num_bytes: int, what: str = "memory") -> None:
    """Raises NoMemory if so much more would bring the out-of-memory killer."""
    left = available()
    if num_bytes + SPARE > left:
        raise NoMemory(
            f"{num_bytes} bytes of {what} are needed, {max(left - SPARE, 0)} are available"
        )


def available() -> int:
    """Bytes that could be had; a very large number where the system does not say."""
    return min([_of_machine(), *_of_cgroups()])


def _of_machine() -> int:
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _of_cgroups() -> Iterator[int]:
    """What each memory cgroup of this process, and each that it lies in, leaves."""
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
        # A container may not see the folders that its own path names, or see itself as the root.
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text())
            if most > _UNLIMITED:
                continue
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield most - used + sum(int(stat.get(name, 0)) for name in reclaimable)
