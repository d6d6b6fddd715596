"""Words that ranks leave in a group's store when something has gone wrong.

Engines say only that something failed. So every rank that notices leaves word, and whoever leaves
none is taken for the culprit; a rank that waits looks whether any other has left word.

The store may have died with the process that held it, or be behind a network that is cut, where an
operation on it may take for ever: each runs on a thread of its own, which is left behind if it does
not end in time. After that the store is taken for lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from tokenyard.errors import PeerError, PeerTimeout

_T = TypeVar("_T")

_KEY = "tokenyard/noticed"  # the last word of any rank; with a rank's number, its own
_GRACE = 0.5  # seconds that the other ranks get to say that they live, once an exchange has failed
_FRESH = 5.0
_PATIENCE = 0.5  # seconds for an operation on the store


class StoreLost(RuntimeError):
    """The store does not answer, or is gone."""


class Words:
    def __init__(self, connect: Callable[[], dist.Store], rank: int) -> None:
        """`connect` is called when there is something to say or to hear for the first time."""
        self._connect, self._connected = connect, False
        self._rank = rank
        self._lost = False

    def leave(self, error: PeerError | None) -> None:
        """This rank lives, and has noticed something."""
        kind = "timeout" if isinstance(error, PeerTimeout) else "death"

        def write() -> None:
            word = f"{time.time()} {kind}"
            self._store.set(f"{_KEY}/{self._rank}", word)
            self._store.set(_KEY, word)

        self._ask(write)

    def since(self, moment: float) -> str | None:
        """What a rank has noticed since then: "death" or "timeout"."""

        def read() -> str:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else "0 none"

        try:
            when, kind = self._ask(read).split()
        except StoreLost:  # the exchange will fail by itself
            return None
        return kind if float(when) > moment else None

    def silent(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Which of these ranks leave no word, though they are given some time."""
        left = [rank for rank in ranks if rank != self._rank]
        deadline = time.monotonic() + _GRACE
        while left and time.monotonic() < deadline:
            fresh = self._ask(partial(self._fresh, left))
            left = [rank for rank in left if rank not in fresh]
            time.sleep(0.01)
        return tuple(left)

    def _fresh(self, ranks: Sequence[int]) -> list[int]:
        """Those with words of the last seconds, and not of a failure that was got over."""
        found = []
        for rank in ranks:
            key = f"{_KEY}/{rank}"
            if self._store.check([key]):
                left = float(self._store.get(key).split()[0])
                if time.time() - left < _FRESH:
                    found.append(rank)
        return found

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
            thread.start()
            thread.join(_PATIENCE)
        if not answers:
            self._lost = True
            raise StoreLost("the group's store does not answer") from next(iter(errors), None)
        return answers[0]
