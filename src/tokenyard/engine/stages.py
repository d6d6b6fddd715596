"""The stages of a call, written once: layout -> notify -> dispatch -> combine.

The engine alone joins kernels and transports. Every call that exchanges rows has three steps:

    prepare   check the input and count its rows; local, so it may fail on one rank alone
    agree     tell the other ranks; all go on together, or all raise
    move      give results their memory; rows move at once, or on the Buffer's thread
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.comm.base import Communicator
from tokenyard.engine import arrivals, counts
from tokenyard.engine.agreement import Agreed, Agreement, Call, Heard, Terms
from tokenyard.engine.failure import Failure
from tokenyard.engine.inputs import DispatchRequest, Outgoing, Preparation, wait
from tokenyard.engine.statistics import ENCLOSED, GENERAL, Statistics, links_of
from tokenyard.errors import PeerLeft, SharedMemoryError
from tokenyard.handle import Handle, ListedLedger
from tokenyard.kernels import Kernels
from tokenyard.replicas import Replicas
from tokenyard.runtime import recorder
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.events import EventHandle, EventOverlap, Worker
from tokenyard.runtime.recorder import Recorder, Span, Track
from tokenyard.runtime.streams import Streams
from tokenyard.shm.shared_rows import check
from tokenyard.topology import Placement, Topology
from tokenyard.transports import RowsBack, RowsOut, Sum, Transport
from tokenyard.types import Config, Flow, Layout, Origin, Received, digest
from tokenyard.wire.columns import row_widths
from tokenyard.wire.message import NO_MEMORY

if TYPE_CHECKING:
    from tokenyard.engine.compiled import CompiledCalls
    from tokenyard.engine.compiled_nodes import CompiledNodeCalls

_LARGE = 32 << 20  # bytes of a result that a rank may not have: ranks ask each other first
_NOWHERE = nullcontext()


class Engine:
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
    ) -> None:
        """`streams` is None where the tensors are on CPU; `communicator` is that of the group.

        `origin` is that of handles; `buffer_id` is a number that this Buffer has on this rank only.
        """
        self.transport = transport
        self.communicator = communicator
        self.topology = topology
        self.origin, self.buffer_id = origin, buffer_id
        self.rank, self.num_ranks = transport.rank, transport.size
        self.kernels = kernels
        self.agreement = agreement
        self.failure = Failure(self.rank, transport.tell)
        self.worker = Worker(f"tokenyard-rank-{self.rank}", self.failure.give_up)
        self._one_node = topology.num_nodes == 1
        nodes = None if self._one_node else topology.node_of_rank
        self.device, self._pid = communicator.device, os.getpid()
        self.streams = streams
        self.statistics = Statistics(self.rank, links_of(transport, topology), agreement.waits)
        # For calls of few tokens, where there is such.
        self.compiled: CompiledCalls | CompiledNodeCalls | None = None
        self.wait_to_leave: Callable[[], None] | None = None  # before memory is unmade
        on_device = streams is not None and kernels.counts_on_device and transport.tells_from_device
        self.local = Preparation(
            kernels,
            self.rank,
            self.num_ranks,
            nodes,
            placement,
            self.device,
            transport.empty,
            on_device,
        )

    def dispatch(
        self,
        request: DispatchRequest,
        completion: Completion,
        stage: str = "dispatch",
        heard: Heard | None = None,
    ) -> tuple[Received, Handle, EventOverlap]:
        """Each token's row to every rank that owns one of its experts.

        `heard` if a compiled call has got as far as the agreement, and could not go on.
        """
        number, begin = self.agreement.number, time.monotonic_ns()
        self._before_words()
        with self._scope(completion, request.previous_event):
            try:
                out = self.local.dispatch(request)
                columns = [
                    out.x,
                    out.scales,
                    out.topk_idx,
                    out.topk_weights,
                    self.local.token_numbers(out.x.shape[0]),
                ]
                terms = self._dispatch_terms(stage, out, columns, heard)
            except Exception as error:
                self._reject(stage, error, heard)

            agreed = self.agreement.meet(stage, terms, heard)
            if out.counted is not None and agreed.numbers is not None:
                out = out._replace(route=out.counted.settle(agreed.numbers))
            flow, per_expert = counts.hear(agreed, out.route, out.placement, self.rank)
            self._check_worst(stage, agreed, flow)

            rows = self.transport.learn_route(
                _rows_out(columns, flow, agreed, out.config, stage), out.layout.is_token_in_rank
            )
            flow = rows.flow
            arrive, move = self._send(columns, rows)
            received = arrivals.received(out, flow, arrive, per_expert)
        src_idx = received.src_idx
        work = partial(
            arrivals.receive, move, flow, arrive, self.kernels, out.placement, self.rank, src_idx
        )
        used = [*columns, *arrive, src_idx]
        event = self._finish(work, completion, None, used, stage)
        if out.topk_idx is not None:
            load = self.statistics.load(out.placement.num_experts, len(per_expert))
            load += per_expert
        present = [column for column in columns if column is not None]
        width = sum(row_widths(present))
        self.statistics.count_flow(stage, begin, flow, width, _way(agreed))
        return received, self.handle(number, out, flow, src_idx, event.event), event

    def handle(
        self,
        number: int,
        out: Outgoing,
        flow: Flow,
        src_idx_N: Tensor,
        arrived: EventHandle | None,
    ) -> Handle:
        """Of dispatch `number`."""
        return Handle(
            origin=self.origin,
            call=number,
            hidden=out.x.shape[1],
            combine_dtype=out.x.dtype if out.x.dtype in validate.SUMMABLE else torch.bfloat16,
            num_channels=out.config.num_channels,
            ledger=ListedLedger(flow, out.layout.is_token_in_rank, src_idx_N),
            arrived=arrived,
        )

    def known(self, handle: Any) -> Handle:
        """The handle that a user gave. One of another Buffer may be of a dispatch that goes on on
        that Buffer's thread.
        """
        known = validate.handle(handle, self.origin)
        if known.origin.buffer != self.origin.buffer:
            known.wait()
        return known

    def number_of(self, known: Handle) -> int:
        """By which ranks compare handles."""
        return known.origin.number(known.call, self.origin)

    def dispatch_cached(
        self,
        x: Any,
        handle: Any,
        beside: Sequence[str],
        config: Any,
        previous_event: Any,
        completion: Completion,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Rows along a handle: (x, scales), without counting. `beside`: what else was given."""
        stage, begin = "cached dispatch", time.monotonic_ns()
        self._before_words()
        with self._scope(completion, previous_event):
            try:
                pending = self._pending(previous_event, completion)
                known = self.known(handle)
                validate.no_routing(beside)
                columns = validate.dispatched(x, pending, self.device)
                validate.same_tokens(columns[0], known.num_tokens)
                self.local.config(config)
                call = Call.of_rows(stage, *columns, config, handle=self.number_of(known))
                offer = self.transport.offer_dispatch(
                    known.flow, columns, known.is_token_in_rank, pending is None
                )
                terms = Terms(call, offer)
            except Exception as error:
                self.agreement.reject(stage, error)

            agreed = self.agreement.meet(stage, terms)

            (recv_x, recv_scales), move = self._send(
                columns, _rows_out(columns, known.flow, agreed, config, stage)
            )
        assert recv_x is not None
        used = [*columns, recv_x, recv_scales]
        work = partial(arrivals.receive_again, move, known.flow, (recv_x, recv_scales))
        event = self._finish(work, completion, pending, used, stage)
        present = [column for column in columns if column is not None]
        width = sum(row_widths(present))
        self.statistics.count_flow(stage, begin, known.flow, width, _way(agreed))
        return recv_x, recv_scales, event

    def combine(
        self,
        x: Any,
        handle: Any,
        topk_weights: Any,
        bias: Any,
        out: Any,
        config: Any,
        previous_event: Any,
        tag: Any,
        completion: Completion,
        heard: Heard | None = None,
        stage: str = "combine",
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The sums of each token's rows, in `out` if it is given, and of its weights. `heard` is as
        in `dispatch`.
        """
        begin = time.monotonic_ns()
        self._before_words()
        with self._scope(completion, previous_event):
            try:
                pending = self._pending(previous_event, completion)
                known = self.known(handle)
                sums = self.local.combine(x, known, topk_weights, bias, out, pending)
                self.local.config(config)
                if heard is None:
                    offer = self.transport.offer_combine(sums, known, pending is None)
                else:
                    offer = heard.offer
                terms = Terms(self._combine_call(stage, sums, known, config, tag), offer)
            except Exception as error:
                self._reject(stage, error, heard)

            agreed = self.agreement.meet(stage, terms, heard)

            move = self.transport.sum_back(
                RowsBack(sums, known, agreed.offer, agreed.offers, config, stage)
            )
        used = [tensor for one in sums for tensor in (one.rows_ND, *one.biases_TD, one.out_TD)]
        event = self._finish(move, completion, pending, used, stage)
        width = sum(row_widths([one.rows_ND for one in sums]))
        self.statistics.count_flow(stage, begin, known.flow, width, _way(agreed), back=True)
        return sums[0].out_TD, sums[1].out_TD if len(sums) > 1 else None, event

    def layout(self, topk_idx: Any, num_experts: Any, previous_event: Any) -> Layout:
        """Who gets each token. Local, so bad input raises on this rank alone."""
        try:
            wait(previous_event)
            return self.local.layout(topk_idx, num_experts)
        except ValueError as error:
            raise self.agreement.named("get_dispatch_layout", error) from None

    def combine_buffer(self, handle: Any) -> Tensor:
        """Rows for the experts' output, where combine finds them without copying."""
        try:
            known = self.known(handle)
        except ValueError as error:
            raise self.agreement.named("get_next_combine_buffer", error) from None
        if known.by_expert is not None:
            num_rows = known.by_expert.num_rows
        else:
            num_rows = known.ledger.num_rows
        return self.transport.empty(num_rows, known.hidden, known.combine_dtype)

    def replicas(self, num_experts: Any, stage: str) -> Replicas:
        """Which experts lie in each rank's slots; `stage` is what the caller is called."""
        try:
            return self.local.replicas(num_experts)
        except ValueError as error:
            raise self.agreement.named(stage, error) from None

    def place(self, placement: Placement, mark: int) -> None:
        """From now on experts live there. Ranks know the placement by its mark."""
        self.local.place(placement)
        self.statistics.forget_loads()
        self.origin = self.origin._replace(place=digest(f"{self.origin.place} {mark}"))
        if self.compiled is not None:
            self.compiled.forget()

    def refuse(self, error: Exception) -> None:
        """Meet the other ranks in whatever call they make, and make all ranks raise the error."""
        self._before_words()
        self.agreement.meet("dispatch", error)

    def close(self) -> None:
        """Wait for calls that still go on: they end, or fail, as any call does."""
        self.worker.close()
        self._wait_to_leave()
        self.failure.error = None  # whose traceback holds this engine
        self._leave()

    def abandon(self, first: Callable[[], None] | None) -> None:
        """Close a Buffer that nobody holds any more, on whatever thread, once `first` is done."""
        if os.getpid() != self._pid:  # a forked child must not touch what its parent still uses
            return

        def last() -> None:
            if first is not None and self.failure.error is None:
                first()
            self._wait_to_leave()
            self._leave()

        self.worker.close_then(last)

    def _wait_to_leave(self) -> None:
        """Others may still read what the last call has named."""
        wait, self.wait_to_leave = self.wait_to_leave, None
        if wait is not None and self.failure.error is None:
            wait()

    def _leave(self) -> None:
        self.compiled = None  # which holds this engine
        left = f"rank {self.rank} has closed its Buffer"
        self.communicator.report(PeerLeft(left, ranks=(self.rank,), stage="close"))
        self.transport.close()
        self.communicator.close()

    def _before_words(self) -> None:
        """Wait for calls that still go on, where rows and messages cannot travel at once."""
        if self.transport.moves_alone:
            self.worker.drain()

    def _scope(self, completion: Completion, previous_event: Any) -> AbstractContextManager[Any]:
        if self.streams is None:
            return _NOWHERE
        return self.streams.scope(completion, previous_event is None)

    def _pending(self, previous_event: Any, completion: Completion) -> EventHandle | None:
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

    def _reject(self, stage: str, error: Exception, heard: Heard | None) -> NoReturn:
        """Bad input. The other ranks must hear of it, unless they heard that all is well."""
        if heard is not None:
            raise error
        self.agreement.reject(stage, error)

    def _dispatch_terms(
        self, stage: str, out: Outgoing, columns: Sequence[Tensor | None], heard: Heard | None
    ) -> Terms:
        call = Call.of_rows(
            stage,
            out.x,
            out.scales,
            out.config,
            num_topk=-1 if out.topk_idx is None else out.topk_idx.shape[1],
            num_experts=out.placement.num_experts,
            tag=out.tag,
        )
        payload, counting = None, None
        if out.counted is None:
            payload = counts.tell(out.route, out.layout, out.placement, self._one_node)
        else:
            counting = counts.tell_from_device(out, out.counted, self._one_node)
        if heard is None:
            offer = self.transport.offer_dispatch(None, columns, out.layout.is_token_in_rank, True)
        else:
            offer = heard.offer
            if heard.send_counts != out.route.send_counts:
                raise RuntimeError(f"{stage}: topk_idx has changed meanwhile, on rank {self.rank}")
        return Terms(call, offer, payload, out.x.shape[0], out.num_worst_tokens, counting)

    def _combine_call(
        self, stage: str, sums: list[Sum], known: Handle, config: Config, tag: Any
    ) -> Call:
        num_topk = sums[1].rows_ND.shape[1] if len(sums) > 1 else -1
        more = {"handle": self.number_of(known), "num_topk": num_topk, "tag": validate.tag(tag)}
        return Call.of_rows(stage, sums[0].rows_ND, None, config, **more)

    def _check_worst(self, stage: str, agreed: Agreed, flow: Flow) -> None:
        """Where some rank's num_worst_tokens is too small for the worst routing, which all ranks
        can see, they ask each other whether it was too small for this one.
        """
        worst = agreed.num_worst_tokens
        if not any(worst) or not any(0 < one < agreed.num_tokens.sum() for one in worst):
            return
        mine, error = worst[self.rank], None
        if 0 < mine < flow.num_received:
            short = f"num_worst_tokens is {mine}, want at least the {flow.num_received} that arrive"
            error = self.agreement.named(stage, ValueError(short))
        self.agreement.confirm(stage, error)

    def _send(
        self, columns: Sequence[Tensor | None], rows: RowsOut
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Where the rows of each column arrive, and the move that brings them."""
        present, flow, stage, failure = rows.columns, rows.flow, rows.stage, None
        try:
            arrive, move = self.transport.send(rows)
        except MemoryError as error:
            failure = SharedMemoryError(f"{stage}: {error}, on rank {self.rank}")
        if not self.transport.offers_memory and flow.most_rows * sum(row_widths(present)) >= _LARGE:
            told = np.full((self.num_ranks, 1), NO_MEMORY if failure else 0, np.int64)
            check(self.transport.exchange(told, stage), [failure], stage, self.rank)
        if failure is not None:
            raise failure
        each = iter(arrive)
        return [None if column is None else next(each) for column in columns], move

    def _finish(
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
        """On the Buffer's thread."""
        if pending is not None:
            pending.current_stream_wait()
        begin = time.monotonic_ns()
        work()
        end = time.monotonic_ns()
        self.statistics.moved(stage, end - begin)
        if recorder.active is not None:
            self.track(recorder.active).moves.append(Span(stage, begin, end))

    def track(self, active: Recorder) -> Track:
        """This Buffer's in a trace."""
        return active.track(self.statistics, self.agreement.buffer_id, self.agreement.clocks_R)


def _rows_out(
    columns: Sequence[Tensor | None], flow: Flow, agreed: Agreed, config: Config, stage: str
) -> RowsOut:
    present = [column for column in columns if column is not None]
    return RowsOut(present, flow, agreed.offer, agreed.offers, config, stage)


def _way(agreed: Agreed) -> str:
    return GENERAL if agreed.offer.came is None else ENCLOSED
