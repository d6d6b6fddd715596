"""Words that the ranks of a Buffer leave in the group's store when something has gone wrong.

Engines say only that something failed. So every rank that notices leaves word: what kind of failure
it is, who is to blame if it knows, and how far it has come itself. A rank that waits looks whether
any other has left word, and raises the same; one that was to come, and leaves none, is silent.

The store may have died with the process that held it, or be behind a network that is cut, where an
operation on it may take for ever: each runs on a thread of its own, which is left behind if it does
not end in time. After that the store is taken for lost.
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

_FRESH = 5.0  # seconds for which a word says that its rank lives, and that a rank is late
_OPENING = "opening"  # the label of all Buffers that have none yet
_PATIENCE = 0.5  # seconds for an operation on the store
KINDS: tuple[type[PeerError], ...] = (PeerDied, PeerLeft, PeerTimeout)  # the gravest first


class StoreLost(RuntimeError):
    """The store does not answer, or is gone."""


class Word(NamedTuple):
    kind: type[PeerError]
    culprits: tuple[int, ...]  # as far as its rank knows
    when: float
    done: Mapping[str, int]  # exchanges that its rank has ended, by the name of the connections

    @property
    def is_fresh(self) -> bool:
        return time.time() - self.when < _FRESH

    @property
    def still_holds(self) -> bool:
        """A rank that was late once may have come since."""
        return self.kind is not PeerTimeout or self.is_fresh


class Words:
    def __init__(self, connect: Callable[[], dist.Store], rank: int) -> None:
        """`connect` is called when there is something to say or to hear for the first time."""
        self._connect, self._connected = connect, False
        self._rank = rank
        self._lost = False
        self._last: Word | None = None
        self.label = _OPENING  # of the Buffer whose words they are, once it has one

    def leave(
        self, kind: type[PeerError], culprits: Sequence[int], done: Mapping[str, int]
    ) -> None:
        """This rank lives, and has noticed something. Its first word about who is to blame stays:
        that a rank gives up, and closes its Buffer, is a consequence.
        """
        last, word = self._last, Word(kind, tuple(culprits), time.time(), dict(done))
        if last is not None and last.culprits and last.still_holds:
            return
        self._last, keys = word, {self._key()}
        if kind is PeerDied and culprits:  # for whoever opens another Buffer, too
            keys.add(_key(_OPENING))
        text = json.dumps([KINDS.index(kind), word.culprits, word.when, word.done])

        def write() -> None:
            for key in keys:
                self._store.set(f"{key}/{self._rank}", text)
                self._store.set(key, "there are words")

        self._ask(write)

    def read(self, ranks: Sequence[int]) -> dict[int, Word]:
        """Those of other ranks that have left any."""
        key = self._key()
        keys = {rank: f"{key}/{rank}" for rank in ranks if rank != self._rank}

        def look() -> dict[int, bytes]:
            if not self._store.check([key]):
                return {}
            return {
                rank: self._store.get(one) for rank, one in keys.items() if self._store.check([one])
            }

        words = {}
        for rank, text in self._ask(look).items():
            kind, culprits, when, done = json.loads(text)
            words[rank] = Word(KINDS[kind], tuple(culprits), when, done)
        return words

    def _key(self) -> str:
        return _key(self.label)

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
            thread = threading.Thread(target=run, daemon=True, name="tokenyard-words")
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
    return f"tokenyard/words/{label}"
