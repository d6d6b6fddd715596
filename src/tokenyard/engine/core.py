"""The parts that all calls of a Buffer stand on, and what these do alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from tokenyard import validate
from tokenyard.comm.base import Communicator
from tokenyard.engine.agreement import Agreement, Call
from tokenyard.engine.balanced import Balance
from tokenyard.engine.failure import Failure
from tokenyard.engine.inputs import AgainRequest, Checked, Preparation
from tokenyard.engine.statistics import Statistics, links_of
from tokenyard.kernels import Kernels
from tokenyard.results import Handle, Ledger
from tokenyard.runtime import recorder
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.events import EventHandle, EventOverlap, Worker
from tokenyard.runtime.recorder import Recorder, Span, Track
from tokenyard.runtime.streams import Streams
from tokenyard.topology import Placement, Topology
from tokenyard.transports import Sum, Transport
from tokenyard.types import Config, Origin, digest

_NOWHERE = nullcontext()


class Core:
    def __init__(
        self,
        transport: Transport,
        communicator: Communicator,
        kernels: Kernels,
        agreement: Agreement,
        topology: Topology,
        placement: Placement | None,
        origin: Origin,
        buffer_id: int,
        streams: Streams | None,
        slack: float | None = None,
        no_copies: str = "",
    ) -> None:
        """`streams` is None where the tensors are on CPU; `communicator` is that of the group.

        `origin` is that of handles; `buffer_id` is a number that this Buffer has on this rank only;
        `slack` is that of a balance, if there is one; `no_copies` says why experts have no copies.
        """
        self.transport, self.communicator, self.topology = transport, communicator, topology
        self.origin, self.buffer_id, self._no_copies = origin, buffer_id, no_copies
        self.rank, self.num_ranks = transport.rank, transport.size
        self.kernels, self.agreement, self.streams = kernels, agreement, streams
        self.failure = Failure(self.rank, transport.tell)
        self.worker = Worker(f"tokenyard-rank-{self.rank}", self.failure.give_up)
        self.device, self.pid = communicator.device, os.getpid()
        self.statistics = Statistics(self.rank, links_of(transport, topology), agreement.waits)
        nodes = None if topology.num_nodes == 1 else topology.node_of_rank
        on_device = streams is not None and kernels.counts_on_device and transport.tells_from_device
        self.balance: Balance | None = None
        if slack is not None:
            where = transport, agreement, topology.node_of_rank
            self.balance = Balance(kernels, *where, slack, self.statistics)
        self.local = Preparation(
            kernels,
            self.rank,
            self.num_ranks,
            nodes,
            placement,
            self.device,
            transport.empty,
            on_device,
            self.balance,
        )

    def place(self, placement: Placement, mark: int) -> None:
        """From now on experts live there. Ranks know the placement by its mark."""
        self.local.place(placement)
        self.statistics.forget_loads()
        self.origin = self.origin._replace(place=digest(f"{self.origin.place} {mark}"))

    def checked_placement(self, placement: Any) -> Placement:
        """What `rebalance` was given."""
        return validate.placement(placement, self.num_ranks, self.device, self._no_copies)

    def known(self, handle: Any) -> Handle:
        """The handle that a user gave. One of another Buffer may be of a dispatch that goes on on
        that Buffer's thread.
        """
        known = validate.handle(handle, self.origin)
        if known.origin.buffer != self.origin.buffer:
            known.wait()
        return known

    def number_of(self, known: Handle) -> int:
        """The number by which ranks compare handles."""
        return known.origin.number(known.call, self.origin)

    def handle(
        self, number: int, out: Checked, ledger: Ledger, arrived: EventHandle | None
    ) -> Handle:
        """The handle of dispatch `number`."""
        return Handle(
            origin=self.origin,
            call=number,
            hidden=out.x.shape[1],
            combine_dtype=validate.combine_dtype(out.x.dtype),
            num_channels=out.config.num_channels,
            ledger=ledger,
            arrived=arrived,
        )

    def check_again(
        self, request: AgainRequest, pending: EventHandle | None
    ) -> tuple[tuple[Tensor, Tensor | None], Handle]:
        """The columns of a dispatch along a handle."""
        known = self.known(request.handle)
        validate.no_routing(request.beside)
        columns = validate.dispatched(request.x, pending, self.device)
        validate.same_tokens(columns[0], known.num_tokens)
        self.local.config(request.config)
        return columns, known

    def combine_call(
        self, stage: str, sums: Sequence[Sum], known: Handle, config: Config, tag: Any
    ) -> Call:
        num_topk = sums[1].rows_ND.shape[1] if len(sums) > 1 else -1
        more = {"handle": self.number_of(known), "num_topk": num_topk, "tag": validate.tag(tag)}
        return Call.of_rows(stage, sums[0].rows_ND, None, config, **more)

    def reject(self, stage: str, error: Exception) -> NoReturn:
        """This rank cannot make the call: raise the error here, PeerInputError on the others."""
        if getattr(error, "all_know", False):  # of a balance, in which all have met
            raise error
        self.before_words()
        self.agreement.reject(stage, error)

    def before_words(self) -> None:
        """Wait for calls that still go on, where rows and messages cannot travel at once."""
        if self.transport.moves_alone:
            self.worker.drain()

    def scope(self, completion: Completion, previous_event: Any) -> AbstractContextManager[Any]:
        if self.streams is None:
            return _NOWHERE
        return self.streams.scope(completion, previous_event is None)

    def pending(self, previous_event: Any, completion: Completion) -> EventHandle | None:
        """The event that the move must wait for. An event that is over, or that a synchronous call
        needs at once, is waited for here: if it failed, that is bad input, which all ranks hear of.
        """
        pending = validate.previous_event(previous_event)
        if pending is None or self.streams is not None:
            return pending
        if completion.async_finish and not pending.is_over:
            return pending
        pending.current_stream_wait()
        return None

    def finish(
        self,
        work: Callable[[], None],
        completion: Completion,
        pending: EventHandle | None,
        used: Sequence[Tensor | None],
        stage: str,
    ) -> EventOverlap:
        """Do the work after the pending event, and after all work before it. `used` are the tensors
        that it reads and writes.
        """
        if self.streams is not None:
            return self.streams.run(work, used, pending, completion)
        if completion.async_finish:
            later = partial(self._work_later, work, pending, stage)
            return EventOverlap(self.worker.submit(later))
        assert pending is None, "a synchronous call has waited for it"
        self.worker.drain()
        work()
        return EventOverlap(None)

    def _work_later(
        self, work: Callable[[], None], pending: EventHandle | None, stage: str
    ) -> None:
        """Do the work of an asynchronous call, on the Buffer's thread."""
        if pending is not None:
            pending.current_stream_wait()
        begin = time.monotonic_ns()
        work()
        end = time.monotonic_ns()
        self.statistics.moved(stage, end - begin)
        if recorder.active is not None:
            self.track(recorder.active).moves.append(Span(stage, begin, end))

    def track(self, active: Recorder) -> Track:
        """This Buffer's track in a trace."""
        return active.track(self.statistics, self.agreement.buffer_id, self.agreement.clocks_R)
