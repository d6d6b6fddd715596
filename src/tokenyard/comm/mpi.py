"""Communicators over MPI (mpi4py), without torch.distributed.

Rows travel by Isend and Irecv, so a rank that waits knows whose rows are missing, and a part is a
list of members with a tag of its own: nothing collective makes one. Nobody waits inside MPI, where
it would spin: `MpiWork.wait` looks, gives its core away, and looks again.

All Buffers over one communicator of the user share one duplicate of it, `_Joined`, since MPI
libraries have few of them to give. Notes about failures are messages on it, too.
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
from tokenyard.comm.watched import Watched, Whole, Work
from tokenyard.errors import BufferClosed
from tokenyard.runtime.threads import has_core_each

_NOTES = 0  # the tag of notes
_TAGS = 64  # of each Buffer: one for each of its parts that two ranks share
_PIECE = 1 << 30  # bytes of a message: the counts of MPI 3 are ints
_MANY = 64 << 10  # bytes; fewer are in the network's hands at once
_ONE_THREAD = (
    "MPI was initialised for one thread, want MPI_THREAD_SERIALIZED or more: import mpi4py before "
    "what initialises MPI, or set mpi4py.rc.thread_level"
)

_joined = MPI.Comm.Create_keyval()  # under which a communicator keeps its `_Joined`
_joining = threading.Lock()
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

    def rank(self) -> int:
        return self.comm.Get_rank()

    def size(self) -> int:
        return self.comm.Get_size()

    def communicator(self, timeout: float) -> MpiCommunicator:
        return MpiCommunicator(self, timeout)


class _Joined:
    """What the Buffers over one communicator share: its duplicate, and the notes of all ranks."""

    def __init__(self, duplicate: MPI.Intracomm, lock: Any) -> None:
        duplicate.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm, self.lock = duplicate, lock
        self.notes = _Notes(duplicate, lock)
        self.num_openings = 0


def _join(user: MPI.Intracomm, timeout: float) -> _Joined:
    """What Buffers over this communicator share: made by the first. Raises RuntimeError if other
    ranks do not come.
    """
    with _joining:
        found = user.Get_attr(_joined)
        if found is not None:
            return found
        is_serial = MPI.Query_thread() == MPI.THREAD_SERIALIZED
        lock: Any = threading.Lock() if is_serial else nullcontext()
        duplicate, request = user.Idup()
        MpiWork(lock, [request], [], None).wait(timedelta(seconds=timeout))
        made = _Joined(duplicate, lock)
        user.Set_attr(_joined, made)
        return made


class _Notes:
    """Notes that each rank sends to all others: a store, for FailureBoard."""

    def __init__(self, comm: MPI.Intracomm, lock: Any) -> None:
        self._comm, self._lock, self._one_at_a_time = comm, lock, threading.Lock()
        self._known: dict[str, bytes] = {}
        self._sent: list[MPI.Request] = []  # which MPI has not yet taken

    def set(self, key: str, value: str, /) -> None:
        text = np.frombuffer(f"{key}\0{value}".encode(), np.uint8)
        with self._one_at_a_time:
            self._known[key] = value.encode()
            self._sent = [one for one in self._sent if not self._try(one.Test)]
            me = self._comm.Get_rank()
            for peer in range(self._comm.Get_size()):
                if peer != me:
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
            return bool(self._try(lambda: self._comm.Ack_failed(self._comm.Get_size())))
        key, _, value = text.tobytes().decode().partition("\0")
        self._known[key] = value.encode()
        return True

    def _try(self, ask: Any) -> Any:
        """What MPI answers; None if it cannot, or if a rank that this is about has died."""
        with suppress(MPI.Exception, NotImplementedError), self._lock:
            return ask()

    def dead_ranks(self) -> tuple[int, ...]:
        """The ranks that MPI itself knows to be dead, as it does with fault tolerance (ULFM)."""
        gone = self._try(self._comm.Get_failed)
        if gone is None or not gone.Get_size():
            return ()
        own = self._comm.Get_group()
        return tuple(MPI.Group.Translate_ranks(gone, range(gone.Get_size()), own))


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
        told = () if joined is None else joined.notes.dead_ranks()
        return tuple(sorted({*super().dead_ranks(), *told}))

    def close(self) -> None:
        self._give_up()


class MpiCommunicator(_OverMpi, Whole):
    """All ranks of the user's communicator, on the duplicate that its Buffers share."""

    def __init__(self, group: MpiGroup, timeout: float) -> None:
        self._group = group  # a Buffer refers to its group weakly
        user = group.comm
        self.joined: _Joined | None = None
        self.most_looks, self._open = 50, []
        rank = user.Get_rank()
        Whole.__init__(self, rank, user.Get_size(), timeout, FailureBoard(self._notes, rank))
        if self.size == 1:
            return
        try:
            self.joined = _join(user, timeout)
        except RuntimeError as error:
            raise self.explain("Buffer (connect)", error) from error
        self.joined.num_openings += 1
        opening = self.joined.num_openings
        self.board = FailureBoard(self._notes, self.rank, opening)
        most = user.Get_attr(MPI.TAG_UB) // _TAGS
        self._used = [1 + _TAGS * (opening % (most - 1))] * self.size  # the last tag, by rank
        self._tags = list(self._used)

    def _notes(self) -> _Notes:
        if self.joined is None:
            raise StoreLost("MPI has no duplicate of the communicator")
        return self.joined.notes

    def settle(self, label: str, processes: ProcessWatch) -> None:
        super().settle(label, processes)
        if has_core_each(len(processes.neighbours(self.rank))):
            self.most_looks = 2000

    def part(self, members: Sequence[int], name: str) -> MpiPart:
        """Two ranks make the parts that both are in, in one order: they agree on the tags."""
        for one in members:
            if self.size > 1:
                self._used[one] += 1
        tags = [self._used[one] for one in members] if self.size > 1 else [0]
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

    def own(self, name: str) -> MpiPart:
        return self


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
