"""Ranks that share memory: who they are, how they signal each other, and how long they wait.

Each rank has a control segment that all others map: a line for what it has to say to all, and for
each of them a line for each kind of signal, and two boxes for messages. Signals are epochs that
only grow, so nothing is ever reset. A box is used every other time; a rank cannot be two messages
ahead of another, since it needs the other's own message to get that far, so a box is never
overwritten before it was read.

To all a rank says whether it has closed its Buffer, whether a call has failed, whose fault that was
and why, and which of its segments it has given back to the system, so that the others unmap them.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tokenyard.comm.base import Communicator
from tokenyard.errors import (
    TEXT_WORDS,
    PeerDied,
    PeerError,
    PeerLeft,
    PeerTimeout,
    SharedMemoryError,
    name_ranks,
    text_to_words,
    words_to_text,
)
from tokenyard.shm import shared_rows
from tokenyard.shm.pool import SegmentPool
from tokenyard.shm.segment import Gone, Segment, attach
from tokenyard.shm.shared_rows import NOTHING
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE

MAIL, ROWS, READ = range(3)  # a message is there; rows were written; rows were read
_KINDS = 3
_BOX = 128  # int64s of a message that go at once
_FAILURE, _LEFT, _BEAT, _DROPS = range(4)  # int64s of a control segment's first line
_FAILURES = (PeerTimeout, PeerDied, PeerLeft)
_DROPPED = 64  # the last segments that a rank has given back: their identities
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


class Stopped(NamedTuple):
    """Ranks, by their numbers in the whole group, without which a wait cannot end, and why."""

    kind: type[PeerError]
    ranks: tuple[int, ...]


class Mapped(NamedTuple):
    """A peer's segment in this process. Its address is good for as long as `array` lives."""

    array: np.ndarray
    address: int


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
        self.pool = SegmentPool(self._say_dropped)
        self.shrinks = False  # whether the others go on without a rank that fails
        # Given the stage, raises if a rank whose message is awaited has gone on to something else.
        self.look: Callable[[str], None] | None = None
        self._kernels = kernels
        self._timeout = timeout
        self._epochs = [0] * _KINDS
        self._tables: list[np.ndarray] = []
        self._kept: list[Segment] = []
        self._for_good: list[Mapped] = []
        self._attached: list[dict[int, Mapped]] = [{} for _ in range(self.size)]  # by identity
        self._forgotten = [0] * self.size  # how many segments each rank had dropped
        self._pidfds: dict[int, int] = {}
        self._deaths = select.poll()
        self._one_polls = threading.Lock()  # words may be exchanged while rows move
        self._heads: list[np.ndarray] = []
        self.control_bytes = self._control_bytes()
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise
        # Ranks bound to fewer cores than there are ranks mostly share them with other programs, a
        # server's for example, which would wait for a rank that spins.
        cores = len(os.sched_getaffinity(0))
        self.patience = 2000 if self.size <= cores else 20
        # Some milliseconds where each rank has a core: two that sleep keep making each other wait.
        self._yields = 2000 if self.size <= cores else 50

    def _open_all(self) -> None:
        control, failure = _try_segment(self.control_bytes)
        told = NOTHING
        if control is not None:
            self._kept.append(control)
            told = control.told
        self._pids, *named = tell_all(self._communicator, [os.getpid(), *told])
        failure = failure or self._attach_controls(list(zip(*named))) or self._watch()
        failed = tell_all(self._communicator, [int(failure is not None)])[0]
        if any(failed):
            others = name_ranks([self._members[rank] for rank, one in enumerate(failed) if one])
            raise OSError(failure or f"{others} cannot attach the other ranks' memory")
        self._addresses()

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
            self._wait_long(incoming, epoch, first, stage, self.look)
        return inbox[:, : message_RM.shape[1]].copy()

    @property
    def mails(self) -> int:
        """How many messages this rank has sent to each of the others."""
        return self._epochs[MAIL]

    @property
    def mail_lines(self) -> int:
        """The address of [R] addresses: of each rank's word that says how many it has sent here."""
        return self._lines[MAIL][1]

    def next_message(self, rank: int) -> np.ndarray:
        """What a rank has sent in an exchange that this one has not begun."""
        return self._boxes[(self.mails + 1) % 2][1][rank]

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
        stopped = self.who_stops(step, missing, stage)
        if stopped is not None:
            raise self.blame(stopped, stage)

    def who_stops(
        self,
        step: Callable[[], int],
        missing: Callable[[], Sequence[int]],
        stage: str,
        given_up: Collection[int] = (),
    ) -> Stopped | None:
        """As `wait_until`, but gives back who is at fault: None if all is done.

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
            if not self.shrinks:
                self.raise_told(stage)
            gone = self._have_left()
            if gone and step():  # what they did before they left may have come just now
                gone &= set(missing())
                if gone:
                    if not self.shrinks:
                        self.raise_told(stage)  # a rank says why before it leaves
                    return Stopped(PeerLeft, self._names(sorted(gone)))
            dead = tuple(rank for rank in self.dead_ranks() if rank not in given_up)
            if dead and dead_since is None:
                dead_since = now
            if dead_since is not None and now > dead_since + _GRACE:
                return Stopped(PeerDied, dead)
            if now > deadline:
                return Stopped(PeerTimeout, self._names(missing()))
            rounds += 1
            if rounds < self._yields:
                os.sched_yield()
            else:
                time.sleep(min(1e-3, 2e-5 * (rounds - self._yields + 1)))
        return None

    def beat(self) -> None:
        """This rank gets on with what it does elsewhere: whoever waits for it should be patient."""
        self._heads[self.rank][_BEAT] += 1

    def tell(self, error: PeerError) -> None:
        """Tell the team who is at fault, so that nobody needs to wait to find out. For good, since
        no rank goes on after that; the first word stays.
        """
        head = self._heads[self.rank] if self._heads else None
        if head is not None and error.ranks and not head[_FAILURE]:
            self._texts[self.rank][:] = text_to_words(str(error))
            if error.ranks == (self._me,):
                self._communicator.leave_word(error)
            kind = next((k for k, one in enumerate(_FAILURES) if isinstance(error, one)), 2)
            head[_FAILURE] = 4 * (1 + error.rank) + kind  # one store, so whole

    def memory(self, rank: int, told: Sequence[int], stage: str) -> Mapped:
        """A peer's segment, of which it told (Segment.told); mapped when it is first asked for."""
        fd, size, identity = told
        if int(self._heads[rank][_DROPS]) != self._forgotten[rank]:
            self._unmap_dropped(rank)
        mapped = self._attached[rank].get(identity)
        if mapped is None:
            try:
                array = attach(self._pids[rank], fd, size, identity)
            except Gone as error:
                raise self._lost(rank, stage) from error
            except SharedMemoryError as error:
                them = self._members[rank]
                what = f"{stage}: rank {self._me} cannot map the memory of rank {them}: {error}"
                raise SharedMemoryError(what) from error
            mapped = self._attached[rank][identity] = Mapped(array, int(array.ctypes.data))
        return mapped

    def memory_at(
        self, rank: int, told: Sequence[int], begin: int, num_bytes: int, stage: str
    ) -> Mapped:
        """So many bytes of a peer's segment, from where it says that they begin."""
        array, address = self.memory(rank, told, stage)
        if not 0 <= begin <= array.size - num_bytes:
            raise self.stray(rank, stage)
        return Mapped(array, address + begin)

    def share(self, num_bytes: int, stage: str) -> np.ndarray:
        """[R] the addresses of a segment of this size of every rank, for the life of the team."""
        error, told = None, NOTHING
        try:
            told = self.keep(num_bytes).told
        except SharedMemoryError as problem:
            error = problem
        told_R3 = self.exchange(np.array([told] * self.size, np.int64), stage)
        shared_rows.check(told_R3[:, :1], [error], stage, self.rank)
        addresses_R = np.zeros(self.size, np.int64)
        try:
            own = Mapped(self._kept[-1].array(), self._kept[-1].address)
            mapped = self.map_all(told_R3.tolist(), own, stage)
            self._for_good += mapped
            addresses_R[:] = [one.address for one in mapped]
        except SharedMemoryError as problem:
            error = problem
        # No rank may close its segment before all have mapped it.
        able_R1 = self.exchange(
            np.full((self.size, 1), shared_rows.NO_MEMORY if error else 0), stage
        )
        shared_rows.check(able_R1, [error], stage, self.rank)
        return addresses_R

    def map_all(self, told: Sequence[Sequence[int]], own: Mapped, stage: str) -> list[Mapped]:
        """The segments that ranks told of; `own` is this rank's."""
        return [
            own if rank == self.rank else self.memory(rank, one, stage)
            for rank, one in enumerate(told)
        ]

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who has died, if that is why something else between these ranks has failed."""
        dead = self.dead_ranks(wait_ms=_NOTICE_MS)
        if dead:
            return self.blame(Stopped(PeerDied, dead), stage)
        return self._communicator.explain(stage, error)

    def keep(self, num_bytes: int) -> Segment:
        """A segment of this rank, for the life of the team."""
        segment = Segment(num_bytes)
        self._kept.append(segment)
        return segment

    def close(self) -> None:
        if self._heads:
            self._heads[self.rank][_LEFT] = 1
        for segment in self._kept:
            segment.close()
        self._kept.clear()
        self.pool.close()
        self.look = None
        with self._one_polls:
            for fd in self._pidfds:
                self._deaths.unregister(fd)
                os.close(fd)
            self._pidfds = {}

    def _wait_long(
        self,
        incoming: int,
        epoch: int,
        first: int,
        stage: str,
        look: Callable[[str], None] | None = None,
    ) -> None:
        def step() -> int:
            nonlocal first
            first = self._kernels.await_signals(incoming, self.size, epoch, first, 20)
            if first < self.size and look is not None:
                look(stage)
            return self.size - first

        self.wait_until(step, lambda: (first,), stage)

    def _lost(self, rank: int, stage: str) -> PeerError:
        """A peer's memory is gone between its telling us of it and our asking: it has died, or has
        closed its Buffer, most likely because another rank died. Else there was none.
        """
        # Who dies loses its files a moment before it is seen to be dead.
        dead = self.dead_ranks(wait_ms=1000)
        if dead:
            return self.blame(Stopped(PeerDied, dead), stage)
        self.raise_told(stage)
        if rank in self._have_left():
            return self.blame(Stopped(PeerLeft, self._names([rank])), stage)
        return self.stray(rank, stage)

    def stray(self, rank: int, stage: str) -> PeerError:
        """A peer's words would become an address outside its memory."""
        (them,) = self._names([rank])
        what = f"{stage}: rank {them} wrote what no rank writes, on rank {self._me}"
        return PeerError(what, ranks=(them,), stage=stage)

    def blame(self, stopped: Stopped, stage: str) -> PeerError:
        """The error that names them; every rank of the team, and beyond, hears of it."""
        kind, ranks = stopped
        who = name_ranks(ranks)
        what = {
            PeerDied: f"{who} died",
            PeerLeft: f"{who} closed {'its' if len(ranks) == 1 else 'their'} Buffer",
            PeerTimeout: f"{self._timeout:g} s passed; no word from {who}",
        }[kind]
        error = kind(f"{stage}: {what}, on rank {self._me}", ranks=ranks, stage=stage)
        self._communicator.leave_word(error)
        return error

    def dead_ranks(self, wait_ms: int = 0) -> tuple[int, ...]:
        return self._names(self._dead(wait_ms))

    def _dead(self, wait_ms: int = 0) -> list[int]:
        with self._one_polls:
            return sorted(self._pidfds[fd] for fd, _ in self._deaths.poll(wait_ms))

    def _names(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """What ranks of the team are called in the whole group."""
        return tuple(self._members[rank] for rank in ranks)

    def _beats(self) -> int:
        return sum([int(head[_BEAT]) for head in self._heads])

    def gone(self) -> set[int]:
        """The ranks of the team that have left it, or died."""
        return self._have_left().union(self._dead())

    def _have_left(self) -> set[int]:
        """The ranks that have closed their Buffer."""
        return {rank for rank, head in enumerate(self._heads) if head[_LEFT] and rank != self.rank}

    def raise_told(self, stage: str) -> None:
        """If a rank of the team has told of a failure, or this one has, on another thread."""
        for rank, head in enumerate(self._heads):
            told = int(head[_FAILURE])
            if told:
                kind, culprit = _FAILURES[told % 4 % 3], told // 4 - 1
                text = words_to_text(self._texts[rank])
                error = kind(
                    f"{stage}: rank {self._members[rank]} has given up ({text}), "
                    f"on rank {self._me}",
                    ranks=(culprit,),
                    stage=stage,
                )
                if rank != self.rank:
                    self._communicator.leave_word(error)  # so that no other node blames this rank
                raise error

    def _say_dropped(self, segment: Segment) -> None:
        """Peers find out when they next use memory of this rank."""
        head = self._heads[self.rank]
        self._drops[self.rank][int(head[_DROPS]) % _DROPPED] = segment.identity
        head[_DROPS] += 1

    def _unmap_dropped(self, rank: int) -> None:
        """Let go of segments that a peer has given back. Whoever still uses one holds its array."""
        seen, drops = self._forgotten[rank], int(self._heads[rank][_DROPS])
        if drops - seen > _DROPPED:
            self._attached[rank].clear()
        for number in range(max(seen, drops - _DROPPED), drops):
            self._attached[rank].pop(int(self._drops[rank][number % _DROPPED]), None)
        self._forgotten[rank] = drops

    def _attach_controls(self, told: Sequence[Sequence[int]]) -> str | None:
        """Map all ranks' control segments. Returns what went wrong, if anything did."""
        self._controls: list[np.ndarray] = []
        for rank, (fd, _, identity) in enumerate(told):
            try:
                control = attach(self._pids[rank], fd, self.control_bytes, identity)
            except (OSError, SharedMemoryError) as error:
                them = self._members[rank]
                return f"rank {self._me} cannot attach the memory of rank {them}: {error}"
            self._controls.append(control)
        begin, middle = self._said_at(), self._said_at() + 8 * TEXT_WORDS
        self._heads = [control[:LINE].view(np.int64) for control in self._controls]
        self._texts = [control[begin:middle].view(np.int64) for control in self._controls]
        self._drops = [
            control[middle : middle + 8 * _DROPPED].view(np.int64) for control in self._controls
        ]
        return None

    def _watch(self) -> str | None:
        """Be told of the death of any rank. Returns what went wrong, if anything did."""
        try:
            for rank, pid in enumerate(self._pids):
                fd = os.pidfd_open(pid)
                self._pidfds[fd] = rank
                self._deaths.register(fd, select.POLLIN)
        except OSError as error:
            return f"rank {self._me} cannot watch the other ranks: {error}"
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

    def _said_at(self) -> int:
        """Where this rank says why it has given up, and, after that, what it has dropped."""
        return self._signal_bytes() + 2 * self.size * self._box * 8

    def _control_bytes(self) -> int:
        exact = self._said_at() + 8 * (TEXT_WORDS + _DROPPED)
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
