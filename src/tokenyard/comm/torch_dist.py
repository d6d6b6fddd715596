"""Communicators over torch.distributed: the user's process group, and parts of it over gloo."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.comm.base import Communicator, Move
from tokenyard.comm.failure_board import KINDS, StoreLost, Word, Words
from tokenyard.comm.process_table import Watch
from tokenyard.errors import BufferClosed, PeerDied, PeerError, PeerLeft, PeerTimeout, name_ranks

_LOOK = 0.1  # seconds between looks for words of a failure
_LET_GO = 0.1  # seconds to close connections that nobody uses
_GRACE = 0.5  # seconds that the other ranks get to say that they live, once an exchange has failed
_BEFORE = 1.0  # how long before an exchange a word may have been left that concerns it


class _Noticed(RuntimeError):
    """Another rank has left word of a failure."""


class _TorchExchange:
    """What the group's communicator and those of its parts have in common."""

    rank: int
    size: int
    members: Sequence[int]
    device = torch.device("cpu")
    label: str  # of its connections, among those of the Buffer
    _timeout: float
    _whole: TorchCommunicator
    _look: Callable[[str], None] | None = None
    _begun = 0  # exchanges so far
    done = 0  # of them; they end in the order in which they began

    def _begin(
        self, out: Tensor, rows: Tensor, out_counts: list[int], counts: list[int]
    ) -> dist.Work:
        raise NotImplementedError

    def all_to_all(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> None:
        self.start(out_NB, rows_NB, out_counts, counts, stage)()

    def start(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> Move:
        if self.size == 1:
            out_NB.copy_(rows_NB)
            return lambda: None
        self._begun += 1
        number = self._begun
        try:
            work = self._begin(out_NB, rows_NB, list(out_counts), list(counts))
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

        return finish

    def leave_word(self, error: PeerError | None = None) -> None:
        kind = next((one for one in KINDS if isinstance(error, one)), PeerDied)
        with suppress(StoreLost):
            self._whole.leave(kind, error.ranks if error is not None else ())

    def watch(self, look: Callable[[str], None]) -> None:
        self._look = look

    def settle(self, label: str, watch: Watch) -> None:
        self._whole.words.label, self._whole.seen = label, watch

    def dead_ranks(self) -> tuple[int, ...]:
        return self._whole.seen.dead_ranks()

    def _wait(self, work: dist.Work, stage: str, number: int) -> None:
        """A rank that has noticed a failure elsewhere does not come here, and lives: so whoever
        waits for long looks whether any rank has left word of one.
        """
        if self.device.type == "cuda":
            # The stream waits, not the host; NCCL's own watchdog sees to peers.
            work.wait()  # no GPU has run this
            return  # no GPU has run this
        begin = time.time()
        while True:
            try:
                work.wait(timedelta(seconds=min(_LOOK, self._timeout)))
                return
            except RuntimeError as error:
                late = time.time() - begin >= self._timeout
                if late or "timed out" not in str(error).lower():
                    raise
            if self._look is not None:
                self._look(stage)
            with suppress(StoreLost):  # the exchange will fail by itself
                heard = self._concern(self._whole.words.read(self._all_ranks()), number)
                for word in heard.values():
                    if word.when > begin - _BEFORE or _is_for_good(word):
                        raise _Noticed("timeout" if word.kind is PeerTimeout else "death")

    def _concern(self, words: Mapping[int, Word], number: int | None) -> dict[int, Word]:
        """The words that say something about an exchange here. That a rank left does not, if it had
        ended this exchange before: then it is not missed, and others who miss it say so.
        """

        def is_missed(rank: int, word: Word) -> bool:
            if number is None or rank not in self.members:
                return False
            return word.done.get(self.label, 0) < number

        return {
            rank: word
            for rank, word in words.items()
            if word.kind is not PeerLeft or is_missed(rank, word)
        }

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._explain(stage, error, None)

    def _explain(self, stage: str, error: RuntimeError, number: int | None) -> PeerError:
        """Who did not come to an exchange, or to one of somebody else. Gloo says only that
        something failed. So every rank that notices leaves word, and the same is raised by all: of
        ranks that are seen to be dead, or whom a rank has found to be at fault. If there are none,
        whoever leaves no word is named: one of those that were to come here, if there is.
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
        self.leave_word(found)
        return found

    def _find(
        self, stage: str, kind: type[PeerError], number: int | None
    ) -> tuple[type[PeerError], tuple[int, ...], str]:
        """The kind of a failure, who is to blame, and a clause that says so."""
        whole, deadline = self._whole, time.monotonic() + _GRACE
        words: dict[int, Word] = {}
        is_lost = False
        with suppress(StoreLost):
            whole.leave(kind, ())
        while True:
            try:
                words = whole.words.read(self._all_ranks())
            except StoreLost:
                is_lost = True
            heard = self._concern(words, number)
            told = [word for word in heard.values() if word.culprits and word.still_holds]
            if told:
                first = min(told, key=lambda word: (KINDS.index(word.kind), word.when))
                return first.kind, first.culprits, _say(first.kind, first.culprits)
            left = {rank for rank, word in words.items() if word.kind is PeerLeft}
            dead = tuple(rank for rank in self.dead_ranks() if rank not in left)
            if dead:
                return PeerDied, dead, _say(PeerDied, dead)
            if self._look is not None:
                self._look(stage)
            silent = self._silent(kind, words, is_lost)
            if time.monotonic() > deadline or (not silent and kind is PeerTimeout):
                break
            time.sleep(0.01)
        if is_lost:
            who = "the group's store does not answer"
            if silent:
                who += f", nor do{'es' * (len(silent) == 1)} {name_ranks(silent)}"
            return kind, silent, who
        return kind, silent, _say(PeerTimeout, silent) if silent else "every rank still answers"

    def _silent(
        self, kind: type[PeerError], words: Mapping[int, Word], is_lost: bool
    ) -> tuple[int, ...]:
        """Those of whom nobody knows anything. Of who may be dead the ranks of a machine speak for
        each other: they would see it.
        """
        seen = self._whole.seen
        spoken = {rank for rank, word in words.items() if word.is_fresh or word.kind is PeerLeft}
        if kind is PeerDied:
            spoken |= {other for rank in spoken for other in seen.neighbours(rank)}
            spoken |= {rank for rank in self._all_ranks() if seen.sees(rank)}
        me = self.members[self.rank]
        silent = tuple(rank for rank in self._all_ranks() if rank not in spoken and rank != me)
        here = tuple(rank for rank in silent if rank in self.members)
        if is_lost:  # it is one of the few that a part has; in a large group it cannot be told
            return here if self.size == 2 or self._is_part() else ()
        return here or silent

    def _all_ranks(self) -> Sequence[int]:
        return self._whole.members

    def _is_part(self) -> bool:
        return len(self._all_ranks()) > self.size


class TorchCommunicator(_TorchExchange):
    """Refers to the group weakly: torch itself keeps a group until it is destroyed, and may abort
    the process at exit if anybody else keeps it longer.
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
        self.seen = Watch(self.rank, range(self.size), ())  # nobody, before ranks have met
        # A connection of its own: an operation that never ends must not block the user's.
        self._parts: list[GlooPart] = []
        self.words = Words(lambda: _own_connection(self._store, timeout), self.rank)

    def part(self, members: Sequence[int], name: str) -> GlooPart:
        made = GlooPart(self, members, self._store, name, self._timeout)
        self._parts.append(made)
        return made

    def own(self, name: str) -> Communicator:
        """Gloo's, whatever moves the rows of the group: what a Buffer's thread sends must not come
        between collectives of the user's, or of another Buffer.

        NCCL's stays, where no thread of ours sends anything: work of all streams of a group is
        ordered by the calls. So does MPI's, which has no store to meet in.
        """
        if self.device.type == "cuda" or self._store is None:
            return self
        return self.part(self.members, name)

    def close(self) -> None:
        """What was made of the group; itself is the user's, and stays."""
        for part in self._parts:
            part.close()
        self._parts.clear()
        self._look = None

    def _begin(
        self, out: Tensor, rows: Tensor, out_counts: list[int], counts: list[int]
    ) -> dist.Work:
        return dist.all_to_all_single(
            out, rows, out_counts, counts, group=self.group(), async_op=True
        )

    def group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise BufferClosed(f"the process group was destroyed, on rank {self.rank}")
        return group

    def leave(self, kind: type[PeerError], culprits: Sequence[int]) -> None:
        """Word, with how far this rank has come on all connections. Raises StoreLost."""
        if self.size > 1:
            done = {one.label: one.done for one in (self, *self._parts)}
            self.words.leave(kind, culprits, done)


class GlooPart(_TorchExchange):
    """Some ranks of a group, with connections of their own, which are closed with it.

    Not `dist.new_group`, which all ranks of the world would have to call, in one order, and which
    would live as long as the process.
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
            # Gloo's own time limit comes a little after ours, which knows more words.
            limit = timedelta(seconds=timeout + 1)
            try:
                self._pg = dist.ProcessGroupGloo(meeting, self.rank, self.size, limit)
            except RuntimeError as error:
                raise self.explain("Buffer (connect)", error) from error

    def part(self, members: Sequence[int], name: str) -> GlooPart:
        raise NotImplementedError("parts are made of the whole group")

    def own(self, name: str) -> GlooPart:
        return self

    def close(self) -> None:
        """Gloo lets go once what was begun has ended, or its time is up: after a failure that takes
        long, and nobody waits for it.
        """
        if self._pg is None:
            return
        held, self._pg = [self._pg], None
        thread = threading.Thread(target=held.clear, daemon=True, name="tokenyard-let-go")
        thread.start()
        thread.join(_LET_GO)

    def _begin(
        self, out: Tensor, rows: Tensor, out_counts: list[int], counts: list[int]
    ) -> dist.Work:
        if self._pg is None:
            raise BufferClosed(f"the Buffer is closed, on rank {self._whole.rank}")
        begin: Any = self._pg.alltoall_base  # type: ignore[attr-defined]  # not in torch's stubs
        return begin(out, rows, out_counts, counts)


def _is_for_good(word: Word) -> bool:
    return bool(word.culprits) and word.kind is not PeerTimeout


def _say(kind: type[PeerError], culprits: tuple[int, ...]) -> str:
    if kind is PeerTimeout:
        return f"no word from {name_ranks(culprits)}"
    return (
        f"{name_ranks(culprits)} {'died' if kind is PeerDied else 'closed the Buffer, or gave up'}"
    )


def _own_connection(store: dist.Store, timeout: float) -> dist.Store:
    """A store across a network through a connection of its own, with this time limit. Others as
    they are: each copy of a FileStore counts as a worker that ends, and the last removes the file.
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
