"""Communicators over MPI (mpi4py), without torch.distributed.

Rows travel by Isend and Irecv, so a rank that waits knows whose rows are missing, and a part is a
list of members with a tag of its own: nothing collective makes one. Nobody waits inside MPI, where
it would spin: `MpiWork.wait` looks, gives its core away, and looks again.

All Buffers over one communicator of the user share one duplicate of it, `_Joined`, since MPI
libraries have few of them to give. Notes about failures are messages on it, too. A Buffer's tags
are never used again, since a message may still be on its way; the next duplicate has as many.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from tokenyard.comm.base import Exchange
from tokenyard.comm.failure_board import FailureBoard, StoreLost
from tokenyard.comm.process_table import ProcessWatch
from tokenyard.comm.watched import Openings, Watched, Whole, Work
from tokenyard.errors import BufferClosed
from tokenyard.runtime.threads import has_core_each

_NOTES = 0  # the tag of notes
_TAGS = 1024  # of each Buffer: one for each of its parts that two ranks share
_PIECE = 1 << 30  # bytes of a message: the counts of MPI 3 are ints
_MANY = 64 << 10  # bytes; fewer are in the network's hands at once
_ONE_THREAD = (
    "MPI was initialised for one thread, want MPI_THREAD_SERIALIZED or more: import mpi4py before "
    "what initialises MPI, or set mpi4py.rc.thread_level"
)

_joined = MPI.Comm.Create_keyval()  # under which a communicator keeps its `_Joined`
_joining, _one_at_a_time = threading.Lock(), threading.Lock()
_lingering: list[MpiWork] = []  # which nobody waits for, while MPI still knows their memory


class MpiGroup:
    """Stands where a torch.distributed group would: `Buffer(comm=...)` makes one."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Raises ValueError for a communicator on which no Buffer can be opened."""
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            kind = "COMM_NULL" if isinstance(comm, MPI.Comm) else type(comm).__name__
            raise ValueError(f"comm is {kind}, want an mpi4py communicator of this process's ranks")
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ValueError(_ONE_THREAD)
        self.comm = comm
        with _lock():
            self._rank, self._size = comm.Get_rank(), comm.Get_size()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def communicator(self, timeout: float) -> MpiCommunicator:
        return MpiCommunicator(self, timeout)


class _Joined:
    """What the Buffers over one communicator share: its duplicate, and the notes of all ranks."""

    comm: MPI.Intracomm
    notes: _Notes | None = None  # once all ranks have come to the first opening

    def __init__(self, user: MPI.Intracomm) -> None:
        self.lock, self.openings = _lock(), Openings()
        self.most = user.Get_attr(MPI.TAG_UB) // _TAGS  # openings

    def come(self, user: MPI.Intracomm) -> MpiWork:
        """All ranks come to the next opening: to the first by making the duplicate."""
        with self.lock:
            if self.notes is None:
                self.comm, request = user.Idup()
            else:
                request = self.comm.Ibarrier()
        return MpiWork(self.lock, [request], [], None)

    def have_come(self) -> int:
        """The first tag of the Buffer that is opened."""
        if self.notes is None:
            with self.lock:
                self.comm.Set_errhandler(MPI.ERRORS_RETURN)
                self.notes = _Notes(self.comm, self.lock)
        return 1 + _TAGS * (self.openings.number - 1)


def _lock() -> Any:
    """Held in each call into MPI, none of which waits, where it wants one thread at a time."""
    return _one_at_a_time if MPI.Query_thread() == MPI.THREAD_SERIALIZED else nullcontext()


def _join(user: MPI.Intracomm) -> _Joined:
    """What the next Buffer over this communicator shares with others."""
    with _joining, _lock():
        found: _Joined | None = user.Get_attr(_joined)
        if found is None or found.openings.number == found.most:
            found = _Joined(user)
            user.Set_attr(_joined, found)
        return found


class _Notes:
    """Notes that each rank sends to all others: a store, for FailureBoard."""

    def __init__(self, comm: MPI.Intracomm, lock: Any) -> None:
        self._comm, self._lock, self._one_at_a_time = comm, lock, threading.Lock()
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._known: dict[str, bytes] = {}
        self._sent: list[MPI.Request] = []  # which MPI has not yet taken

    def set(self, key: str, value: str, /) -> None:
        text = np.frombuffer(f"{key}\0{value}".encode(), np.uint8)
        with self._one_at_a_time:
            self._known[key] = value.encode()
            self._sent = [one for one in self._sent if not self._try(one.Test)]
            for peer in range(self._size):
                if peer != self._rank:
                    with suppress(MPI.Exception), self._lock:  # the dead need no note
                        self._sent.append(self._comm.Isend([text, MPI.BYTE], peer, _NOTES))

    def check(self, keys: list[str], /) -> bool:
        with self._one_at_a_time:
            while self._take():
                pass
            return all(key in self._known for key in keys)

    def get(self, key: str, /) -> bytes:
        return self._known[key]

    def _take(self) -> bool:
        """Take one note of another rank, if there is one."""
        status = MPI.Status()
        try:
            with self._lock:
                message = self._comm.Improbe(MPI.ANY_SOURCE, _NOTES, status)
                if message is None:
                    return False
                text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv([text, MPI.BYTE])
        except MPI.Exception:  # a rank has died: take the notes of the living
            return bool(self._try(lambda: self._comm.Ack_failed(self._size)))
        key, _, value = text.tobytes().decode().partition("\0")
        self._known[key] = value.encode()
        return True

    def _try(self, ask: Any) -> Any:
        """What MPI answers; None if it cannot, or if a rank that this is about has died."""
        with suppress(MPI.Exception, NotImplementedError), self._lock:
            return ask()

    def dead_ranks(self) -> tuple[int, ...]:
        """The ranks that MPI itself knows to be dead, as it does with fault tolerance (ULFM)."""

        def translate() -> Sequence[int]:
            gone, own = self._comm.Get_failed(), self._comm.Get_group()
            return gone.Translate_ranks(range(gone.Get_size()), own)

        return tuple(self._try(translate) or ())


class MpiWork:
    """Messages that are on their way, and whom they go to or come from."""

    def __init__(self, lock: Any, requests: list[Any], peers: list[int], memory: Any) -> None:
        self._lock, self._requests, self._peers, self._memory = lock, requests, peers, memory
        self._looks = 0  # without a pause, so far
        self.most_looks = 50
        self.longest_pause = 1e-3  # seconds

    def wait(self, limit: timedelta, /) -> None:
        began = time.monotonic()
        deadline = began + limit.total_seconds()
        while True:
            with self._lock:
                if MPI.Request.Testall(self._requests):
                    self._requests, self._memory = [], None
                    return
            now = time.monotonic()
            if now > deadline:
                raise RuntimeError("timed out")
            self._looks += 1
            if self._looks < self.most_looks:
                os.sched_yield()
            else:
                time.sleep(min(self.longest_pause, max(2e-5, (now - began) / 16)))

    def missing(self) -> set[int]:
        """The peers whose messages have not come, or were not taken."""
        left = set()
        for request, peer in zip(self._requests, self._peers):
            with suppress(MPI.Exception), self._lock:
                if request != MPI.REQUEST_NULL and not request.Get_status():
                    left.add(peer)
        return left

    def give_up(self) -> None:
        """Take no more rows. Memory that MPI may still write or read is kept."""
        for request in self._requests:
            with suppress(MPI.Exception), self._lock:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
        if self._requests:
            _lingering.append(self)


class _OverMpi(Watched):
    name = "mpi"
    _whole: MpiCommunicator
    _tags: Sequence[int]  # by member: of the messages between it and this rank
    _open: list[MpiWork]  # works that began and have not ended

    def _begin(self, exchange: Exchange) -> MpiWork:
        out, rows, out_counts, counts, _, at_most, *_ = exchange
        joined = self._whole.joined
        if joined is None:
            raise BufferClosed(f"the Buffer is closed, on rank {self._whole.rank}")
        come, go = out.numpy().reshape(-1), rows.numpy().reshape(-1)
        sent, got = _spans(counts, rows.shape[1]), _spans(out_counts, out.shape[1])
        if exchange.to_all:
            sent *= self.size
        me, size, comm = self.rank, self.size, joined.comm
        requests: list[Any] = []
        peers: list[int] = []
        work = MpiWork(joined.lock, requests, peers, (come, go))
        work.most_looks = self._whole.most_looks
        if len(come) + len(go) > _MANY:
            work.longest_pause = 1e-4  # an MPI may send a piece of a message for each look
        self._open.append(work)
        ways = (comm.Irecv, come, got, -1), (comm.Isend, go, sent, 1)
        with joined.lock:
            for post, memory, spans, way in ways:
                for step in range(1, size):
                    peer = (me + way * step) % size
                    to, tag = self.members[peer], self._tags[peer]
                    for first, last in _pieces(*spans[peer], at_most):
                        requests.append(post([memory[first:last], MPI.BYTE], to, tag))
                        peers.append(to)
        (first, last), to = sent[me], got[me][0]
        come[to : to + last - first] = go[first:last]
        return work

    def _wait(self, work: Work, stage: str, number: int) -> None:
        super()._wait(work, stage, number)
        self._open.remove(work)  # type: ignore[arg-type]

    def _give_up(self) -> None:
        for work in self._open:
            work.give_up()
        self._open.clear()

    def _missing(self) -> Collection[int]:
        return self._open[0].missing() if self._open else self.members

    def dead_ranks(self) -> tuple[int, ...]:
        joined = self._whole.joined
        told = () if joined is None or joined.notes is None else joined.notes.dead_ranks()
        return tuple(sorted({*super().dead_ranks(), *told}))

    def close(self) -> None:
        self._give_up()


class MpiCommunicator(_OverMpi, Whole):
    """All ranks of the user's communicator, on the duplicate that its Buffers share."""

    def __init__(self, group: MpiGroup, timeout: float) -> None:
        self._group = group  # a Buffer refers to its group weakly
        self.joined: _Joined | None = None
        self.most_looks, self._open = 50, []
        rank = group.rank()
        Whole.__init__(self, rank, group.size(), timeout, FailureBoard(self._notes, rank))
        self._used = [0] * self.size  # the last tag, by rank
        if self.size > 1:
            self.joined = joined = _join(group.comm)
            with joined.openings.lock:
                self.meet(joined.openings, lambda: joined.come(group.comm))
                self._used = [joined.have_come()] * self.size
            self.board = FailureBoard(self._notes, rank, self.board.opening)
        self._tags = list(self._used)
        self._most = self._used[0] + _TAGS  # where those of the next Buffer begin

    def _notes(self) -> _Notes:
        if self.joined is None or self.joined.notes is None:
            raise StoreLost("MPI has no duplicate of the communicator")
        return self.joined.notes

    def settle(self, label: str, processes: ProcessWatch) -> None:
        super().settle(label, processes)
        if has_core_each(len(processes.neighbours(self.rank))):
            self.most_looks = 2000

    def part(self, members: Sequence[int], name: str) -> MpiPart:
        """Two ranks make the parts that both are in, in one order: they agree on the tags."""
        for one in members:
            if one != self.rank:
                self._used[one] += 1
                if self._used[one] == self._most:
                    who = f"ranks {self.rank} and {one}"
                    raise ValueError(f"{who} share {_TAGS} parts of a group, want smaller nodes")
        tags = [self._used[one] for one in members]
        made = MpiPart(self, members, tags, name)
        self._parts.append(made)
        return made

    def close(self) -> None:
        """The duplicate stays: to free one is collective, and other ranks may be dead."""
        super().close()
        self._give_up()
        self.joined = None


class MpiPart(_OverMpi):
    """Some ranks, whose messages have tags of their own."""

    def __init__(
        self, whole: MpiCommunicator, members: Sequence[int], tags: Sequence[int], name: str
    ) -> None:
        self._whole, self._timeout, self.label = whole, whole._timeout, name
        self.members, self._tags, self._open = tuple(members), tags, []
        self.rank, self.size = self.members.index(whole.rank), len(members)


def _spans(counts: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Where the rows of each rank begin and end."""
    return list(pairwise(accumulate((count * width for count in counts), initial=0)))


def _pieces(begin: int, end: int, at_most: bool) -> Sequence[tuple[int, int]]:
    """The messages of some bytes. With `at_most`, where a peer cannot tell how many come, always
    one.
    """
    if at_most or 0 < end - begin <= _PIECE:
        return ((begin, end),)
    return [(at, min(at + _PIECE, end)) for at in range(begin, end, _PIECE)]
