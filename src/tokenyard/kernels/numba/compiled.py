"""How every kernel is compiled: without the GIL, into a cache on disk, by one process at a time.

Ranks that start together on a new machine all need the same kernels. Whoever comes first compiles
one while the others wait for it, and then load what it left, instead of all compiling everything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba import njit

try:
    import fcntl
except ImportError:  # not a POSIX system: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

# A kernel's compilation compiles those that it calls, on the same thread.
_one_thread = threading.RLock()
_depth = 0


def compiled(function: Callable[..., Any]) -> Any:
    """Numba's njit, as all kernels want it."""
    kernel = njit(nogil=True, cache=True)(function)
    compile_here = kernel.compile

    def compile_once(signature: Any) -> Any:
        with _alone(kernel):
            return compile_here(signature)

    kernel.compile = compile_once  # type: ignore[method-assign,assignment]
    return kernel


@contextmanager
def _alone(kernel: Any) -> Iterator[None]:
    """No other process compiles meanwhile. Where files cannot be locked, they may."""
    global _depth
    with _one_thread:
        lock = None
        if _depth == 0 and fcntl is not None:
            with suppress(OSError):
                os.makedirs(kernel.stats.cache_path, exist_ok=True)
                path = os.path.join(kernel.stats.cache_path, "tokenyard.lock")
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                fcntl.flock(lock, fcntl.LOCK_EX)
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if lock is not None:
                os.close(lock)  # and so unlocked, as it is if the process dies
