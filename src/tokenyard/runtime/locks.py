"""One process of a machine at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Wait until no other process is alone with this folder, or with this file, which is made if it
    is not there. Where the system has no such locks, nobody waits.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
