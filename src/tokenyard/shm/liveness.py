"""Which ranks of a node are dead, have left or are late, and how long a rank waits for them.

Every wait for a rank of the same node goes through `who_stops`. It ends when the work is done, when
a process is seen to have died (its pidfd says so), when a rank has closed its Buffer or has said
that it gives up, or at a deadline. The deadline restarts whenever work was done or a peer's
heartbeat advanced. A rank that finds a failure says so in its control segment, so that the others
raise the same at once, and in the group's store, so that other nodes blame the right rank.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tokenyard.comm.base import Communicator, Leaving
from tokenyard.errors import (
    PeerDied,
    PeerError,
    PeerLeft,
    PeerTimeout,
    name_ranks,
    text_to_words,
    words_to_text,
)
from tokenyard.runtime import busy
from tokenyard.runtime.threads import has_core_each
from tokenyard.shm.control import BEAT, FAILURE, LEFT, Control
from tokenyard.shm.processes import watch, within

_FAILURES = (PeerTimeout, PeerDied, PeerLeft)
_NOTICE_MS = 500  # a process is seen to be dead a moment after its connections break
_GRACE = 0.2  # seconds for signals that are on their way when a peer is seen to be dead


class Stopped(NamedTuple):
    """Ranks, by their numbers in the whole group, that keep a wait from ending, and why."""

    kind: type[PeerError]
    ranks: tuple[int, ...]


class Liveness(Leaving):
    def __init__(
        self,
        communicator: Communicator,
        controls: Sequence[Control],
        processes: Sequence[int],
        timeout: float,
    ) -> None:
        """Raises OSError if this process cannot watch the others."""
        self.rank, self._members = communicator.rank, communicator.members
        self.me = self._members[self.rank]  # what this rank is called in the whole group
        self.shrinks = False  # whether the others go on without a rank that fails
        self._communicator = communicator
        self._controls = controls
        self._heads = [control.head for control in controls]
        self._timeout = timeout
        # Some milliseconds where each rank has a core: two that sleep keep making each other wait.
        self._yields = 2000 if has_core_each(communicator.size) else 50
        self._pidfds: dict[int, int] = {}
        self._deaths = select.poll()
        self._one_polls = threading.Lock()  # messages may be exchanged while rows move
        try:
            for rank, process in enumerate(processes):
                fd = watch(process, within(timeout))
                self._pidfds[fd] = rank
                self._deaths.register(fd, select.POLLIN)
        except OSError as error:
            self.close()
            raise OSError(f"rank {self.me} cannot watch the other ranks: {error}") from error
        busy.listen(self.beat)

    def wait_until(
        self, step: Callable[[], int], missing: Callable[[], Sequence[int]], stage: str
    ) -> None:
        """Call step(), which tries to get on, until it says that 0 is left to do.

        Raises PeerDied, PeerLeft or PeerTimeout: with the ranks that have died or left, else with
        those that missing() finds, or with the culprit that another rank of the node has named.
        """
        stopped = self.who_stops(step, missing, stage)
        if stopped is not None:
            raise self.blame(stopped, stage)

    def wait_for_one(self, rank: int, step: Callable[[], int], stage: str) -> None:
        """Wait as `wait_until` does, for what one rank alone has to do: others may be dead."""
        others = {member for member in self._members if member != self._members[rank]}
        stopped = self.who_stops(step, lambda: (rank,), stage, others)
        if stopped is not None:
            raise self.blame(stopped, stage)

    def who_stops(
        self,
        step: Callable[[], int],
        missing: Callable[[], Sequence[int]],
        stage: str,
        given_up: Collection[int] = (),
    ) -> Stopped | None:
        """Wait as `wait_until` does, but return who is at fault: None if all is done.

        The deaths of the ranks `given_up` are ignored.
        """
        left = step()
        deadline = time.monotonic() + self._timeout
        dead_since, rounds, beats = None, 0, self._beats()
        began = time.monotonic()  # to wait, since when a step got on
        while left:
            before, left = left, step()
            now = time.monotonic()
            if left < before:
                deadline, rounds, began = now + self._timeout, 0, now
                continue
            if self._beats() != beats:
                deadline, beats = now + self._timeout, self._beats()
            if not self.shrinks:
                self.raise_told(stage)
            gone = self.have_left()
            dead = tuple(rank for rank in self.dead_ranks() if rank not in given_up)
            if gone and step():  # what they did before they left may have come just now
                awaited = gone.intersection(missing())
                if awaited:
                    if not self.shrinks:
                        self.raise_told(stage)  # a rank says why before it leaves
                    names = self.names(sorted(gone))
                    fallen = tuple(rank for rank in dead if rank not in names)
                    if fallen:  # most likely the others left because of these
                        return Stopped(PeerDied, fallen)
                    return Stopped(PeerLeft, self.names(sorted(awaited)))
            if dead and dead_since is None:
                dead_since = now
            if dead_since is not None and now > dead_since + _GRACE:
                return Stopped(PeerDied, dead)
            if now > deadline:
                return Stopped(PeerTimeout, self.names(missing()))
            rounds += 1
            if rounds < self._yields:
                os.sched_yield()
            else:
                time.sleep(min(1e-3, max(2e-5, (now - began) / 16)))
        return None

    def beat(self) -> None:
        """This rank is busy elsewhere, and gets on: ranks that wait for it wait longer."""
        self._heads[self.rank][BEAT] += 1

    def tell(self, error: PeerError) -> None:
        """Tell the node who is at fault, so that no rank has to wait to find out.

        What was told first stays, since no rank goes on after that.
        """
        head = self._heads[self.rank]
        if error.ranks and not head[FAILURE]:
            self._controls[self.rank].text[:] = text_to_words(str(error))
            if error.ranks == (self.me,):
                self._communicator.report(error)
            kind = next((k for k, one in enumerate(_FAILURES) if isinstance(error, one)), 2)
            head[FAILURE] = 3 * (1 + error.rank) + kind  # one store, so readers see all or nothing

    def raise_told(self, stage: str) -> None:
        """Raise if a rank of the node has told of a failure, or another thread of this rank has."""
        for rank, head in enumerate(self._heads):
            told = int(head[FAILURE])
            if told:
                kind, culprit = _FAILURES[told % 3], told // 3 - 1
                text = words_to_text(self._controls[rank].text)
                said = (
                    f"{stage}: rank {self._members[rank]} has given up ({text}), on rank {self.me}"
                )
                error = kind(said, ranks=(culprit,), stage=stage)
                if rank != self.rank:
                    self._communicator.report(error)  # so that no other node blames this rank
                raise error

    def dead_ranks(self, wait_ms: int = 0) -> tuple[int, ...]:
        """The ranks that have died, by their numbers in the whole group."""
        return self.names(self._dead(wait_ms))

    def have_left(self) -> set[int]:
        """The ranks of the node that have closed their Buffer."""
        return {rank for rank, head in enumerate(self._heads) if head[LEFT] and rank != self.rank}

    def gone(self) -> set[int]:
        """The ranks of the node that have left it, or died."""
        return self.have_left().union(self._dead())

    def blame(self, stopped: Stopped, stage: str) -> PeerError:
        """The error that names them. The other nodes hear of it."""
        kind, ranks = stopped
        who = name_ranks(ranks)
        what = {
            PeerDied: f"{who} died",
            PeerLeft: f"{who} closed {'its' if len(ranks) == 1 else 'their'} Buffer",
            PeerTimeout: f"{self._timeout:g} s passed; no word from {who}",
        }[kind]
        error = kind(f"{stage}: {what}, on rank {self.me}", ranks=ranks, stage=stage)
        self._communicator.report(error)
        return error

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        """Who has died, if that is why something else between these ranks has failed."""
        dead = self.dead_ranks(wait_ms=_NOTICE_MS)
        if dead:
            return self.blame(Stopped(PeerDied, dead), stage)
        return self._communicator.explain(stage, error)

    def lost(self, rank: int, stage: str) -> PeerError:
        """The error if a segment that a peer told of is gone: the peer has died, or has closed its
        Buffer, most likely because another rank died. Else it never had such a segment.
        """
        # A process that dies loses its files a moment before it is seen to be dead.
        dead = self.dead_ranks(wait_ms=1000)
        if dead:
            return self.blame(Stopped(PeerDied, dead), stage)
        self.raise_told(stage)
        if rank in self.have_left():
            return self.blame(Stopped(PeerLeft, self.names([rank])), stage)
        return self.stray(rank, stage)

    def stray(self, rank: int, stage: str) -> PeerError:
        """The error if what a peer told would become an address outside its memory."""
        (them,) = self.names([rank])
        what = f"{stage}: rank {them} wrote what no rank writes, on rank {self.me}"
        return PeerError(what, ranks=(them,), stage=stage)

    def names(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """What ranks of the node are called in the whole group."""
        return tuple(self._members[rank] for rank in ranks)

    def close(self) -> None:
        """This rank leaves: the others see that, and it watches them no longer."""
        busy.forget(self)
        self._heads[self.rank][LEFT] = 1
        with self._one_polls:
            for fd in self._pidfds:
                self._deaths.unregister(fd)
                os.close(fd)
            self._pidfds = {}

    def _dead(self, wait_ms: int = 0) -> list[int]:
        with self._one_polls:
            return sorted(self._pidfds[fd] for fd, _ in self._deaths.poll(wait_ms))

    def _beats(self) -> int:
        return sum([int(head[BEAT]) for head in self._heads])
