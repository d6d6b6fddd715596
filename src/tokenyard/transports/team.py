"""Ranks that share memory: who they are, how they signal each other, and how long they wait.

Each rank has a control segment that all others map: for each of them a line for each kind of
signal, and two boxes for messages. Signals are epochs that only grow, so nothing is ever reset. A
box is used every other time; a rank cannot be two messages ahead of another, since it needs the
other's own message to get that far, so a box is never overwritten before it was read.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from tokenyard.errors import PeerDied, PeerTimeout, SharedMemoryError, name_ranks
from tokenyard.transports.base import Communicator
from tokenyard.transports.symmetric import LINE, Pool, Segment, attach
from tokenyard.types import round_up

MAIL, ROWS, READ = range(3)  # a message is there; rows were written; rows were read
_KINDS = 3
_BOX = 128  # int64s of a message that go at once
_GRACE = 0.2  # seconds for signals on their way, once a peer is seen dead


class SignalKernels(Protocol):
    def raise_signals(self, addresses: np.ndarray, epoch: int) -> None: ...

    def await_signals(
        self, addresses: np.ndarray, epoch: int, first: int, patience: int
    ) -> int: ...


class Team:
    def __init__(self, communicator: Communicator, kernels: SignalKernels, timeout: float) -> None:
        """All ranks of the communicator, on one machine. Raises OSError on all ranks if one of them
        cannot attach the others' memory.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self.pool = Pool()
        self._kernels = kernels
        self._timeout = timeout
        self._epochs = [0] * _KINDS
        self._attached: dict[tuple[int, int], tuple[np.ndarray, int]] = {}
        self._control, failure = _try_segment(self._control_bytes())
        fd, nonce = -1, int.from_bytes(os.urandom(7), "little")
        if self._control is not None:
            fd = self._control.fd
            self._control.array()[:8].view(np.int64)[0] = nonce
        self._pids, fds, nonces = _tell_all(communicator, [os.getpid(), fd, nonce])
        failure = failure or self._attach_controls(fds, nonces)
        failed = _tell_all(communicator, [int(failure is not None)])[0]
        if any(failed):
            self.close()
            others = name_ranks([rank for rank, one in enumerate(failed) if one])
            raise OSError(failure or f"{others} cannot attach the other ranks' memory")
        self._addresses()
        self._pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._pids)}
        self._deaths = select.poll()
        for fd in self._pidfds:
            self._deaths.register(fd, select.POLLIN)
        cores = len(os.sched_getaffinity(0))
        self._patience = 2000 if self.size <= cores else 20

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        answer = np.empty_like(message_RM)
        for begin in range(0, message_RM.shape[1], _BOX):
            part = slice(begin, begin + _BOX)
            rows = message_RM[:, part]
            box = (self._epochs[MAIL] + 1) % 2
            for rank, boxes in enumerate(self._outboxes):
                boxes[box, self.rank, : rows.shape[1]] = rows[rank]
            self.signal(MAIL)
            self.wait(MAIL, stage)
            answer[:, part] = self._outboxes[self.rank][box, :, : rows.shape[1]]
        return answer

    def signal(self, kind: int) -> None:
        """Tell all ranks; whatever this thread wrote to their memory comes first."""
        self._epochs[kind] += 1
        self._kernels.raise_signals(self._outgoing[kind], self._epochs[kind])

    def wait(self, kind: int, stage: str) -> None:
        """Until all ranks have signalled as often as this one: spin, then yield, then sleep."""
        addresses, epoch = self._incoming[kind], self._epochs[kind]
        first = self._kernels.await_signals(addresses, epoch, 0, self._patience)
        if first < self.size:
            self._wait_long(addresses, epoch, first, stage)

    def memory(self, rank: int, fd: int, num_bytes: int, stage: str) -> tuple[np.ndarray, int]:
        """A peer's segment, mapped when it is first asked for, and its address here."""
        if (rank, fd) not in self._attached:
            try:
                array = attach(self._pids[rank], fd, num_bytes)
            except OSError as error:
                raise self._lost(rank, stage) from error
            self._attached[rank, fd] = array, int(array.ctypes.data)
        return self._attached[rank, fd]

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        self.pool.close()
        for fd in getattr(self, "_pidfds", {}):
            os.close(fd)
        self._pidfds = {}

    def _wait_long(self, addresses: np.ndarray, epoch: int, first: int, stage: str) -> None:
        deadline = time.monotonic() + self._timeout
        dead_since, rounds = None, 0
        while True:
            before = first
            first = self._kernels.await_signals(addresses, epoch, first, 20)
            if first == self.size:
                return
            now = time.monotonic()
            if first > before:
                deadline, rounds = now + self._timeout, 0
            dead = self._dead_ranks()
            if dead and dead_since is None:
                dead_since = now
            if dead_since is not None and now > dead_since + _GRACE:
                raise self._died(dead, stage)
            if now > deadline:
                self._communicator.leave_word()
                raise PeerTimeout(
                    f"{stage}: {self._timeout:g} s passed; no word from rank {first}, "
                    f"on rank {self.rank}",
                    ranks=(first,),
                    stage=stage,
                )
            rounds += 1
            if rounds < 50:
                os.sched_yield()
            else:
                time.sleep(min(1e-3, 2e-5 * (rounds - 49)))

    def _lost(self, rank: int, stage: str) -> PeerDied:
        """A peer's memory is gone between its telling us of it and our asking: it has died, or has
        closed its Buffer, most likely because another rank died.
        """
        self._deaths.poll(1000)  # who dies loses its files a moment before it is seen to be dead
        dead = self._dead_ranks()
        if dead:
            return self._died(dead, stage)
        text = f"{stage}: rank {rank} has closed its Buffer, on rank {self.rank}"
        return PeerDied(text, ranks=(rank,), stage=stage)

    def _died(self, dead: tuple[int, ...], stage: str) -> PeerDied:
        self._communicator.leave_word()
        text = f"{stage}: {name_ranks(dead)} died, on rank {self.rank}"
        return PeerDied(text, ranks=dead, stage=stage)

    def _dead_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._pidfds[fd] for fd, _ in self._deaths.poll(0)))

    def _attach_controls(self, fds: Sequence[int], nonces: Sequence[int]) -> str | None:
        """Map all ranks' control segments. Returns what went wrong, if anything did."""
        self._controls: list[np.ndarray] = []
        for rank, (fd, nonce) in enumerate(zip(fds, nonces)):
            try:
                control = attach(self._pids[rank], fd, self._control_bytes())
            except OSError as error:
                return f"rank {self.rank} cannot attach the memory of rank {rank}: {error}"
            if control[:8].view(np.int64)[0] != nonce:
                return f"rank {self.rank} finds other memory where that of rank {rank} should be"
            self._controls.append(control)
        return None

    def _addresses(self) -> None:
        """Where signals go and come in, and the boxes [2, R, BOX] of every rank."""
        bases = [int(control.ctypes.data) for control in self._controls]

        def line(base: int, kind: int, rank: int) -> int:
            return base + LINE * (1 + kind * self.size + rank)

        own, ranks = bases[self.rank], range(self.size)
        self._outgoing = [
            np.array([line(base, kind, self.rank) for base in bases], np.int64)
            for kind in range(_KINDS)
        ]
        self._incoming = [
            np.array([line(own, kind, rank) for rank in ranks], np.int64) for kind in range(_KINDS)
        ]
        boxes = LINE * (1 + _KINDS * self.size)
        self._outboxes = [
            control[boxes:].view(np.int64)[: 2 * self.size * _BOX].reshape(2, self.size, _BOX)
            for control in self._controls
        ]

    def _control_bytes(self) -> int:
        exact = LINE * (1 + _KINDS * self.size) + 2 * self.size * _BOX * 8
        return round_up(exact, os.sysconf("SC_PAGESIZE"))


def _try_segment(num_bytes: int) -> tuple[Segment | None, str | None]:
    """A segment, or why there is none: a rank must say so to the others before it may raise."""
    try:
        return Segment(num_bytes), None
    except SharedMemoryError as error:
        return None, str(error)


def _tell_all(communicator: Communicator, numbers: list[int]) -> list[list[int]]:
    """Each of these numbers, of all ranks."""
    message = torch.tensor([numbers] * communicator.size)
    answer = torch.empty_like(message)
    one_each = [1] * communicator.size
    communicator.all_to_all(
        answer.view(torch.uint8), message.view(torch.uint8), one_each, one_each, "Buffer (attach)"
    )
    return answer.t().tolist()
