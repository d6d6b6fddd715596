"""What this process does while a trace is on (`tokenyard.trace`): calls, moves and waits.

Recording must cost little, so a call leaves a copy of its Buffer's counters here and no more; which
rows it moved is worked out when the trace is written. While no trace is on, `active` is None, and a
call tests that alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from tokenyard.runtime.waits import Waits

MOST_CALLS = 1 << 18  # of one Buffer; later ones are left out
MOST_BYTES = 256 << 20  # of their counters, of which a Buffer of many ranks has many
_SELDOM = 31  # a mask: every 32nd call looks at the log of waits, which has room for more


class Counted(Protocol):
    """What a Buffer has counted so far (`engine.statistics`)."""

    rank: int
    waits: Waits

    def totals(self) -> np.ndarray:
        """A copy of all counters."""
        ...


class Span(NamedTuple):
    """A call, or a move on the Buffer's thread. Times are those of `time.monotonic_ns`."""

    stage: str
    begin: int
    end: int
    number: int = -1  # the same on all ranks that make this call; -1 if ranks cannot tell
    totals: np.ndarray | None = None  # counters at its end


_as_span = partial(tuple.__new__, Span)  # half the time of Span(...)


@dataclass
class Track:
    """One Buffer of one rank."""

    buffer: int  # the same on all ranks of the Buffer
    counted: Counted
    clocks_R: np.ndarray  # nanoseconds by which each rank's clock is ahead of this one's
    first: np.ndarray  # counters when the trace began
    calls: list[Span] = field(default_factory=list)
    moves: list[Span] = field(default_factory=list)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    seen: int = 0  # waits that were taken from the log

    def __post_init__(self) -> None:
        self._totals = self.counted.totals

    def drain(self) -> None:
        """Take waits from the log, which forgets."""
        waits = self.counted.waits
        self.waits += waits.since(self.seen)
        self.seen = waits.count

    def call(self, stage: str, begin: int, number: int) -> None:
        """A call has ended now, with this number on all ranks; -1 if ranks cannot tell."""
        calls = self.calls
        calls.append(_as_span((stage, begin, time.monotonic_ns(), number, self._totals())))
        count = len(calls)
        if count & _SELDOM == 0:
            self.drain()
            totals = calls[-1].totals
            each = max(1, 0 if totals is None else totals.nbytes)
            if count > MOST_CALLS or count * each > MOST_BYTES:
                del calls[min(MOST_CALLS, MOST_BYTES // each) :]


class Recorder:
    def __init__(self) -> None:
        self.tracks: dict[int, Track] = {}
        self._lock = threading.Lock()

    def track(self, counted: Counted, buffer: int, clocks_R: np.ndarray) -> Track:
        """The track of a Buffer, which begins with the Buffer's first call."""
        found = self.tracks.get(id(counted))
        if found is None:
            with self._lock:
                found = Track(buffer, counted, clocks_R, counted.totals())
                found.seen = counted.waits.count
                self.tracks[id(counted)] = found
        return found


active: Recorder | None = None
_holders: list[Recorder] = []
_change = threading.Lock()


def start() -> Recorder:
    """Begin to record, or join the Recorder that this process already has."""
    global active
    with _change:
        if active is None:
            active = Recorder()
        _holders.append(active)
        return active


def stop(finish: Callable[[Recorder], Any]) -> None:
    """End a recording. The last of those that began calls `finish`."""
    global active
    with _change:
        recorder = _holders.pop()
        if not _holders:
            active = None
    if active is None:
        finish(recorder)
