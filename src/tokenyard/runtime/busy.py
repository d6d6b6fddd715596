"""What others hear of a process that is busy with something long: that it lives, and gets on.

Kernels are compiled inside calls for which other ranks wait. Meanwhile a thread beats: it calls
whatever was given to `listen`, which tells the ranks that wait to wait longer.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

_BEAT = 0.5  # seconds between two beats

_lock = threading.Lock()  # of the three below
_listeners: dict[int, weakref.WeakMethod[Any]] = {}
_depth = 0  # how many `busy` blocks this process is in
_idle = threading.Event()  # set when it has left the last of them
# Held while listeners are called, so that `forget` returns when no call is on its way.
_calling = threading.RLock()


class Report(Protocol):
    """Tells the user of it, on the thread that beats."""

    def beat(self, seconds: float) -> None:
        """The process has been busy for so long, and is."""

    def end(self, seconds: float) -> None:
        """The process was busy for so long, and is no more."""


def listen(beat: Callable[[], None]) -> None:
    """Call this method, on another thread, while the process is busy. It is held weakly."""
    reference = weakref.WeakMethod(beat)
    with _lock:
        _listeners[id(beat.__self__)] = reference  # type: ignore[attr-defined]


def forget(owner: object) -> None:
    """Call the owner's method no more. When this returns, no call of it is on its way."""
    with _calling, _lock:
        _listeners.pop(id(owner), None)


def is_busy() -> bool:
    return _depth > 0


@contextmanager
def busy(report: Report) -> Iterator[None]:
    """Beat until the block ends, and until blocks of other threads have ended that began in it."""
    global _depth, _idle
    with _lock:
        _depth += 1
        if _depth == 1:
            _idle = threading.Event()
            beating = threading.Thread(
                target=_beat, args=(_idle, report), daemon=True, name="tokenyard-busy"
            )
            with suppress(RuntimeError):  # a limit on threads: then nobody hears of it
                beating.start()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _idle.set()


def _beat(idle: threading.Event, report: Report) -> None:
    begin = time.monotonic()
    while not idle.wait(_BEAT):
        with _lock:
            for key in [key for key, one in _listeners.items() if one() is None]:
                del _listeners[key]
            found = list(_listeners.items())
        for key, reference in found:
            with _calling:
                beat = reference() if key in _listeners else None
                if beat is not None:
                    beat()
        report.beat(time.monotonic() - begin)
    report.end(time.monotonic() - begin)
