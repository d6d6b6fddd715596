"""What shared memory this process has, when it lets it go, and what a forked child has of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress


def shared_bytes() -> tuple[int, int]:
    """Of this rank's own segments, and of all segments that are mapped here, its peers' too."""
    own = 0
    mapped: dict[str, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = f"/proc/self/fd/{fd}"
            if "memfd:tokenyard" in os.readlink(path):
                own += os.stat(path).st_size
        except OSError:
            pass  # the descriptor of the listing itself
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:tokenyard" in line:
                where, _, _, _, inode, *_ = line.split()
                begin, end = (int(one, 16) for one in where.split("-"))
                mapped[inode] = max(mapped.get(inode, 0), end - begin)
    return own, sum(mapped.values())


def files_and_maps() -> list[str]:
    files = []
    for one in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            files.append(os.readlink(f"/proc/self/fd/{one}"))
    with open("/proc/self/maps") as maps:
        return [one for one in (*files, *maps) if "memfd:tokenyard" in one]


def in_a_child(work: Callable[[], None]) -> int:
    """How a forked child ended that did this: 0, or the number of a signal, below 0."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
