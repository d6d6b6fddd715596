"""Ranks that share memory: who they are, how they signal each other, and how long they wait.

Each rank has a control segment that all others map: for each of them a line for each kind of
signal, and two boxes for messages. Signals are epochs that only grow, so nothing is ever reset. A
box is used every other time; a rank cannot be two messages ahead of another, since it needs the
other's own message to get that far, so a box is never overwritten before it was read.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from tokenyard.errors import PeerDied, PeerTimeout, SharedMemoryError, name_ranks
from tokenyard.transports.base import Communicator
from tokenyard.transports.symmetric import LINE, Pool, Segment, attach
from tokenyard.types import round_up

MAIL, ROWS, READ = range(3)  # a message is there; rows were written; rows were read
_KINDS = 3
NO_MEMORY = -1  # told instead of a file descriptor
_BOX = 128  # int64s of a message that go at once
_GRACE = 0.2  # seconds for signals on their way, once a peer is seen dead


class SignalKernels(Protocol):
    def meet(self, outgoing: int, incoming: int, size: int, epoch: int, patience: int) -> int: ...

    def post(
        self,
        message_RM: np.ndarray,
        outboxes: int,
        outgoing: int,
        incoming: int,
        size: int,
        epoch: int,
        patience: int,
    ) -> int: ...

    def await_signals(
        self, incoming: int, size: int, epoch: int, first: int, patience: int
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
        self._tables: list[np.ndarray] = []
        self._kept: list[Segment] = []
        self._attached: dict[tuple[int, int], tuple[np.ndarray, int]] = {}
        self.control_bytes = self._control_bytes()
        control, failure = _try_segment(self.control_bytes)
        fd, nonce = -1, int.from_bytes(os.urandom(7), "little")
        if control is not None:
            self._kept.append(control)
            fd = control.fd
            control.array()[:8].view(np.int64)[0] = nonce
        self._pids, fds, nonces = tell_all(communicator, [os.getpid(), fd, nonce])
        failure = failure or self._attach_controls(fds, nonces)
        failed = tell_all(communicator, [int(failure is not None)])[0]
        if any(failed):
            self.close()
            others = name_ranks([rank for rank, one in enumerate(failed) if one])
            raise OSError(failure or f"{others} cannot attach the other ranks' memory")
        self._addresses()
        self._pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._pids)}
        self._deaths = select.poll()
        self._one_polls = threading.Lock()  # words may be exchanged while rows move
        for fd in self._pidfds:
            self._deaths.register(fd, select.POLLIN)
        cores = len(os.sched_getaffinity(0))
        self._patience = 2000 if self.size <= cores else 20
        # Some milliseconds where each rank has a core: two that sleep keep making each other wait.
        self._yields = 2000 if self.size <= cores else 50

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        if message_RM.shape[1] > _BOX:
            whole = range(0, message_RM.shape[1], _BOX)
            parts = [self.exchange(message_RM[:, at : at + _BOX], stage) for at in whole]
            return np.concatenate(parts, axis=1)
        self._epochs[MAIL] += 1
        epoch = self._epochs[MAIL]
        outgoing, incoming = self._lines[MAIL]
        outboxes, inbox = self._boxes[epoch % 2]
        first = self._kernels.post(
            message_RM, outboxes, outgoing, incoming, self.size, epoch, self._patience
        )
        if first < self.size:
            self._wait_long(incoming, epoch, first, stage)
        return inbox[:, : message_RM.shape[1]].copy()

    def meet(self, kind: int, stage: str) -> None:
        """Signal to all ranks and wait until they have done so as often: spin, then yield, then
        sleep. Whatever this thread wrote to their memory comes before the signal.
        """
        self._epochs[kind] += 1
        epoch = self._epochs[kind]
        outgoing, incoming = self._lines[kind]
        first = self._kernels.meet(outgoing, incoming, self.size, epoch, self._patience)
        if first < self.size:
            self._wait_long(incoming, epoch, first, stage)

    def wait_until(
        self, step: Callable[[], int], missing: Callable[[], Sequence[int]], stage: str
    ) -> None:
        """Until step(), which tries to get on, says that 0 is left to do.

        It may take for ever as long as there is less and less to do. Otherwise PeerDied names who
        has died, and PeerTimeout the ranks that missing() finds.
        """
        left = step()
        deadline = time.monotonic() + self._timeout
        dead_since, rounds = None, 0
        while left:
            before, left = left, step()
            now = time.monotonic()
            if left < before:
                deadline, rounds = now + self._timeout, 0
                continue
            dead = self._dead_ranks()
            if dead and dead_since is None:
                dead_since = now
            if dead_since is not None and now > dead_since + _GRACE:
                raise self._died(dead, stage)
            if now > deadline:
                self._communicator.leave_word()
                late = tuple(missing())
                raise PeerTimeout(
                    f"{stage}: {self._timeout:g} s passed; no word from {name_ranks(late)}, "
                    f"on rank {self.rank}",
                    ranks=late,
                    stage=stage,
                )
            rounds += 1
            if rounds < self._yields:
                os.sched_yield()
            else:
                time.sleep(min(1e-3, 2e-5 * (rounds - self._yields + 1)))

    def memory(self, rank: int, fd: int, num_bytes: int, stage: str) -> int:
        """The address here of a peer's segment, which is mapped when it is first asked for."""
        if (rank, fd) not in self._attached:
            try:
                array = attach(self._pids[rank], fd, num_bytes)
            except OSError as error:
                raise self._lost(rank, stage) from error
            self._attached[rank, fd] = array, int(array.ctypes.data)
        return self._attached[rank, fd][1]

    def check_memory(
        self, told_fds: np.ndarray, errors: Sequence[SharedMemoryError | None], stage: str
    ) -> None:
        """If a rank told of no memory for its rows, all raise."""
        if NO_MEMORY not in told_fds.flatten().tolist():
            return
        for error in errors:
            if error is not None:
                raise error
        without = np.flatnonzero((told_fds == NO_MEMORY).any(1)).tolist()
        raise SharedMemoryError(
            f"{stage}: {name_ranks(without)} could not get shared memory, on rank {self.rank}"
        )

    def share(self, num_bytes: int, stage: str) -> np.ndarray:
        """[R] the addresses of a segment of this size of every rank, for the life of the team."""
        error, words = None, (NO_MEMORY, 0)
        try:
            segment = Segment(num_bytes)
            self._kept.append(segment)
            words = segment.fd, segment.size
        except SharedMemoryError as problem:
            error = problem
        told = self.exchange(np.array([words] * self.size, np.int64), stage)
        self.check_memory(told[:, :1], [error], stage)
        return np.array(
            [
                segment.address if rank == self.rank else self.memory(rank, fd, size, stage)
                for rank, (fd, size) in enumerate(told.tolist())
            ],
            np.int64,
        )

    def close(self) -> None:
        for segment in self._kept:
            segment.close()
        self._kept.clear()
        self.pool.close()
        for fd in getattr(self, "_pidfds", {}):
            os.close(fd)
        self._pidfds = {}

    def _wait_long(self, incoming: int, epoch: int, first: int, stage: str) -> None:
        def step() -> int:
            nonlocal first
            first = self._kernels.await_signals(incoming, self.size, epoch, first, 20)
            return self.size - first

        self.wait_until(step, lambda: (first,), stage)

    def _lost(self, rank: int, stage: str) -> PeerDied:
        """A peer's memory is gone between its telling us of it and our asking: it has died, or has
        closed its Buffer, most likely because another rank died.
        """
        # Who dies loses its files a moment before it is seen to be dead.
        dead = self._dead_ranks(wait_ms=1000)
        if dead:
            return self._died(dead, stage)
        text = f"{stage}: rank {rank} has closed its Buffer, on rank {self.rank}"
        return PeerDied(text, ranks=(rank,), stage=stage)

    def _died(self, dead: tuple[int, ...], stage: str) -> PeerDied:
        self._communicator.leave_word()
        text = f"{stage}: {name_ranks(dead)} died, on rank {self.rank}"
        return PeerDied(text, ranks=dead, stage=stage)

    def _dead_ranks(self, wait_ms: int = 0) -> tuple[int, ...]:
        with self._one_polls:
            return tuple(sorted(self._pidfds[fd] for fd, _ in self._deaths.poll(wait_ms)))

    def _attach_controls(self, fds: Sequence[int], nonces: Sequence[int]) -> str | None:
        """Map all ranks' control segments. Returns what went wrong, if anything did."""
        self._controls: list[np.ndarray] = []
        for rank, (fd, nonce) in enumerate(zip(fds, nonces)):
            try:
                control = attach(self._pids[rank], fd, self.control_bytes)
            except OSError as error:
                return f"rank {self.rank} cannot attach the memory of rank {rank}: {error}"
            if control[:8].view(np.int64)[0] != nonce:
                return f"rank {self.rank} finds other memory where that of rank {rank} should be"
            self._controls.append(control)
        return None

    def _addresses(self) -> None:
        """Where signals go and come in, and where messages do: tables for the kernels."""
        bases = [int(control.ctypes.data) for control in self._controls]
        own, ranks = bases[self.rank], range(self.size)

        def line(base: int, kind: int, rank: int) -> int:
            return base + LINE * (1 + kind * self.size + rank)

        def box(base: int, turn: int, rank: int) -> int:
            return base + self._signal_bytes() + 8 * _BOX * (turn * self.size + rank)

        self._lines = [
            (
                self._table([line(base, kind, self.rank) for base in bases]),
                self._table([line(own, kind, rank) for rank in ranks]),
            )
            for kind in range(_KINDS)
        ]
        mine = self._controls[self.rank][self._signal_bytes() :].view(np.int64)
        inboxes = mine[: 2 * self.size * _BOX].reshape(2, self.size, _BOX)
        self._boxes = [
            (self._table([box(base, turn, self.rank) for base in bases]), inboxes[turn])
            for turn in range(2)
        ]

    def _table(self, addresses: list[int]) -> int:
        """The address of an array that lives as long as the team."""
        self._tables.append(np.array(addresses, np.int64))
        return int(self._tables[-1].ctypes.data)

    def _signal_bytes(self) -> int:
        return LINE * (1 + _KINDS * self.size)

    def _control_bytes(self) -> int:
        exact = self._signal_bytes() + 2 * self.size * _BOX * 8
        return round_up(exact, os.sysconf("SC_PAGESIZE"))


def _try_segment(num_bytes: int) -> tuple[Segment | None, str | None]:
    """A segment, or why there is none: a rank must say so to the others before it may raise."""
    try:
        return Segment(num_bytes), None
    except SharedMemoryError as error:
        return None, str(error)


def tell_all(communicator: Communicator, numbers: list[int]) -> list[list[int]]:
    """Each of these numbers, of all ranks."""
    message = torch.tensor([numbers] * communicator.size)
    answer = torch.empty_like(message)
    one_each = [1] * communicator.size
    communicator.all_to_all(
        answer.view(torch.uint8), message.view(torch.uint8), one_each, one_each, "Buffer (attach)"
    )
    return answer.t().tolist()
