"""Communicators over torch.distributed: the user's process group, and parts of it over gloo.

Choose the group itself for what all ranks do on the user's thread; a part has connections of its
own, which another thread may use. NCCL groups move CUDA tensors and have no parts.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from tokenyard.comm.base import Communicator, Exchange
from tokenyard.comm.failure_board import FailureBoard
from tokenyard.comm.watched import Openings, Watched, Whole, Work
from tokenyard.errors import BufferClosed
from tokenyard.runtime import limits, variables

_LET_GO = 0.1  # seconds to close connections that nobody uses
_AT_END = 2.0  # seconds that the end of the process waits for that
_FILES = 12  # that gloo opens besides connections
_LONGEST = 120.0  # seconds that a rank may need to compile what a call needs

_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that close connections
_openings: weakref.WeakKeyDictionary[dist.ProcessGroup, Openings] = weakref.WeakKeyDictionary()


class TorchCommunicator(Whole):
    """All ranks of the user's group, over its own engine.

    It refers to the group weakly: torch keeps a group until it is destroyed, and may abort the
    process at exit if anybody else keeps it longer.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        store = dist.distributed_c10d._get_process_group_store(group)
        rank = dist.get_rank(group)
        # A connection of its own: an operation that never ends must not block the user's.
        board = FailureBoard(lambda: _own_connection(store, timeout), rank)
        super().__init__(rank, dist.get_world_size(group), timeout, board)
        self._group_ref, self._store = weakref.ref(group), store
        self.name = str(dist.get_backend(group))
        self._openings = _openings.setdefault(group, Openings())
        if self.name == "nccl":  # RCCL calls itself so too
            self.device = torch.device("cuda", torch.cuda.current_device())  # no GPU has run this
        if self.name == "nccl" or self.size == 1:
            return
        # Gloo ends a process in which another exchange arrives than the one that it is in.
        if self._openings.is_lost:
            raise RuntimeError(
                "the group is out of step, since this rank gave up an earlier opening in which "
                f"others may have gone on, want a new group, on rank {self.rank}"
            )
        row = torch.zeros(1, 1, dtype=torch.uint8, device="cpu")
        counts = [1] * self.size, [1], "Buffer (connect)"
        come = Exchange(row.repeat(self.size, 1), row, *counts, to_all=True)
        self.meet(self._openings, lambda: self._begin(come))

    def _give_up(self) -> None:
        self._openings.is_lost = True

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

    def _begin(self, exchange: Exchange) -> dist.Work:
        out, rows, out_counts, counts, *_ = exchange
        if exchange.to_all:
            return dist.all_gather(list(out), rows[0], group=self.group(), async_op=True)
        return dist.all_to_all_single(
            out, rows, list(out_counts), list(counts), group=self.group(), async_op=True
        )

    def _wait(self, work: Work, stage: str, number: int) -> None:
        if self.device.type == "cuda":
            # The stream waits, not the host; NCCL's own watchdog sees to peers.
            cast(dist.Work, work).wait()  # no GPU has run this
        else:
            super()._wait(work, stage, number)

    def group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise BufferClosed(f"the process group was destroyed, on rank {self.rank}")
        return group


class GlooPart(Watched):
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
                pg = dist.ProcessGroupGloo(meeting, self.rank, self.size, _at_once(timeout + 1))
            except RuntimeError as error:
                raise self.explain("Buffer (connect)", error) from error
            pg._set_default_timeout(timedelta(seconds=timeout + _LONGEST))
            self._pg = pg

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
        gloo: Any = self._pg  # these are not in torch's stubs
        out, rows, out_counts, counts, *_ = exchange
        if exchange.to_all:
            return gloo.allgather([list(out)], [rows[0]])
        return gloo.alltoall_base(out, rows, list(out_counts), list(counts))


def _at_once(timeout: float) -> Any:
    """Options of gloo groups that connect at once, also under TORCH_GLOO_LAZY_INIT=1: gloo that
    has connected lazily may wait for ever when such a group is destroyed after a failure.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs name its options otherwise
    options = gloo._Options()
    names = variables.read("GLOO_SOCKET_IFNAME")  # as gloo itself would
    devices = [
        gloo.create_device(interface=one, lazy_init=False) for one in names.split(",") if one
    ]
    options._devices = devices or [gloo.create_default_device(lazy_init=False)]
    options._threads, options._timeout = 2 * len(options._devices), timedelta(seconds=timeout)
    return options


@atexit.register
def _wait_for_closing() -> None:
    """A thread that comes back from gloo when the interpreter has ended aborts the process."""
    end = time.monotonic() + _AT_END
    for thread in list(_closing):
        thread.join(max(0.0, end - time.monotonic()))


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
