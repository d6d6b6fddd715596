"""Notes about failures that the ranks of a Buffer leave in their engine's store.

Engines say only that something failed. So every rank that notices a failure posts a note: what
kind of failure it is, which ranks are to blame if it knows, and how many exchanges it has ended
itself. A rank that waits reads the notes of the others and raises the same failure. Ranks that were
to come and left no note are blamed.

A rank that compiles kernels says so here too, again and again, and is waited for.

Clocks of machines differ, and are set. So notes carry no time: a reader counts the seconds since it
first saw a note, an author takes its note back when it gets on, and a note that was made while a
Buffer was opened says at which of the group's openings.

The store may have died with the process that held it, or a cut network may hide it; then an
operation on it may never end. So operations run on a thread of their own, and nobody waits for one
that takes long. Until that one has ended, the store counts as lost.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from tokenyard.errors import PeerDied, PeerError, PeerLeft, PeerTimeout

_T = TypeVar("_T")

_FRESH = 5.0  # seconds from when a note is seen, for which its author lives and a rank is late
_OPENING = "opening"  # the label of all Buffers that have none yet
_BUSY = "tokenyard/busy"
_PATIENCE = 0.5  # seconds for one operation on the store
KINDS: tuple[type[PeerError], ...] = (PeerDied, PeerLeft, PeerTimeout)  # the gravest first


class Store(Protocol):
    """Where ranks leave notes: one of torch.distributed is such a thing."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are set."""

    def get(self, key: str, /) -> bytes:
        """What was last set, as far as this rank has heard. Asked only for keys that are set."""


class StoreLost(RuntimeError):
    """The store does not answer, or is gone."""


class FailureNote(NamedTuple):
    kind: type[PeerError]
    culprits: tuple[int, ...]  # as far as the author knows
    seen: float  # when this rank first saw it, or made it; of time.monotonic
    done: Mapping[str, int]  # exchanges that the author has ended, by the name of the connections

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.seen < _FRESH

    @property
    def still_holds(self) -> bool:
        """A rank that was late once may have come since."""
        return self.kind is not PeerTimeout or self.is_fresh

    @property
    def is_final(self) -> bool:
        """The culprits never come back: they have died, or have closed their Buffer."""
        return bool(self.culprits) and self.kind is not PeerTimeout


class FailureBoard:
    def __init__(self, connect: Callable[[], Store], rank: int, opening: int = 0) -> None:
        """The first `post` or `read` calls `connect`. `opening` counts the Buffers that were, or
        were to be, opened over the group: notes of earlier ones are no news.
        """
        self._connect, self._connected = connect, False
        self._rank, self.opening = rank, opening
        self._is_gone = False
        self._slow: threading.Thread | None = None  # an operation that nobody waits for any more
        self._num_ended = 0  # operations
        self._last: FailureNote | None = None
        self._texts: dict[int, tuple[bytes, float]] = {}  # by rank, with when it was first seen
        self._beat: bytes | None = None  # who was busy when somebody last looked
        self._num_beats = 0
        self._beat_seen = -math.inf
        self.label = _OPENING  # of the Buffer whose notes these are, once it has one

    def post(self, kind: type[PeerError], culprits: Sequence[int], done: Mapping[str, int]) -> None:
        """Note that this rank lives and has noticed a failure.

        The first note that names culprits stays: that a rank gives up afterwards and closes its
        Buffer is a consequence of the failure.
        """
        last, note = self._last, FailureNote(kind, tuple(culprits), time.monotonic(), dict(done))
        if last is not None and last.culprits and last.still_holds:
            return
        self._last, keys = note, {_key(self.label)}
        if kind is PeerDied and culprits:  # ranks that open another Buffer must know, too
            keys.add(_key(_OPENING))
        text = json.dumps([KINDS.index(kind), note.culprits, self.opening, note.done])

        def write() -> None:
            for key in keys:
                self._do("set", f"{key}/{self._rank}", text)
                self._do("set", key, "there are notes")

        self._ask(write)

    def withdraw(self) -> None:
        """This rank gets on: take its note back, unless whom it blames never comes back."""
        if self._last is not None and not self._last.is_final:
            self._last = None
            self._ask(lambda: self._do("set", f"{_key(self.label)}/{self._rank}", ""))

    def post_busy(self) -> None:
        """Note that this rank is busy, and gets on."""
        self._num_beats += 1
        self._ask(lambda: self._do("set", _BUSY, f"{self._rank} {self._num_beats}"))

    def forget_busy(self) -> None:
        """What is there when `is_busy` is next asked may be old."""
        self._beat, self._beat_seen = None, -math.inf

    def is_busy(self) -> bool:
        """Whether another rank has just said that it is busy. To be asked again and again."""
        before, self._beat = self._beat, self._ask(lambda: self._get(_BUSY))
        is_new = before is not None and self._beat != before
        if is_new and int(self._beat.split()[0]) != self._rank:
            self._beat_seen = time.monotonic()
        return time.monotonic() - self._beat_seen < _FRESH

    def read(self, ranks: Sequence[int]) -> dict[int, FailureNote]:
        """The notes of those of these ranks that have posted one, without this rank's own."""
        key = _key(self.label)

        def look() -> dict[int, bytes]:
            if not self._do("check", [key]):
                return {}
            return {rank: self._get(f"{key}/{rank}") for rank in ranks if rank != self._rank}

        notes = {}
        for rank, text in self._ask(look).items():
            if text != self._texts.get(rank, (b"",))[0]:
                self._texts[rank] = text, time.monotonic()
            if not text:  # never posted, or taken back
                continue
            kind, culprits, opening, done = json.loads(text)
            note = FailureNote(KINDS[kind], tuple(culprits), self._texts[rank][1], done)
            # Some ranks may have come to an opening when a connection of others breaks in it.
            is_news = opening >= self.opening - (note.kind is PeerDied and self.opening % 2 == 0)
            if self.label != _OPENING or is_news or note.is_final:
                notes[rank] = note
        return notes

    def _get(self, key: str) -> bytes:
        return self._do("get", key) if self._do("check", [key]) else b""

    def _do(self, name: str, *args: Any) -> Any:
        answer = getattr(self._store, name)(*args)
        self._num_ended += 1
        return answer

    def _ask(self, operations: Callable[[], _T]) -> _T:
        """Wait as long as one operation after the other ends in time."""
        answers: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                if not self._connected:
                    self._store = self._connect()
                    self._connected = True
                answers.append(operations())
            except Exception as error:
                errors.append(error)

        if not self._is_gone and not (self._slow is not None and self._slow.is_alive()):
            thread = threading.Thread(target=run, daemon=True, name="tokenyard-failure-board")
            ended = -1
            try:
                thread.start()
                while thread.is_alive() and ended != self._num_ended:
                    ended = self._num_ended
                    thread.join(_PATIENCE)
            except RuntimeError as error:  # the interpreter is about to end
                errors.append(error)
            self._is_gone, self._slow = bool(errors), thread
        if not answers:
            raise StoreLost("the group's store does not answer") from next(iter(errors), None)
        return answers[0]


def _key(label: str) -> str:
    return f"tokenyard/failures/{label}"
