"""R virtual ranks as threads of one process: the same engine with no process, port or GPU.

Choose it for tests, and to see what a routing costs: it counts the bytes on every link. Counts that
do not match, which make a real engine hang or crash, fail an assertion here. It names the rank that
did not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from operator import le
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Exchange, Move
from tokenyard.comm.one_at_a_time import Baton, Gate
from tokenyard.errors import (
    BufferInUse,
    PeerDied,
    PeerError,
    PeerLeft,
    PeerTimeout,
    name_ranks,
)
from tokenyard.runtime.busy import is_busy


class _Post(NamedTuple):
    rows_NB: np.ndarray  # by the rank that they go to
    ends: list[int]  # where the rows for each rank begin, and where the last end


class _Messages(NamedTuple):
    round: int
    width: int  # of a message
    words_RRW: np.ndarray  # from rank i to rank j, without words that are 0 in all of them


class Seat(NamedTuple):
    """Which virtual rank a Buffer, or a thread, belongs to."""

    run: object  # that all ranks of a run have in common
    rank: int
    size: int

    def check_thread(self) -> None:
        """Raise in the thread of another virtual rank. A rank may start threads of its own."""
        other = this_thread.seat
        if other is not None and other != self:
            of = f"{self.size}" if other.run is self.run else "another run"
            raise BufferInUse(
                f"the Buffer is that of virtual rank {self.rank} of {of}, and virtual rank "
                f"{other.rank}'s thread uses it: virtual ranks are threads, which share a module's "
                "globals; want each rank to keep its Buffer in a threading.local, or run_processes"
            )


class _Thread(threading.local):
    seat: Seat | None = None


this_thread = _Thread()  # its seat, if it is a virtual rank's main thread


class LoopbackWorld:
    """What all virtual ranks of one run share; or what some of them share, as a part."""

    def __init__(
        self, size: int, members: Sequence[int] | None = None, whole: LoopbackWorld | None = None
    ) -> None:
        """A world of all ranks, or of these `members` of a `whole`."""
        self.size = size
        self.run = object()
        self.members = range(size) if members is None else members
        self._whole = self if whole is None else whole
        self._parts: dict[str, LoopbackWorld] = {}
        self._closed: set[int] = set()
        self._bytes: dict[str, np.ndarray] = {}  # by stage: [R, R], from rank i to rank j
        # For two rounds, since a rank may be a round ahead of those that still read.
        self._posts: list[list[_Post | None]] = [[None] * size for _ in range(2)]
        self._messages: list[_Messages | None] = [None, None]
        self.baton: Baton = Baton(size) if whole is None else whole.baton
        self._lock = threading.Lock()
        self._waiting: list[Gate] = []  # of ranks that have arrived
        self._arrived: set[int] = set()
        self._round = 0
        self._dead: set[int] = set()
        self._is_over = False
        # Why a part can no longer be used: all its ranks raise the same error.
        self._verdict: tuple[type[PeerError], tuple[int, ...], str] | None = None

    def end(self) -> None:
        """The run is over: ranks that wait, or come later, raise."""
        with self._lock:
            self._is_over = True
            self._alarm()
            parts = list(self._parts.values())
        for part in parts:
            part.end()

    def group(self, rank: int) -> LoopbackGroup:
        return LoopbackGroup(self, rank)

    def leave(self, rank: int) -> None:
        """The rank's thread has ended: ranks that wait for it raise."""
        with self._lock:
            self._dead.add(rank)
            self._alarm()
            parts = list(self._parts.values())
        if not self.is_part:
            self.baton.hand_on()
        for part in parts:
            if self.members[rank] in part.members:
                part.leave(part.members.index(self.members[rank]))

    def part(self, members: Sequence[int], name: str) -> LoopbackWorld:
        """All ranks that ask under one name get the same part."""
        with self._lock:
            if name not in self._parts:
                self._parts[name] = LoopbackWorld(len(members), tuple(members), self)
                self._parts[name]._is_over = self._is_over
            return self._parts[name]

    def close(self, rank: int) -> None:
        """The rank does not come any more. Once no rank does, a part is forgotten."""
        with self._lock:
            self._closed.add(rank)
            self._alarm()
            is_last = len(self._closed) == self.size
        if is_last and self.is_part:
            self._whole.forget(self)

    @property
    def is_part(self) -> bool:
        return self._whole is not self

    def forget(self, part: LoopbackWorld) -> None:
        with self._lock:
            self._parts = {name: one for name, one in self._parts.items() if one is not part}

    def meet(self, rank: int, stage: str, timeout: float) -> None:
        """Wait until all ranks are here."""
        deadline = time.monotonic() + timeout
        with self._lock:
            this_round = self._round
            self._arrived.add(rank)
            if len(self._arrived) == self.size and not self._closed and not self._is_over:
                self._arrived.clear()
                self._round += 1
                waiting, self._waiting = self._waiting, []
                self.baton.call(waiting)
                return
            self._look(rank, stage, timeout, deadline)
            gate = self._wait_here()
        self.baton.hand_on()
        left, is_over = timeout, False
        while not is_over:
            is_open = gate.wait(min(left, self.baton.patience))
            with self._lock:
                if self._round != this_round:
                    left, is_over = timeout, is_open or self.baton.waits_in_vain(gate)
                    continue
                if is_busy():  # with kernels, which all ranks need
                    deadline = time.monotonic() + timeout
                self._look(rank, stage, timeout, deadline)
                left = max(0.0, deadline - time.monotonic())
                if is_open:  # by an alarm that does not concern this rank
                    gate = self._wait_here()

    def _look(self, rank: int, stage: str, timeout: float, deadline: float) -> None:
        """Raise if this round cannot end."""
        self._verdict = self._verdict or self._find(time.monotonic() > deadline, timeout)
        if self._verdict is not None:
            kind, culprits, what = self._verdict
            if not self.is_part:  # the user's group, which other Buffers need
                self._verdict = None
            self._alarm()
            text = f"{stage}: {what}, on rank {self.members[rank]}"
            raise kind(text, ranks=culprits, stage=stage)

    def _wait_here(self) -> Gate:
        gate = Gate()
        self._waiting.append(gate)
        return gate

    def _alarm(self) -> None:
        """Wake all that wait here, so that they look whether this round can still end."""
        waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.open()

    def _find(
        self, is_late: bool, timeout: float
    ) -> tuple[type[PeerError], tuple[int, ...], str] | None:
        """Why this round cannot end, and who is to blame."""
        if self._is_over:
            return PeerDied, (), "the run is over"
        gone = self._names(self._dead - self._closed - self._arrived)
        if gone:
            return PeerDied, gone, f"{name_ranks(gone)} ended"
        left = self._names(self._closed)  # a rank may have arrived, and have given up since
        if left:
            return PeerLeft, left, f"{name_ranks(left)} closed the Buffer, or gave up"
        if is_late:
            late = self._names(set(range(self.size)) - self._arrived)
            return PeerTimeout, late, f"{timeout:g} s passed; no word from {name_ranks(late)}"
        return None

    def post(self, rank: int, exchange: Exchange) -> int:
        """Lay out what goes to each rank in this round, before `meet`. Returns the round.

        Rows that travel with a message are counted as those of its call, not as the message.
        """
        with self._lock:
            this_round = self._round
        counts, stage = list(exchange.counts), exchange.stage
        ends = list(accumulate(counts, initial=0))
        # A copy, so that the sender may change its rows while others still read.
        rows_NB = exchange.rows_NB.numpy().copy()
        self._posts[this_round % 2][rank] = _Post(rows_NB, ends)
        weights = np.array(counts, np.int64) * rows_NB.shape[1]
        if exchange.enclosed:
            enclosed = np.array(exchange.enclosed, np.int64) * rows_NB.shape[1]
            call = stage.removesuffix(" (notify)")
            self._whole._count(call, self.members[rank], self.members, enclosed)
            weights -= enclosed
        self._whole._count(stage, self.members[rank], self.members, weights)
        return this_round

    def _count(self, stage: str, rank: int, to: Sequence[int], weights: np.ndarray) -> None:
        with self._lock:
            if stage not in self._bytes:
                self._bytes[stage] = np.zeros((self.size, self.size), np.int64)
            sent = self._bytes[stage][rank]
        if len(to) == self.size:
            sent += weights
        else:
            sent[list(to)] += weights

    @property
    def bytes_sent(self) -> dict[str, Tensor]:
        """The bytes that ranks sent, by stage: [R, R] int64, from rank i to rank j."""
        return {stage: torch.from_numpy(sent) for stage, sent in self._bytes.items()}

    def lay_out(self, rank: int, message_RM: np.ndarray, stage: str) -> int:
        """Give row r to each rank r in this round, before `meet`. Returns the round."""
        num_bytes = np.full(self.size, message_RM[0].nbytes)
        self._whole._count(stage, self.members[rank], self.members, num_bytes)
        # Most messages end in zeros, which are left out: there is a message for every two ranks.
        used = np.flatnonzero(message_RM.any(0))
        width = int(used[-1]) + 1 if len(used) else 0
        with self._lock:
            this_round = self._round
            laid, shape = self._messages[this_round % 2], (self.size, self.size, width)
            if laid is None or laid.round != this_round:
                words = None if laid is None else laid.words_RRW  # which all ranks have read
                if words is None or words.shape != shape:
                    words = np.empty(shape, np.int64)
                laid = _Messages(this_round, message_RM.shape[1], words)
            elif laid.words_RRW.shape[2] < width:
                wider = np.zeros(shape, np.int64)
                wider[:, :, : laid.words_RRW.shape[2]] = laid.words_RRW
                laid = laid._replace(words_RRW=wider)
            self._messages[this_round % 2] = laid
            assert laid.width == message_RM.shape[1], "messages of all ranks are as long"
            laid.words_RRW[rank, :, :width] = message_RM[:, :width]
            laid.words_RRW[rank, :, width:] = 0
        return this_round

    def take(self, rank: int, this_round: int) -> np.ndarray:
        """[R, M]: the messages for this rank, once all have met."""
        laid = self._messages[this_round % 2]
        assert laid is not None, "all have met"
        words_RRW = laid.words_RRW
        answer_RM = np.zeros((self.size, laid.width), np.int64)
        answer_RM[:, : words_RRW.shape[2]] = words_RRW[:, rank]
        return answer_RM

    def mail(self, rank: int, this_round: int) -> list[np.ndarray]:
        """What every rank has laid out for this one."""
        posts = [post for post in self._posts[this_round % 2] if post is not None]
        assert len(posts) == self.size, "all have met"
        return [post.rows_NB[post.ends[rank] : post.ends[rank + 1]] for post in posts]

    def _names(self, ranks: set[int]) -> tuple[int, ...]:
        return tuple(sorted(self.members[rank] for rank in ranks))


class LoopbackGroup:
    """Stands where a torch.distributed group would: `Buffer(group)`."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world = world
        self._rank = rank
        self.seat = Seat(world.run, rank, world.size)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.world.size

    def communicator(self, timeout: float) -> LoopbackCommunicator:
        return LoopbackCommunicator(self.world, self._rank, timeout)


class LoopbackCommunicator(Communicator):
    name = "loopback"

    def __init__(self, world: LoopbackWorld, rank: int, timeout: float) -> None:
        self._world = world
        self._timeout = timeout
        self.rank, self.size = rank, world.size
        self.members = world.members
        self._parts: list[LoopbackCommunicator] = []

    def all_to_all(self, exchange: Exchange) -> None:
        world, stage = self._world, exchange.stage
        this_round = world.post(self.rank, exchange)
        world.meet(self.rank, stage, self._timeout)
        parcels = world.mail(self.rank, this_round)
        sent, expected = [len(parcel) for parcel in parcels], list(exchange.out_counts)
        fits = all(map(le, sent, expected)) if exchange.at_most else sent == expected
        assert fits, f"rank {self.rank} expects {expected} rows, gets {sent}"
        out_NB = exchange.out_NB.numpy()
        if sent == expected:
            np.concatenate(parcels, out=out_NB)
            return
        for begin, parcel in zip(accumulate(expected, initial=0), parcels):
            out_NB[begin : begin + len(parcel)] = parcel

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        this_round = self._world.lay_out(self.rank, message_RM, stage)
        self._world.meet(self.rank, stage, self._timeout)
        return self._world.take(self.rank, this_round)

    def start(self, exchange: Exchange) -> Move:
        return lambda: self.all_to_all(exchange)

    def part(self, members: Sequence[int], name: str) -> LoopbackCommunicator:
        world = self._world.part(members, name)
        part = LoopbackCommunicator(world, list(members).index(self.rank), self._timeout)
        self._parts.append(part)
        return part

    def waits_elsewhere(self) -> None:
        self._world.baton.retire()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return PeerDied(f"{stage}: {error}, on rank {self.rank}", ranks=(), stage=stage)

    def report(self, error: PeerError | None = None) -> None:
        """A rank that waits sees which threads have ended, but not that this rank has left."""
        if isinstance(error, PeerLeft):
            for part in self._parts:
                part._world.close(part.rank)

    def close(self) -> None:
        for part in self._parts:
            part.close()
        self._parts.clear()
        if self._world.is_part:  # the whole is the user's, and stays
            self._world.close(self.rank)
