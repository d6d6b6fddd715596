"""Ctrl-C: raised where it is not lost, and obeyed by other threads.

While compiled code calls Python back, what is raised there is printed and forgotten. So where that
may happen Ctrl-C is only noted, and raised at the next `look`, or at the end.

A thread that compiles would keep a process alive that was told to end: it stops at its next `look`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_noted = False
_is_deferred = False
_stopping = 0  # how many wait for other threads to end after Ctrl-C


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
    """Raise if Ctrl-C was noted, or if this thread is to end: where an exception is not lost."""
    is_main = threading.current_thread() is threading.main_thread()
    if (_noted and _is_deferred) if is_main else (_stopping or _has_ended_the_program()):
        raise KeyboardInterrupt


@contextmanager
def stopping(error: BaseException | None) -> Iterator[None]:
    """Inside, if the error is Ctrl-C, other threads end at their next `look`."""
    global _stopping
    is_ctrl_c = isinstance(error, KeyboardInterrupt)
    _stopping += is_ctrl_c
    try:
        yield
    finally:
        _stopping -= is_ctrl_c


def _has_ended_the_program() -> bool:
    """Ctrl-C has, and the interpreter waits for its other threads."""
    if threading.main_thread().is_alive():
        return False
    return getattr(sys, "last_type", None) is KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True
