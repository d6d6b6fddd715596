"""A communicator over a torch.distributed process group (gloo today)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.errors import BufferClosed, PeerDied, PeerError, PeerTimeout, name_ranks

_NOTICED = "tokenyard/noticed"  # in the group's store, by rank: when it noticed a failure
_GRACE = 0.5  # seconds that the other ranks get to say that they live, once an exchange has failed
_FRESH = 5.0
_LOOK = 0.1  # seconds between looks for words of a failure
_BEFORE = 1.0  # how long before an exchange a word may have been left that concerns it


class TorchCommunicator:
    """Refers to the group weakly: torch itself keeps a group until it is destroyed, and may abort
    the process at exit if anybody else keeps it longer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._group_ref = weakref.ref(group)
        self._timeout = timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.name = str(dist.get_backend(group))
        self.device = torch.device("cpu")
        if self.name == "nccl":  # RCCL calls itself so too
            self.device = torch.device("cuda", torch.cuda.current_device())  # no GPU has run this

    def all_to_all(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> None:
        group = self.group()
        try:
            work = dist.all_to_all_single(
                out_NB, rows_NB, list(out_counts), list(counts), group=group, async_op=True
            )
            if self.device.type == "cuda":
                # The stream waits, not the host; NCCL's own watchdog sees to peers.
                work.wait()  # no GPU has run this
            else:
                self._wait(work)
        except RuntimeError as error:
            raise self._blame(stage, error) from error

    def _wait(self, work: dist.Work) -> None:
        """A rank that has noticed a failure elsewhere does not come here, and lives: so whoever
        waits for long looks whether any rank has left word of one.
        """
        begin = time.time()
        while True:
            try:
                work.wait(timedelta(seconds=min(_LOOK, self._timeout)))
                return
            except RuntimeError as error:
                late = time.time() - begin >= self._timeout
                if late or "timed out" not in str(error).lower():
                    raise
            if self._word_since(begin - _BEFORE):
                raise RuntimeError("another rank has noticed a failure")

    def _word_since(self, moment: float) -> bool:
        try:
            store = self._store()
            return store.check([_NOTICED]) and float(store.get(_NOTICED)) > moment
        except RuntimeError:  # the store is gone, and the exchange will fail by itself
            return False

    def close(self) -> None:
        """The group is the user's, and stays."""

    def group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise BufferClosed(f"the process group was destroyed, on rank {self.rank}")
        return group

    def _blame(self, stage: str, error: RuntimeError) -> PeerError:
        """Who did not come. Gloo says only that something failed, so every rank that notices leaves
        word in the group's store, and whoever leaves none is named.
        """
        timed_out = "timed out" in str(error).lower()
        kind = PeerTimeout if timed_out else PeerDied
        what = f"{self._timeout:g} s passed" if timed_out else "a connection broke"
        try:
            silent = self._silent_ranks()
        except RuntimeError:
            return kind(
                f"{stage}: {what}, and the group's store is gone with the process that held it "
                f"(rank 0 or the launcher), on rank {self.rank}",
                ranks=(),
                stage=stage,
            )
        who = f"no word from {name_ranks(silent)}" if silent else "every rank still answers"
        return kind(f"{stage}: {what}; {who}, on rank {self.rank}", ranks=silent, stage=stage)

    def leave_word(self) -> None:
        with suppress(RuntimeError, BufferClosed):
            store, now = self._store(), str(time.time())
            store.set(f"{_NOTICED}/{self.rank}", now)
            store.set(_NOTICED, now)

    def _silent_ranks(self) -> tuple[int, ...]:
        self.leave_word()
        store = self._store()
        silent = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + _GRACE
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not _is_fresh(store, f"{_NOTICED}/{rank}")]
            time.sleep(0.01)
        return tuple(silent)

    def _store(self) -> dist.Store:
        return dist.distributed_c10d._get_process_group_store(self.group())


def _is_fresh(store: dist.Store, key: str) -> bool:
    """A word of the last seconds, and not of a failure that was got over."""
    return store.check([key]) and time.time() - float(store.get(key)) < _FRESH
