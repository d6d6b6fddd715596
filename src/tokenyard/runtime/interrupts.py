"""Ctrl-C: raised where it is not lost, obeyed by other threads, and told in a screen's length.

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
from types import FrameType, TracebackType
from typing import Any

_MOST_FRAMES = 12  # of a traceback; two or three lines each
_LAST_FRAMES = 8  # of them from its end, where more is to be seen than in the middle
_DULL = {*sys.stdlib_module_names, "torch", "numba", "llvmlite", "numpy"} - {"__main__"}

_noted = False
_is_deferred = False
_stopping = 0  # how many wait for other threads to end after Ctrl-C
_hook_before: Any = None


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
    if (_noted and _is_deferred) if is_main else _stopping:
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


def shorten_tracebacks() -> None:
    """From now on, a Ctrl-C that ends the process is told by a traceback of a screen's length."""
    global _hook_before
    if _hook_before is None:
        _hook_before, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _stopping
    if isinstance(error, KeyboardInterrupt):
        error.__suppress_context__ = True
        trace = _shortened(trace)
        if not hasattr(sys, "ps1"):  # else a person goes on typing
            _stopping += 1
    _hook_before(kind, error, trace)


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    """Of frames that tell of the user's program and of this package, the first and the last."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    telling = [frame for frame in frames if _package(frame) not in _DULL] or frames
    if len(telling) > _MOST_FRAMES:
        telling[_MOST_FRAMES - _LAST_FRAMES : -_LAST_FRAMES] = []
    for frame, after in zip(telling, [*telling[1:], None], strict=True):
        frame.tb_next = after
    return telling[0] if telling else None


def _package(trace: TracebackType) -> str:
    name = trace.tb_frame.f_globals.get("__name__") or ""
    return str(name).partition(".")[0]


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    _noted = True
