"""What a user sees while kernels are compiled: that it happens once, and how it gets on.

One process of a machine speaks. On a terminal it writes one line over and over; elsewhere a new one
every second and a half, so that a log shows that something happens. `TOKENYARD_PROGRESS=0` says
nothing.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress

_ABOUT = 12  # seconds that a processor of 2.5 GHz needs for the first dispatch and combine
_LINE = 1.5  # seconds between two lines
_WIDTH = 20  # of the bar
_WHAT = "tokenyard: compiling kernels, once for this machine, about"


class Progress:
    def __init__(self) -> None:
        self._spent = 0.0  # seconds in blocks that have ended
        self._said = 0.0  # when the last line was written
        self._voice: socket.socket | None = None

    def beat(self, seconds: float) -> None:
        """The process has been busy for so long, and is."""
        if os.environ.get("TOKENYARD_PROGRESS") == "0" or sys.stderr is None:
            return
        if self._voice is None:
            self._voice = _take_voice()
        if self._voice is None:
            return
        spent, now = self._spent + seconds, time.monotonic()
        if sys.stderr.isatty():
            done = min(_WIDTH, round(_WIDTH * spent / _ABOUT))
            _write(f"\r{_WHAT} {_ABOUT} s [{'#' * done:.<{_WIDTH}}] {spent:.0f} s ")
        elif not self._said:
            _write(f"{_WHAT} {_ABOUT} s\n")
        elif now > self._said + _LINE:
            _write(f"tokenyard: compiling kernels, {spent:.0f} s so far\n")
        else:
            return
        self._said = now

    def end(self, seconds: float) -> None:
        """The process was busy for so long, and is no more."""
        self._spent += seconds
        if self._voice is not None:
            if sys.stderr is not None and sys.stderr.isatty():
                _write("\n")
            self._voice.close()
            self._voice = None


def _take_voice() -> socket.socket | None:
    """What one process of the machine can have at a time, and the system takes back at its end."""
    if sys.platform != "linux":  # no such names of sockets; then it is rank 0 that speaks
        return socket.socket() if os.environ.get("RANK", "0") == "0" else None
    voice = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        voice.bind(f"\0tokenyard-progress-{os.geteuid()}")
    except OSError:
        voice.close()
        return None
    return voice


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
        sys.stderr.write(text)
        sys.stderr.flush()
