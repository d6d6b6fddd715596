"""How much shared memory this process has, and how soon it lets it go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tokenyard.runtime import pool


@contextmanager
def quick_to_let_go() -> Iterator[None]:
    """What was of no use to so many calls goes back to the system at once, not after seconds."""
    seconds, pool._WINDOW_SECONDS = pool._WINDOW_SECONDS, 0.0
    try:
        yield
    finally:
        pool._WINDOW_SECONDS = seconds


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
