"""Ranks that share memory: who they are, how they signal each other, and how long they wait.

Each rank has a control segment that all others map: a line for what it has to say to all, and for
each of them a line for each kind of signal, and two boxes for messages. Signals are epochs that
only grow, so nothing is ever reset. A box is used every other time; a rank cannot be two messages
ahead of another, since it needs the other's own message to get that far, so a box is never
overwritten before it was read.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import torch

from tokenyard.errors import PeerDied, PeerError, PeerTimeout, SharedMemoryError, name_ranks
from tokenyard.transports import blocks
from tokenyard.transports.base import Communicator
from tokenyard.transports.blocks import NO_MEMORY
from tokenyard.transports.symmetric import LINE, Pool, Segment, attach
from tokenyard.types import round_up

MAIL, ROWS, READ = range(3)  # a message is there; rows were written; rows were read
_KINDS = 3
_BOX = 128  # int64s of a message that go at once
_NONCE, _FAILURE, _BEAT = range(3)  # int64s of a control segment's first line
_NOTICE_MS = 500  # connections break a moment before a process is seen to be dead
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
    def __init__(
        self,
        communicator: Communicator,
        kernels: SignalKernels,
        timeout: float,
        box: int = _BOX,
    ) -> None:
        """All ranks of the communicator, on one machine. Raises OSError on all ranks if one of them
        cannot attach the others' memory. Messages of up to `box` integers go at once.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._members = communicator.members
        self._me = self._members[self.rank]
        self._box = box
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
            control.array()[:LINE].view(np.int64)[_NONCE] = nonce
        self._pids, fds, nonces = tell_all(communicator, [os.getpid(), fd, nonce])
        failure = failure or self._attach_controls(fds, nonces)
        failed = tell_all(communicator, [int(failure is not None)])[0]
        if any(failed):
            self.close()
            others = name_ranks([self._members[rank] for rank, one in enumerate(failed) if one])
            raise OSError(failure or f"{others} cannot attach the other ranks' memory")
        self._addresses()
        self._pidfds = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._pids)}
        self._deaths = select.poll()
        self._one_polls = threading.Lock()  # words may be exchanged while rows move
        for fd in self._pidfds:
            self._deaths.register(fd, select.POLLIN)
        # Ranks bound to fewer cores than there are ranks mostly share them with other programs, a
        # server's for example, which would wait for a rank that spins.
        cores = len(os.sched_getaffinity(0))
        self.patience = 2000 if self.size <= cores else 20
        # Some milliseconds where each rank has a core: two that sleep keep making each other wait.
        self._yields = 2000 if self.size <= cores else 50

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        if message_RM.shape[1] > self._box:
            whole = range(0, message_RM.shape[1], self._box)
            parts = [self.exchange(message_RM[:, at : at + self._box], stage) for at in whole]
            return np.concatenate(parts, axis=1)
        self._epochs[MAIL] += 1
        epoch = self._epochs[MAIL]
        outgoing, incoming = self._lines[MAIL]
        outboxes, inbox = self._boxes[epoch % 2]
        first = self._kernels.post(
            message_RM, outboxes, outgoing, incoming, self.size, epoch, self.patience
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
        first = self._kernels.meet(outgoing, incoming, self.size, epoch, self.patience)
        if first < self.size:
            self._wait_long(incoming, epoch, first, stage)

    def wait_until(
        self, step: Callable[[], int], missing: Callable[[], Sequence[int]], stage: str
    ) -> None:
        """Until step(), which tries to get on, says that 0 is left to do.

        It may take for ever as long as there is less and less to do, or those waited for get on
        with what they do elsewhere (`beat`). Otherwise PeerDied names who has died, and PeerTimeout
        the ranks that missing() finds, or whom a rank of the team has found to be at fault.
        """
        dead, late = self.who_stops(step, missing, stage)
        if dead:
            raise self.died(dead, stage)
        if late:
            raise self.timed_out(late, stage)

    def who_stops(
        self,
        step: Callable[[], int],
        missing: Callable[[], Sequence[int]],
        stage: str,
        given_up: Collection[int] = (),
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `wait_until`, but gives back who has died, and who is late: nobody, if all is done.

        That a rank has died which was given up before says nothing.
        """
        left = step()
        deadline = time.monotonic() + self._timeout
        dead_since, rounds, beats = None, 0, self._beats()
        while left:
            before, left = left, step()
            now = time.monotonic()
            if left < before:
                deadline, rounds = now + self._timeout, 0
                continue
            if self._beats() != beats:
                deadline, beats = now + self._timeout, self._beats()
            self.raise_told(stage)
            dead = tuple(rank for rank in self.dead_ranks() if rank not in given_up)
            if dead and dead_since is None:
                dead_since = now
            if dead_since is not None and now > dead_since + _GRACE:
                return dead, ()
            if now > deadline:
                return (), tuple(self._members[rank] for rank in missing())
            rounds += 1
            if rounds < self._yields:
                os.sched_yield()
            else:
                time.sleep(min(1e-3, 2e-5 * (rounds - self._yields + 1)))
        return (), ()

    def beat(self) -> None:
        """This rank gets on with what it does elsewhere: whoever waits for it should be patient."""
        self._heads[self.rank][_BEAT] += 1

    def tell(self, error: PeerError) -> None:
        """Tell the team of a rank elsewhere that is at fault: it need not wait to find out. For
        good, since no rank goes on after that.
        """
        if error.ranks:
            died = isinstance(error, PeerDied)
            self._heads[self.rank][_FAILURE] = 2 * (1 + error.rank) + died  # one store, so whole

    def memory(self, rank: int, fd: int, num_bytes: int, stage: str) -> int:
        """The address here of a peer's segment, which is mapped when it is first asked for."""
        if (rank, fd) not in self._attached:
            try:
                array = attach(self._pids[rank], fd, num_bytes)
            except OSError as error:
                raise self._lost(rank, stage) from error
            self._attached[rank, fd] = array, int(array.ctypes.data)
        return self._attached[rank, fd][1]

    def share(self, num_bytes: int, stage: str) -> np.ndarray:
        """[R] the addresses of a segment of this size of every rank, for the life of the team."""
        error, words = None, (NO_MEMORY, 0)
        try:
            segment = self.keep(num_bytes)
            words = segment.fd, segment.size
        except SharedMemoryError as problem:
            error = problem
        told = self.exchange(np.array([words] * self.size, np.int64), stage)
        blocks.check(told[:, :1], [error], stage, self.rank)
        return self.addresses(told.tolist(), segment.address, stage)

    def addresses(self, told: Sequence[Sequence[int]], own: int, stage: str) -> np.ndarray:
        """[R] where segments begin here, of which ranks told (fd, size); `own` is this rank's."""
        return np.array(
            [
                own if rank == self.rank else self.memory(rank, fd, size, stage)
                for rank, (fd, size) in enumerate(told)
            ],
            np.int64,
        )

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who has died, if that is why something else between these ranks has failed."""
        dead = self.dead_ranks(wait_ms=_NOTICE_MS)
        return self.died(dead, stage) if dead else self._communicator.explain(stage, error)

    def keep(self, num_bytes: int) -> Segment:
        """A segment of this rank, for the life of the team."""
        segment = Segment(num_bytes)
        self._kept.append(segment)
        return segment

    def close(self) -> None:
        for segment in self._kept:
            segment.close()
        self._kept.clear()
        self.pool.close()
        if hasattr(self, "_pidfds"):
            with self._one_polls:
                for fd in self._pidfds:
                    self._deaths.unregister(fd)
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
        dead = self.dead_ranks(wait_ms=1000)
        if dead:
            return self.died(dead, stage)
        self.raise_told(stage)
        gone = self._members[rank]
        text = f"{stage}: rank {gone} has closed its Buffer, on rank {self._me}"
        return PeerDied(text, ranks=(gone,), stage=stage)

    def died(self, dead: tuple[int, ...], stage: str) -> PeerDied:
        text = f"{stage}: {name_ranks(dead)} died, on rank {self._me}"
        error = PeerDied(text, ranks=dead, stage=stage)
        self._communicator.leave_word(error)
        return error

    def timed_out(self, late: tuple[int, ...], stage: str) -> PeerTimeout:
        error = PeerTimeout(
            f"{stage}: {self._timeout:g} s passed; no word from {name_ranks(late)}, "
            f"on rank {self._me}",
            ranks=late,
            stage=stage,
        )
        self._communicator.leave_word(error)
        return error

    def dead_ranks(self, wait_ms: int = 0) -> tuple[int, ...]:
        with self._one_polls:
            dead = sorted(self._pidfds[fd] for fd, _ in self._deaths.poll(wait_ms))
        return tuple(self._members[rank] for rank in dead)

    def _beats(self) -> int:
        return sum([int(head[_BEAT]) for head in self._heads])

    def raise_told(self, stage: str) -> None:
        """If a rank of the team has told of a failure elsewhere."""
        for rank, head in enumerate(self._heads):
            told = int(head[_FAILURE])
            if told and rank != self.rank:
                culprit, died = told // 2 - 1, told % 2 == 1
                kind, what = (PeerDied, "died") if died else (PeerTimeout, "does not answer")
                error = kind(
                    f"{stage}: rank {culprit} {what}, as rank {self._members[rank]} has noticed, "
                    f"on rank {self._me}",
                    ranks=(culprit,),
                    stage=stage,
                )
                self._communicator.leave_word(error)  # so that no other node blames this rank
                raise error

    def _attach_controls(self, fds: Sequence[int], nonces: Sequence[int]) -> str | None:
        """Map all ranks' control segments. Returns what went wrong, if anything did."""
        self._controls: list[np.ndarray] = []
        for rank, (fd, nonce) in enumerate(zip(fds, nonces)):
            try:
                control = attach(self._pids[rank], fd, self.control_bytes)
            except OSError as error:
                them = self._members[rank]
                return f"rank {self._me} cannot attach the memory of rank {them}: {error}"
            if control[:LINE].view(np.int64)[_NONCE] != nonce:
                them = self._members[rank]
                return f"rank {self._me} finds other memory where that of rank {them} should be"
            self._controls.append(control)
        self._heads = [control[:LINE].view(np.int64) for control in self._controls]
        return None

    def _addresses(self) -> None:
        """Where signals go and come in, and where messages do: tables for the kernels."""
        bases = [int(control.ctypes.data) for control in self._controls]
        own, ranks = bases[self.rank], range(self.size)

        def line(base: int, kind: int, rank: int) -> int:
            return base + LINE * (1 + kind * self.size + rank)

        def box(base: int, turn: int, rank: int) -> int:
            return base + self._signal_bytes() + 8 * self._box * (turn * self.size + rank)

        self._lines = [
            (
                self._table([line(base, kind, self.rank) for base in bases]),
                self._table([line(own, kind, rank) for rank in ranks]),
            )
            for kind in range(_KINDS)
        ]
        mine = self._controls[self.rank][self._signal_bytes() :].view(np.int64)
        inboxes = mine[: 2 * self.size * self._box].reshape(2, self.size, self._box)
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
        exact = self._signal_bytes() + 2 * self.size * self._box * 8
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
