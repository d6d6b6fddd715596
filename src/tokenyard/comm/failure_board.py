"""Notes about failures that the ranks of a Buffer leave in the group's store.

Engines say only that something failed. So every rank that notices a failure posts a note: what
kind of failure it is, which ranks are to blame if it knows, and how many exchanges it has ended
itself. A rank that waits reads the notes of the others and raises the same failure. Ranks that were
to come and left no note are blamed.

A rank that compiles kernels says so here too, again and again, and is waited for.

The store may have died with the process that held it, or a cut network may hide it; then an
operation on it may never end. So each operation runs on a thread of its own, which is left behind
if it does not end in time. After that the store counts as lost and is not asked again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from tokenyard.errors import PeerDied, PeerError, PeerLeft, PeerTimeout

_T = TypeVar("_T")

_FRESH = 5.0  # seconds for which a note says that its author lives, and that a rank is late
_OPENING = "opening"  # the label of all Buffers that have none yet
_BUSY = "tokenyard/busy"
_PATIENCE = 0.5  # seconds for an operation on the store
KINDS: tuple[type[PeerError], ...] = (PeerDied, PeerLeft, PeerTimeout)  # the gravest first


class StoreLost(RuntimeError):
    """The store does not answer, or is gone."""


class FailureNote(NamedTuple):
    kind: type[PeerError]
    culprits: tuple[int, ...]  # as far as the author knows
    when: float
    done: Mapping[str, int]  # exchanges that the author has ended, by the name of the connections

    @property
    def is_fresh(self) -> bool:
        return time.time() - self.when < _FRESH

    @property
    def still_holds(self) -> bool:
        """A rank that was late once may have come since."""
        return self.kind is not PeerTimeout or self.is_fresh

    @property
    def is_final(self) -> bool:
        """The culprits never come back: they have died, or have closed their Buffer."""
        return bool(self.culprits) and self.kind is not PeerTimeout


class FailureBoard:
    def __init__(self, connect: Callable[[], dist.Store], rank: int) -> None:
        """The first `post` or `read` calls `connect`."""
        self._connect, self._connected = connect, False
        self._rank = rank
        self._lost = False
        self._last: FailureNote | None = None
        self.label = _OPENING  # of the Buffer whose notes these are, once it has one

    def post(self, kind: type[PeerError], culprits: Sequence[int], done: Mapping[str, int]) -> None:
        """Note that this rank lives and has noticed a failure.

        The first note that names culprits stays: that a rank gives up afterwards and closes its
        Buffer is a consequence of the failure.
        """
        last, note = self._last, FailureNote(kind, tuple(culprits), time.time(), dict(done))
        if last is not None and last.culprits and last.still_holds:
            return
        self._last, keys = note, {_key(self.label)}
        if kind is PeerDied and culprits:  # ranks that open another Buffer must know, too
            keys.add(_key(_OPENING))
        text = json.dumps([KINDS.index(kind), note.culprits, note.when, note.done])

        def write() -> None:
            for key in keys:
                self._store.set(f"{key}/{self._rank}", text)
                self._store.set(key, "there are notes")

        self._ask(write)

    def post_busy(self) -> None:
        """Note that this rank is busy, and gets on."""
        now = repr(time.time())
        self._ask(lambda: self._store.set(f"{_BUSY}/{self._rank}", now))

    def is_busy(self, ranks: Sequence[int]) -> bool:
        """Whether one of these ranks has noted just now that it is busy."""
        keys = [f"{_BUSY}/{rank}" for rank in ranks if rank != self._rank]

        def look() -> list[bytes]:
            return [self._store.get(key) for key in keys if self._store.check([key])]

        return any(time.time() - float(when) < _FRESH for when in self._ask(look))

    def read(self, ranks: Sequence[int]) -> dict[int, FailureNote]:
        """The notes of those of these ranks that have posted one, without this rank's own."""
        key = _key(self.label)
        keys = {rank: f"{key}/{rank}" for rank in ranks if rank != self._rank}

        def look() -> dict[int, bytes]:
            if not self._store.check([key]):
                return {}
            return {
                rank: self._store.get(one) for rank, one in keys.items() if self._store.check([one])
            }

        notes = {}
        for rank, text in self._ask(look).items():
            kind, culprits, when, done = json.loads(text)
            notes[rank] = FailureNote(KINDS[kind], tuple(culprits), when, done)
        return notes

    def _ask(self, operation: Callable[[], _T]) -> _T:
        answers: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                if not self._connected:
                    self._store = self._connect()
                    self._connected = True
                answers.append(operation())
            except Exception as error:
                errors.append(error)

        if not self._lost:
            thread = threading.Thread(target=run, daemon=True, name="tokenyard-failure-board")
            try:
                thread.start()
                thread.join(_PATIENCE)
            except RuntimeError as error:  # the interpreter is about to end
                errors.append(error)
        if not answers:
            self._lost = True
            raise StoreLost("the group's store does not answer") from next(iter(errors), None)
        return answers[0]


def _key(label: str) -> str:
    return f"tokenyard/failures/{label}"
