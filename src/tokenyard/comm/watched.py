"""Exchanges over an engine that says only that something failed: who is to blame.

An engine gives `_begin`, which returns a `Work`, and a `Whole` with a place for notes
(`failure_board`). The notes of other ranks tell, and the machine's process table, and who stays
silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import numpy as np

from tokenyard.comm.base import Communicator, Exchange, Move
from tokenyard.comm.failure_board import KINDS, FailureBoard, FailureNote, StoreLost
from tokenyard.comm.process_table import ProcessWatch
from tokenyard.errors import BufferClosed, PeerDied, PeerError, PeerLeft, PeerTimeout, name_ranks
from tokenyard.runtime import busy, network
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.streams import to_device, to_host

_LOOK = 0.1  # seconds between two looks at the failure board
_GRACE = 0.5  # seconds in which the other ranks may post that they live, after an exchange failed
_BUSY = 5.0  # seconds before the time limit from which on a rank asks whether others are busy
_BEFORE = 1.0  # a note may have been seen this many seconds before the exchange that it concerns


class Work(Protocol):
    """An exchange that has begun: one of torch.distributed is such a thing."""

    def wait(self, limit: timedelta, /) -> object:
        """Wait for its end. Raises RuntimeError, with "timed out" in its text if the limit has
        passed; then it may be asked again.
        """


class _Noticed(RuntimeError):
    """Another rank has posted a note about a failure."""


class Openings:
    """The openings of Buffers over a group, as all its ranks count them."""

    number = 0  # to which all ranks have come
    coming: Work | None = None  # ends when all have come to the next one
    is_lost = False  # this rank has given up one in which others may have gone on

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by the thread that comes to one


class Watched(Communicator):
    """What the communicator of all ranks and those of its parts have in common."""

    label: str  # of its connections, among those of the Buffer
    _timeout: float
    _whole: Whole
    _look: Callable[[str], None] | None = None
    _begun = 0  # exchanges so far
    done = 0  # how many of them have ended; they end in the order in which they began

    def _begin(self, exchange: Exchange) -> Work:
        """Raises RuntimeError if the engine cannot."""
        raise NotImplementedError

    def _missing(self) -> Collection[int]:
        """The members whose rows this rank waits for, as far as the engine knows."""
        return self.members

    def _give_up(self) -> None:
        """An exchange has failed: nobody waits any more for those that began."""

    def start(self, exchange: Exchange) -> Move:
        if self.size == 1:
            exchange.out_NB.copy_(exchange.rows_NB)
            return lambda: None
        self._begun += 1
        number, stage = self._begun, exchange.stage
        try:
            work = self._begin(exchange)
        except RuntimeError as error:
            raise self.explain(stage, error, number) from error

        def finish() -> None:
            try:
                self._wait(work, stage, number)
            except PeerError:
                raise
            except RuntimeError as error:
                raise self.explain(stage, error, number) from error
            self.done = number
            with suppress(StoreLost):
                self._whole.board.withdraw()

        return finish

    def tell_all(self, row_M: np.ndarray, stage: str) -> np.ndarray:
        """Gloo passes rows on in a ring, so no rank needs a connection to every other."""
        row = to_device(row_M[None], self.device)
        answer = row.new_zeros(self.size, len(row_M))
        counts = [1] * self.size, [1], stage
        self.all_to_all(Exchange(as_bytes(answer), as_bytes(row), *counts, to_all=True))
        return to_host(answer)

    def report(self, error: PeerError | None = None) -> None:
        kind = next((one for one in KINDS if isinstance(error, one)), PeerDied)
        with suppress(StoreLost):
            self._whole.post(kind, error.ranks if error is not None else ())

    def watch(self, look: Callable[[str], None]) -> None:
        self._look = look

    def hears_of_waits(self, since: float) -> bool:
        notes: Mapping[int, FailureNote] = {}
        with suppress(StoreLost):
            notes = self._whole.board.read(self._whole.members)
        return any(note.kind is PeerTimeout and note.seen > since for note in notes.values())

    def settle(self, label: str, processes: ProcessWatch) -> None:
        self._whole.board.label, self._whole.processes = label, processes

    def dead_ranks(self) -> tuple[int, ...]:
        return self._whole.processes.dead_ranks()

    def _wait(self, work: Work, stage: str, number: int) -> None:
        """A rank that has noticed a failure elsewhere lives and does not come here. So a rank that
        waits reads the failure board now and then.
        """
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
                notes = self._concern(board.read(self._whole.members), number)
                for note in notes.values():
                    if note.seen > begin - _BEFORE or note.is_final:
                        raise _Noticed("timeout" if note.kind is PeerTimeout else "death")

    def _concern(
        self, notes: Mapping[int, FailureNote], number: int | None
    ) -> dict[int, FailureNote]:
        """The notes that concern an exchange here. A rank that left after it had ended this
        exchange is not missed here; ranks that do miss it post notes of their own. Ranks that wait
        in vain for all to come to an opening, which is exchange 0, may come again.
        """
        if number == 0:
            return {r: note for r, note in notes.items() if note.is_final or note.kind is PeerDied}

        def is_missed(rank: int, note: FailureNote) -> bool:
            if number is None or rank not in self.members:
                return False
            return note.done.get(self.label, 0) < number

        return {
            rank: note
            for rank, note in notes.items()
            if note.kind is not PeerLeft or is_missed(rank, note)
        }

    def explain(self, stage: str, error: RuntimeError, number: int | None = None) -> PeerError:
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
        what = network.why_not_connected(error) or what
        kind, culprits, who = self._find(stage, PeerTimeout if late else PeerDied, number)
        where = f"on rank {self.members[self.rank]}"
        found = kind(f"{stage}: {what}; {who}, {where}", ranks=culprits, stage=stage)
        self.report(found)
        if number is not None:
            self._give_up()
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
                notes = whole.board.read(self._whole.members)
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
            alive |= {rank for rank in self._whole.members if processes.sees(rank)}
        me = self.members[self.rank]
        silent = tuple(rank for rank in self._whole.members if rank not in alive and rank != me)
        missing = self._missing()
        here = tuple(rank for rank in silent if rank in missing)
        if is_lost:  # of several ranks it cannot be told which
            return here if len(here) == 1 else ()
        return here or silent


class Whole(Watched):
    """The communicator of all ranks: it has the notes, and the parts."""

    processes: ProcessWatch

    def __init__(self, rank: int, size: int, timeout: float, board: FailureBoard) -> None:
        self.rank, self.size, self._timeout, self.board = rank, size, timeout, board
        self.members = range(size)
        self._whole, self.label = self, "group"
        self.processes = ProcessWatch(rank, range(size), ())  # nobody is watched yet
        self._parts: list[Watched] = []
        if size > 1:
            busy.listen(self.beat)

    def meet(self, openings: Openings, begin: Callable[[], Work]) -> None:
        """Come to the next opening. A rank that has waited in vain, and tries again, waits for the
        same work, so that all ranks count the same openings.
        """
        with openings.lock:
            self.board.opening = 2 * openings.number + 1
            try:
                openings.coming = openings.coming or begin()
                Watched._wait(self, openings.coming, "Buffer (connect)", 0)
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    openings.coming = None
                raise self.explain("Buffer (connect)", error) from error
            openings.coming = None
            openings.number += 1
            self.board.opening += 1  # notes of ranks that gave up before are no news

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

    def close(self) -> None:
        """Close the parts."""
        busy.forget(self)
        for part in self._parts:
            part.close()
        self._parts.clear()
        self._look = None


def _say(kind: type[PeerError], culprits: tuple[int, ...]) -> str:
    if kind is PeerTimeout:
        return f"no word from {name_ranks(culprits)}"
    return (
        f"{name_ranks(culprits)} {'died' if kind is PeerDied else 'closed the Buffer, or gave up'}"
    )
