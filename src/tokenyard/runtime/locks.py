"""One process of a machine at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LONGEST = 10.0  # seconds to wait for another process
_PAUSE = 0.005  # seconds between two tries


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Wait until no other process is alone with this folder, or with this file, which is made if it
    is not there. Where the system has no such locks, nobody waits. Raises TimeoutError, which is an
    OSError, if another holds it for long: it may be stopped, or behind a network that is cut.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(
        path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    )
    try:
        deadline = time.monotonic() + _LONGEST
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is locked by another process") from None
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(descriptor)
