"""One of many virtual ranks runs at a time, from one meeting to the next.

Hundreds of threads that run at once spend most of their time on fighting for the interpreter. So
the rank that runs has a baton, and hands it on when it waits for others in a meeting. If nobody
hands the baton on for a while, the other ranks run without it: the rank that has it may be waiting
for one of them by some other means.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

_MANY = 32  # fewer ranks run as they like
_PATIENCE = 0.25  # seconds in which somebody should hand it on


class Gate:
    """Where a thread waits until another opens it, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """False if that much time has passed."""
        return self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Baton:
    def __init__(self, num_ranks: int) -> None:
        self.is_used = num_ranks > _MANY
        self.patience = _PATIENCE if self.is_used else threading.TIMEOUT_MAX
        self._lock = threading.Lock()
        self._queue: deque[Gate] = deque()
        self._is_free = True
        self._handed = time.monotonic()

    def call(self, gates: Iterable[Gate]) -> None:
        """Open these: one after the other, as the baton comes to them."""
        with self._lock:
            if self.is_used:
                self._queue.extend(gates)
                if self._is_free:
                    self._open_next()
                return
        for gate in gates:
            gate.open()

    def hand_on(self) -> None:
        """A rank is about to wait, or has ended."""
        if self.is_used:
            with self._lock:
                self._open_next()

    def _open_next(self) -> None:
        self._handed = time.monotonic()
        self._is_free = not self._queue
        if self._queue:
            self._queue.popleft().open()

    def waits_in_vain(self, gate: Gate) -> bool:
        """Nobody has handed the baton on for long: the rank at this gate goes without it."""
        with self._lock:
            if gate in self._queue and time.monotonic() - self._handed > self.patience:
                self._queue.remove(gate)
                return True
            return False

    def retire(self) -> None:
        """Take the baton away: from now on ranks run as they like."""
        with self._lock:
            self.is_used, self.patience = False, threading.TIMEOUT_MAX
            while self._queue:
                self._queue.popleft().open()

    def begin(self) -> None:
        """Wait until this rank may run."""
        if self.is_used:
            gate = Gate()
            self.call([gate])
            while not (gate.wait(self.patience) or self.waits_in_vain(gate)):
                pass
