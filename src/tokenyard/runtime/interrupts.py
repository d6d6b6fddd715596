"""Ctrl-C while compiled code calls Python back: what is raised there is printed, and forgotten.

So where that may happen Ctrl-C is only noted, and raised at the next `look`, or at the end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_noted = False
_is_deferred = False


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, Ctrl-C waits until `look` is called, or until the end of the block."""
    global _noted, _is_deferred
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if _is_deferred or not is_main or not callable(before):
        yield
        return
    _noted, _is_deferred = False, True
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _is_deferred = False
        if _noted:
            before(signal.SIGINT, None)


def look() -> None:
    """Raise if Ctrl-C was noted: at a place where an exception is not lost."""
    if _noted and _is_deferred and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True
