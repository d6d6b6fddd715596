"""What a user sees while kernels are compiled: what for, and how it gets on.

Of processes that one launcher has started, one speaks. On a terminal it writes one line over and
over; elsewhere a new one every second and a half, so that a log shows that something happens.
`TOKENYARD_PROGRESS=0` says nothing.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from numba.core.dispatcher import Dispatcher

from tokenyard.runtime import variables

_LINE = 1.5  # seconds between two lines


class Progress:
    def __init__(self) -> None:
        self._spent = 0.0  # seconds in blocks that have ended
        self._said = 0.0  # when the last line was written
        self._voice: int | None = None  # kept until the process ends: who has spoken goes on to
        self._what, self._done, self._total, self._depth = "", 0, 0, 0

    @contextmanager
    def making(self, kernel: Any) -> Iterator[None]:
        """A kernel is compiled or loaded inside, and those that it calls in turn."""
        if self._depth == 0:
            module = kernel.py_func.__module__.partition(".numba.")[2]
            self._what = f"{module}.{kernel.py_func.__name__.strip('_')}"
            # Of a kernel that is there for other dtypes, those that it calls may be too.
            self._done, self._total = 0, max(1, _count_missing(kernel, set()))
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._done += 1

    def beat(self, seconds: float) -> None:
        """The process has been busy for so long, and is."""
        if variables.read("TOKENYARD_PROGRESS") == "0" or sys.stderr is None:
            return
        if self._voice is None:
            self._voice = _take_voice()
        if self._voice is None:
            return
        spent, now = self._spent + seconds, time.monotonic()
        nth = min(self._done + 1, self._total)
        what = f"tokenyard: compiling {self._what}, {nth} of {self._total} functions"
        if sys.stderr.isatty():
            _write(f"\r{what}, once for this machine, {spent:.0f} s \x1b[K")
        elif not self._said:
            _write(f"{what}, once for this machine\n")
        elif now > self._said + _LINE:
            _write(f"{what}, {spent:.0f} s so far\n")
        else:
            return
        self._said = now

    def end(self, seconds: float) -> None:
        """The process was busy for so long, and is no more."""
        self._spent += seconds
        if self._voice is not None and sys.stderr is not None and sys.stderr.isatty():
            _write("\r\x1b[K")


def _count_missing(kernel: Any, seen: set[int]) -> int:
    """How many functions this process has not got yet, of a kernel and all that it calls."""
    if id(kernel) in seen:
        return 0
    seen.add(id(kernel))
    known, names = kernel.py_func.__globals__, kernel.py_func.__code__.co_names
    called = [known[name] for name in names if isinstance(known.get(name), Dispatcher)]
    return (not kernel.overloads) + sum(_count_missing(one, seen) for one in called)


def _take_voice() -> int | None:
    """A descriptor that one child of a launcher can have: the system takes it back at its end."""
    if sys.platform != "linux":  # no such names of sockets; then it is rank 0 that speaks
        return 0 if variables.read("RANK") == "0" else None
    voice = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        voice.bind(f"\0tokenyard-progress-{os.geteuid()}-{os.getppid()}")
    except OSError:
        voice.close()
        return None
    return voice.detach()


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
        sys.stderr.write(text)
        sys.stderr.flush()
