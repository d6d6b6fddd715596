"""Communicators over torch.distributed: the user's process group, and parts of it over gloo.

Choose the group itself for what all ranks do on the user's thread; a part has connections of its
own, which another thread may use. NCCL groups move CUDA tensors and have no parts. When an exchange
fails, this module finds out who is to blame: from the notes of other ranks (`failure_board`), from
the machine's process table, and from who stays silent.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tokenyard.comm.base import Communicator, Exchange, Move
from tokenyard.comm.failure_board import KINDS, FailureBoard, FailureNote, StoreLost
from tokenyard.comm.process_table import ProcessWatch
from tokenyard.errors import BufferClosed, PeerDied, PeerError, PeerLeft, PeerTimeout, name_ranks
from tokenyard.runtime import busy, limits

_LOOK = 0.1  # seconds between two looks at the failure board
_LET_GO = 0.1  # seconds to close connections that nobody uses
_AT_END = 2.0  # seconds that the end of the process waits for that
_GRACE = 0.5  # seconds in which the other ranks may post that they live, after an exchange failed
_FILES = 12  # that gloo opens besides connections
_BUSY = 5.0  # seconds before the time limit from which on a rank asks whether others are busy
_LONGEST = 120.0  # seconds that a rank may need to compile what a call needs
_BEFORE = 1.0  # a note may have been seen this many seconds before the exchange that it concerns

_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that close connections
_openings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _Noticed(RuntimeError):
    """Another rank has posted a note about a failure."""


class _TorchExchange(Communicator):
    """What the group's communicator and those of its parts have in common."""

    label: str  # of its connections, among those of the Buffer
    _timeout: float
    _whole: TorchCommunicator
    _look: Callable[[str], None] | None = None
    _begun = 0  # exchanges so far
    done = 0  # how many of them have ended; they end in the order in which they began

    def _begin(self, exchange: Exchange) -> dist.Work:
        raise NotImplementedError

    def start(self, exchange: Exchange) -> Move:
        if self.size == 1:
            exchange.out_NB.copy_(exchange.rows_NB)
            return lambda: None
        self._begun += 1
        number, stage = self._begun, exchange.stage
        try:
            work = self._begin(exchange)
        except RuntimeError as error:
            raise self._explain(stage, error, number) from error

        def finish() -> None:
            try:
                self._wait(work, stage, number)
            except PeerError:
                raise
            except RuntimeError as error:
                raise self._explain(stage, error, number) from error
            self.done = number
            with suppress(StoreLost):
                self._whole.board.withdraw()

        return finish

    def report(self, error: PeerError | None = None) -> None:
        kind = next((one for one in KINDS if isinstance(error, one)), PeerDied)
        with suppress(StoreLost):
            self._whole.post(kind, error.ranks if error is not None else ())

    def watch(self, look: Callable[[str], None]) -> None:
        self._look = look

    def settle(self, label: str, processes: ProcessWatch) -> None:
        self._whole.board.label, self._whole.processes = label, processes

    def dead_ranks(self) -> tuple[int, ...]:
        return self._whole.processes.dead_ranks()

    def _wait(self, work: dist.Work, stage: str, number: int) -> None:
        """A rank that has noticed a failure elsewhere lives and does not come here. So a rank that
        waits reads the failure board now and then.
        """
        if self.device.type == "cuda":
            # The stream waits, not the host; NCCL's own watchdog sees to peers.
            work.wait()  # no GPU has run this
            return  # no GPU has run this
        board, begin = self._whole.board, time.monotonic()
        deadline = begin + self._timeout
        board.forget_busy()
        while True:
            try:
                work.wait(timedelta(seconds=min(_LOOK, self._timeout)))
                return
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                # Whether a rank compiles: one that does not come may in turn wait for that one.
                is_busy = False
                if time.monotonic() >= deadline - _BUSY:
                    with suppress(StoreLost):
                        is_busy = board.is_busy()
                if time.monotonic() >= deadline:
                    if not is_busy:
                        raise
                    deadline = time.monotonic() + self._timeout
            if self._look is not None:
                self._look(stage)
            with suppress(StoreLost):  # the exchange will fail by itself
                notes = self._concern(board.read(self._all_ranks()), number)
                for note in notes.values():
                    if note.seen > begin - _BEFORE or note.is_final:
                        raise _Noticed("timeout" if note.kind is PeerTimeout else "death")

    def _concern(
        self, notes: Mapping[int, FailureNote], number: int | None
    ) -> dict[int, FailureNote]:
        """The notes that concern an exchange here. A rank that left after it had ended this
        exchange is not missed here; ranks that do miss it post notes of their own.
        """

        def is_missed(rank: int, note: FailureNote) -> bool:
            if number is None or rank not in self.members:
                return False
            return note.done.get(self.label, 0) < number

        return {
            rank: note
            for rank, note in notes.items()
            if note.kind is not PeerLeft or is_missed(rank, note)
        }

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._explain(stage, error, None)

    def _explain(self, stage: str, error: RuntimeError, number: int | None) -> PeerError:
        """Who did not come to an exchange: to number `number` here, or to one that is not ours.

        Gloo says only that something failed. So every rank that notices posts a note, and all raise
        the same. They name the ranks that a note blames, else those that are seen to be dead, else
        the one that posted no note. Ranks that compute post theirs when they come, so as long as
        several have posted none, nobody is named before the time limit.
        """
        if isinstance(error, BufferClosed):
            raise error
        text = str(error).lower()
        late = "timed out" in text or "timeout" in text
        what = "a connection broke"
        if isinstance(error, _Noticed):
            what = "another rank has noticed a failure"
        elif late:
            what = f"{self._timeout:g} s passed"
        kind, culprits, who = self._find(stage, PeerTimeout if late else PeerDied, number)
        where = f"on rank {self.members[self.rank]}"
        found = kind(f"{stage}: {what}; {who}, {where}", ranks=culprits, stage=stage)
        self.report(found)
        return found

    def _find(
        self, stage: str, kind: type[PeerError], number: int | None
    ) -> tuple[type[PeerError], tuple[int, ...], str]:
        """The kind of a failure, who is to blame, and a clause that says so."""
        whole, begin = self._whole, time.monotonic()
        notes: dict[int, FailureNote] = {}
        is_lost = False
        with suppress(StoreLost):
            whole.post(kind, ())
        while True:
            try:
                notes = whole.board.read(self._all_ranks())
            except StoreLost:
                is_lost = True
            blaming = [
                (KINDS.index(note.kind), author, note.culprits)
                for author, note in self._concern(notes, number).items()
                if note.culprits and note.still_holds and not self._belies(note, notes)
            ]
            if blaming:
                place, _, culprits = min(blaming)
                return KINDS[place], culprits, _say(KINDS[place], culprits)
            left = {rank for rank, note in notes.items() if note.kind is PeerLeft}
            dead = tuple(rank for rank in self.dead_ranks() if rank not in left)
            if dead:
                return PeerDied, dead, _say(PeerDied, dead)
            if self._look is not None:
                self._look(stage)
            silent = self._silent(kind, notes, is_lost)
            waited = time.monotonic() - begin
            is_known = len(silent) == 1 or is_lost or kind is PeerTimeout
            if waited > (_GRACE if is_known else max(_GRACE, self._timeout)):
                break
            if not silent and (kind is PeerTimeout or waited > _GRACE):
                break
            time.sleep(0.01)
        if is_lost:
            who = "the group's store does not answer"
            if silent:
                who += f", nor do{'es' * (len(silent) == 1)} {name_ranks(silent)}"
            return kind, silent, who
        return kind, silent, _say(PeerTimeout, silent) if silent else "every rank still answers"

    def _belies(self, note: FailureNote, notes: Mapping[int, FailureNote]) -> bool:
        """Whether a rank lives that a note calls dead: after the time limit its author guessed."""
        alive = {rank for rank, other in notes.items() if other.is_fresh}
        return note.kind is PeerDied and bool(
            {self.members[self.rank], *alive} & set(note.culprits)
        )

    def _silent(
        self, kind: type[PeerError], notes: Mapping[int, FailureNote], is_lost: bool
    ) -> tuple[int, ...]:
        """The ranks that nobody knows to live. Where a rank may have died, a note also speaks for
        the other ranks of its machine, whose death its author would have seen.
        """
        processes = self._whole.processes
        alive = {rank for rank, note in notes.items() if note.is_fresh or note.kind is PeerLeft}
        if kind is PeerDied:
            alive |= {other for rank in alive for other in processes.neighbours(rank)}
            alive |= {rank for rank in self._all_ranks() if processes.sees(rank)}
        me = self.members[self.rank]
        silent = tuple(rank for rank in self._all_ranks() if rank not in alive and rank != me)
        here = tuple(rank for rank in silent if rank in self.members)
        if is_lost:  # of several ranks it cannot be told which
            return here if len(here) == 1 else ()
        return here or silent

    def _all_ranks(self) -> Sequence[int]:
        return self._whole.members


class TorchCommunicator(_TorchExchange):
    """All ranks of the user's group, over its own engine.

    It refers to the group weakly: torch keeps a group until it is destroyed, and may abort the
    process at exit if anybody else keeps it longer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group_ref = weakref.ref(group)
        self._timeout = timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members = range(self.size)
        self.name = str(dist.get_backend(group))
        if self.name == "nccl":  # RCCL calls itself so too
            self.device = torch.device("cuda", torch.cuda.current_device())  # no GPU has run this
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._whole, self.label = self, "group"
        self.processes = ProcessWatch(self.rank, range(self.size), ())  # nobody is watched yet
        self._parts: list[GlooPart] = []
        # A connection of its own: an operation that never ends must not block the user's.
        _openings[group] = opening = _openings.get(group, 0) + 1
        self.board = FailureBoard(lambda: _own_connection(self._store, timeout), self.rank, opening)
        if self.size > 1:
            busy.listen(self.beat)

    def part(self, members: Sequence[int], name: str) -> GlooPart:
        made = GlooPart(self, members, self._store, name, self._timeout)
        self._parts.append(made)
        return made

    def own(self, name: str) -> Communicator:
        """A part over gloo, whatever engine the group has: what a Buffer's thread sends must not
        come between collectives of the user, or of another Buffer.

        A Buffer over NCCL uses the group itself: it sends on no thread of its own, and the calls
        order the work of all streams. So does one over MPI, whose groups have no store to meet in.
        """
        if self.device.type == "cuda" or self._store is None:
            return self
        return self.part(self.members, name)

    def close(self) -> None:
        """Close the parts. The group itself is the user's, and stays open."""
        busy.forget(self)
        for part in self._parts:
            part.close()
        self._parts.clear()
        self._look = None

    def _begin(self, exchange: Exchange) -> dist.Work:
        out, rows, out_counts, counts, *_ = exchange
        return dist.all_to_all_single(
            out, rows, list(out_counts), list(counts), group=self.group(), async_op=True
        )

    def group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise BufferClosed(f"the process group was destroyed, on rank {self.rank}")
        return group

    def beat(self) -> None:
        """This rank is busy, and gets on: ranks that wait for it wait longer."""
        with suppress(StoreLost):
            self.board.post_busy()

    def post(self, kind: type[PeerError], culprits: Sequence[int]) -> None:
        """A note, with the exchanges that this rank has ended on all connections, on the failure
        board. Raises StoreLost.
        """
        if self.size > 1:
            done = {one.label: one.done for one in (self, *self._parts)}
            self.board.post(kind, culprits, done)


class GlooPart(_TorchExchange):
    """Some ranks of a group, with gloo connections of their own, which are closed with it.

    It does not use `dist.new_group`: all ranks of the world would have to call that, in one order,
    and the group would live as long as the process.
    """

    name = "gloo"

    def __init__(
        self,
        whole: TorchCommunicator,
        members: Sequence[int],
        store: dist.Store,
        name: str,
        timeout: float,
    ) -> None:
        self._whole, self._timeout, self.label = whole, timeout, name
        self.members = tuple(members)
        self.rank, self.size = self.members.index(whole.rank), len(members)
        meeting = dist.PrefixStore(f"tokenyard/{name}", _own_connection(store, timeout))
        self._pg: dist.ProcessGroupGloo | None = None
        if self.size > 1:
            # Gloo ends the process if it runs out of files while others connect to it.
            files = self.size - 1 + _FILES
            limits.allow_files(files, f"connections to {self.size - 1} ranks")
            # Gloo's own time limit comes after ours, whose message says more; once the ranks are
            # connected, long after, since ours waits for ranks that compile.
            try:
                pg = dist.ProcessGroupGloo(
                    meeting, self.rank, self.size, timedelta(seconds=timeout + 1)
                )
            except RuntimeError as error:
                raise self.explain("Buffer (connect)", error) from error
            pg._set_default_timeout(timedelta(seconds=timeout + _LONGEST))
            self._pg = pg

    def part(self, members: Sequence[int], name: str) -> GlooPart:
        raise NotImplementedError("parts are made of the whole group")

    def own(self, name: str) -> GlooPart:
        return self

    def close(self) -> None:
        """Gloo closes its connections once the exchanges that were begun have ended, or their time
        is up. After a failure that takes long, so a thread does it, and we wait only a moment.
        """
        if self._pg is None:
            return
        held, self._pg = [self._pg], None
        thread = threading.Thread(target=held.clear, daemon=True, name="tokenyard-let-go")
        _closing.add(thread)
        thread.start()
        thread.join(_LET_GO)

    def _begin(self, exchange: Exchange) -> dist.Work:
        if self._pg is None:
            raise BufferClosed(f"the Buffer is closed, on rank {self._whole.rank}")
        begin: Any = self._pg.alltoall_base  # type: ignore[attr-defined]  # not in torch's stubs
        out, rows, out_counts, counts, *_ = exchange
        return begin(out, rows, list(out_counts), list(counts))


@atexit.register
def _wait_for_closing() -> None:
    """A thread that comes back from gloo when the interpreter has ended aborts the process."""
    end = time.monotonic() + _AT_END
    for thread in list(_closing):
        thread.join(max(0.0, end - time.monotonic()))


def _say(kind: type[PeerError], culprits: tuple[int, ...]) -> str:
    if kind is PeerTimeout:
        return f"no word from {name_ranks(culprits)}"
    return (
        f"{name_ranks(culprits)} {'died' if kind is PeerDied else 'closed the Buffer, or gave up'}"
    )


def _own_connection(store: dist.Store, timeout: float) -> dist.Store:
    """This store; if it is across a network, through a new connection with this time limit.

    Other stores are not copied: each copy of a FileStore counts as a worker, and the last one that
    ends removes the file.
    """
    inner = store
    while isinstance(inner, dist.PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, dist.TCPStore):
        return store
    clone: Any = store.clone  # type: ignore[attr-defined]  # not in torch's stubs
    own = clone()
    own.set_timeout(timedelta(seconds=timeout))
    return own
