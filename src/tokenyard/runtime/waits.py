"""Whom this rank has waited for, and how long: words that compiled calls write too.

The whole time of a wait counts for the rank that came last: without it the wait would have ended
before.
"""

from __future__ import annotations

import time

import numpy as np

from tokenyard.wire.counters import LOG, LOG_WORDS, wait_words


class Waits:
    def __init__(self, num_ranks: int) -> None:
        self._size = num_ranks
        self._words = np.zeros(wait_words(num_ranks), np.int64)
        self._log = self._words[2 * num_ranks + 1 :].reshape(LOG, LOG_WORDS)
        self.address = int(self._words.ctypes.data)

    @property
    def nanoseconds_R(self) -> np.ndarray:
        return self._words[: self._size]

    @property
    def times_R(self) -> np.ndarray:
        """How often each rank came last."""
        return self._words[self._size : 2 * self._size]

    @property
    def count(self) -> int:
        """How many waits there were, since this object was made."""
        return int(self._words[2 * self._size])

    def note(self, rank: int, begin: int, end: int = 0) -> None:
        """This rank has waited since `begin`, and that rank came last."""
        end = end or time.monotonic_ns()
        count = self.count
        self._words[rank] += end - begin
        self._words[self._size + rank] += 1
        self._log[count % LOG] = rank, begin, end
        self._words[2 * self._size] = count + 1

    def since(self, count: int) -> list[tuple[int, int, int]]:
        """Whom for, begin and end of the waits after the first `count`, if they are still known."""
        first = max(count, self.count - LOG)
        return [tuple(self._log[i % LOG].tolist()) for i in range(first, self.count)]

    def reset(self) -> None:
        self._words[: 2 * self._size] = 0
