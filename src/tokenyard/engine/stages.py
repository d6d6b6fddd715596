"""The four stages, written once: layout -> notify -> dispatch -> combine.

The engine alone joins kernels and transports. Every call that exchanges rows has three steps:
prepare (local, may fail), agree (all ranks go on together or all raise), move: at once, or on the
Buffer's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.comm.base import Communicator
from tokenyard.engine import counts
from tokenyard.engine.agreement import STAGES, Agreed, Agreement, Call, Terms
from tokenyard.engine.inputs import DispatchRequest, Outgoing, Preparation, wait
from tokenyard.errors import CallMismatch, PeerError, PeerLeft, SharedMemoryError
from tokenyard.kernels import Kernels
from tokenyard.runtime import memory
from tokenyard.runtime.events import EventHandle, EventOverlap, Worker
from tokenyard.runtime.streams import Finish, Streams
from tokenyard.shm.shared_rows import NO_MEMORY, check
from tokenyard.topology import Placement, Topology
from tokenyard.transports import RowsBack, RowsOut, Sum, Transport
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Config, Flow, Handle, Layout, Received

_LARGE = 32 << 20  # bytes of a result that a rank may not have: ranks ask each other first
_SMALL = 1 << 16  # bytes of a sum that are not worth a segment of shared memory


class Engine:
    def __init__(
        self,
        transport: Transport,
        communicator: Communicator,
        kernels: Kernels,
        agreement: Agreement,
        topology: Topology,
        placement: Placement | None,
        buffer_id: int,
        device: torch.device,
        streams: Streams | None,
    ) -> None:
        """`streams` is None where the tensors are on CPU; `communicator` is that of the group."""
        self.transport = transport
        self._communicator = communicator
        self.topology = topology
        self.buffer_id = buffer_id
        self.rank, self.num_ranks = transport.rank, transport.size
        self._kernels = kernels
        self._agreement = agreement
        self.worker = Worker(f"tokenyard-rank-{self.rank}", self.give_up)
        self._one_node = topology.num_nodes == 1
        nodes = None if self._one_node else topology.node_of_rank
        self._device, self._pid = device, os.getpid()
        self.streams = streams
        self.local = Preparation(kernels, self.num_ranks, nodes, placement, device)

    @property
    def failure(self) -> BaseException | None:
        """What went wrong on the Buffer's thread, if anything did."""
        return self.worker.failure

    @property
    def engaged(self) -> bool:
        """Whether this rank has begun a call that others rely on, and has not ended it."""
        return self._agreement.engaged

    def ended(self) -> None:
        """A call has ended, or goes on on the Buffer's thread."""
        self._agreement.engaged = False

    def give_up(self, error: BaseException) -> None:
        """This rank cannot end a call that others are in: tell them, so that they need not wait."""
        if isinstance(error, CallMismatch):  # they see it as this rank does
            return
        if not isinstance(error, PeerError):
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = f"rank {self.rank} gave up: {what}"
            error = PeerLeft(text, ranks=(self.rank,), stage="")
        self.transport.tell(error)

    def refuse(self, error: Exception) -> None:
        """Meet the other ranks in whatever call they make, and make all ranks raise the error."""
        self._before_words()
        self._agreement.meet("dispatch", error)

    def layout(self, topk_idx: Any, num_experts: Any, previous_event: Any) -> Layout:
        """Who gets each token. Local, so bad input raises on this rank alone."""
        try:
            wait(previous_event)
            return self.local.layout(topk_idx, num_experts)
        except ValueError as error:
            raise self._agreement.named("get_dispatch_layout", error) from None

    def dispatch(
        self, request: DispatchRequest, finish: Finish
    ) -> tuple[Received, Handle, EventOverlap]:
        with self._scope(finish, request.previous_event):
            received, handle, work, used = self._dispatch(request)
        event = self._go(work, finish, None, used)
        handle.arrived = event.event
        return received, handle, event

    def _dispatch(
        self, request: DispatchRequest
    ) -> tuple[Received, Handle, Callable[[], None], list[Tensor | None]]:
        """All but the move, and what it reads and writes."""
        stage = "dispatch"
        self._before_words()
        call = self._agreement.number
        out, agreed = self._agreement.agree(
            stage, lambda: self.local.dispatch(request), self._terms
        )
        flow, per_expert = counts.hear(
            agreed.payload,
            out.route,
            out.placement,
            self.rank,
            agreed.num_tokens,
            agreed.num_worst_tokens,
        )
        self._check_worst(stage, agreed, flow)
        columns = [
            out.x,
            out.scales,
            out.topk_idx,
            out.topk_weights,
            self.local.token_numbers(out.x.shape[0]),
        ]
        rows = self.transport.learn_route(
            _rows_out(columns, flow, agreed, out.config, stage), out.layout.is_token_in_rank
        )
        flow = rows.flow
        arrive, move = self._send(columns, rows)
        x, scales, topk_idx, topk_weights, src_idx = arrive
        assert x is not None
        assert src_idx is not None

        # A handle lives longer than rows: it must not keep the memory in which those lie.
        own_src_idx = memory.empty(flow.num_rows, dtype=src_idx.dtype, device=src_idx.device)

        def work() -> None:
            move()
            for column in (src_idx, topk_idx):
                if column is not None and flow.num_rows > flow.num_received:
                    column[flow.num_received :] = -1
            own_src_idx.copy_(src_idx[:, 0])
            if topk_idx is not None:
                self._kernels.localise(topk_idx, topk_weights, out.placement.local_table(self.rank))

        if out.expert_alignment > 1:
            per_expert = -(-per_expert // out.expert_alignment) * out.expert_alignment
        received = Received(
            x=x,
            scales=scales,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            src_idx=own_src_idx,
            num_tokens_per_expert=per_expert.tolist(),
        )
        handle = Handle(
            buffer_id=self.buffer_id,
            call=call,
            flow=flow,
            hidden=out.x.shape[1],
            combine_dtype=out.x.dtype if out.x.dtype in validate.SUMMABLE else torch.bfloat16,
            num_channels=out.config.num_channels,
            is_token_in_rank=out.layout.is_token_in_rank,
            recv_src_idx=received.src_idx,
        )
        return received, handle, work, [*columns, *arrive, own_src_idx]

    def dispatch_cached(
        self,
        x: Any,
        handle: Any,
        beside: Sequence[str],
        config: Any,
        previous_event: Any,
        finish: Finish,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Rows along a handle: (x, scales), without counting. `beside`: what else was given."""
        stage = "cached dispatch"
        self._before_words()

        def prepare() -> tuple[Tensor, Tensor | None, Handle, EventHandle | None]:
            pending = self._pending(previous_event, finish)
            known = validate.handle(handle, self.buffer_id)
            validate.require(
                not beside,
                f"{', '.join(beside)} given with a handle, which has the routing already",
            )
            values, scales = validate.dispatched(x, pending, self._device)
            validate.require(
                values.shape[0] == known.num_tokens,
                f"x has {values.shape[0]} tokens, want {known.num_tokens}, those of the handle",
            )
            self.local.config(config)
            return values, scales, known, pending

        def terms(made: tuple[Tensor, Tensor | None, Handle, EventHandle | None]) -> Terms:
            values, scales, known, _ = made
            offer = self.transport.offer_rows(known.flow, _widths((values, scales)))
            return Terms(_call(stage, values, scales, handle=known.call, **_rings(config)), offer)

        with self._scope(finish, previous_event):
            (values, scales, known, pending), agreed = self._agreement.agree(stage, prepare, terms)
            columns = [values, scales]
            (recv_x, recv_scales), move = self._send(
                columns, _rows_out(columns, known.flow, agreed, config, stage)
            )
        assert recv_x is not None
        used = [values, scales, recv_x, recv_scales]
        return recv_x, recv_scales, self._go(move, finish, pending, used)

    def combine(
        self,
        x: Any,
        handle: Any,
        topk_weights: Any,
        bias: Any,
        config: Any,
        previous_event: Any,
        tag: Any,
        finish: Finish,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The sums of each token's rows, and of its weights."""
        stage = "combine"
        self._before_words()

        def prepare() -> tuple[list[Sum], Handle, EventHandle | None]:
            pending = self._pending(previous_event, finish)
            known = validate.handle(handle, self.buffer_id)
            num_rows, num_tokens = known.flow.num_rows, known.num_tokens
            rows = validate.rows(
                "x",
                x,
                num_rows=num_rows,
                dtypes=validate.SUMMABLE,
                after=pending,
                device=self._device,
            )
            self.local.config(config)
            sums = [
                Sum(rows, validate.biases(bias, rows, num_tokens, pending), self._sum(rows, known))
            ]
            if topk_weights is not None:
                shape = (num_rows, "topk")
                weights = validate.topk_weights(topk_weights, shape, pending, self._device)
                sums.append(Sum(weights, (), self._sum(weights, known)))
            return sums, known, pending

        def terms(made: tuple[list[Sum], Handle, EventHandle | None]) -> Terms:
            sums, known, pending = made
            num_topk = sums[1].rows_ND.shape[1] if len(sums) > 1 else -1
            offer = self.transport.offer_back(
                [one.rows_ND for one in sums], known.flow, pending is None
            )
            more = {
                "handle": known.call,
                "num_topk": num_topk,
                "tag": validate.tag(tag),
                **_rings(config),
            }
            return Terms(_call(stage, sums[0].rows_ND, None, **more), offer)

        with self._scope(finish, previous_event):
            (sums, known, pending), agreed = self._agreement.agree(stage, prepare, terms)
            move = self.transport.sum_back(
                RowsBack(sums, known, agreed.offer, agreed.offers, config, stage)
            )
        used = [tensor for one in sums for tensor in (one.rows_ND, *one.biases_TD, one.out_TD)]
        event = self._go(move, finish, pending, used)
        return sums[0].out_TD, sums[1].out_TD if len(sums) > 1 else None, event

    def combine_buffer(self, handle: Any) -> Tensor:
        """Rows for the experts' output, where combine finds them without copying."""
        try:
            known = validate.handle(handle, self.buffer_id)
        except ValueError as error:
            raise self._agreement.named("get_next_combine_buffer", error) from None
        return self.transport.empty(known.flow.num_rows, known.hidden, known.combine_dtype)

    def local_experts(self, num_experts: Any) -> list[int]:
        try:
            return list(self.local.placement(num_experts).experts_of_rank[self.rank])
        except ValueError as error:
            raise self._agreement.named("get_local_experts", error) from None

    def dead_ranks(self) -> tuple[int, ...]:
        return self.transport.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self.transport.explain(stage, error)

    def close(self) -> None:
        """Calls that go on are waited for: they end, or fail, as any call does."""
        self.worker.close()
        self._leave()

    def abandon(self) -> None:
        """Close without waiting, on whatever thread: of a Buffer that nobody holds any more."""
        if os.getpid() == self._pid:  # what a forked child has is still its parent's
            self.worker.close_then(self._leave)

    def _leave(self) -> None:
        left = f"rank {self.rank} has closed its Buffer"
        self._communicator.report(PeerLeft(left, ranks=(self.rank,), stage="close"))
        self.transport.close()
        self._communicator.close()

    def _before_words(self) -> None:
        """Let the calls that go on end first, where rows and words cannot travel at once."""
        if self.transport.moves_alone:
            self.worker.drain()

    def _scope(self, finish: Finish, previous_event: Any) -> AbstractContextManager[Any]:
        if self.streams is None:
            return nullcontext()
        return self.streams.scope(finish, previous_event is None)

    def _go(
        self,
        work: Callable[[], None],
        finish: Finish,
        pending: EventHandle | None,
        used: Sequence[Tensor | None],
    ) -> EventOverlap:
        """Do the work after what is pending, and after all work before it."""
        if self.streams is not None:
            return self.streams.run(work, used, pending, finish)

        def later() -> None:
            if pending is not None:
                pending.current_stream_wait()
            work()

        if finish.async_finish:
            return EventOverlap(self.worker.submit(later))
        self.worker.drain()
        later()
        return EventOverlap(None)

    def _pending(self, previous_event: Any, finish: Finish) -> EventHandle | None:
        """What the move must wait for. An event that is over, or that nothing else could be done
        before, is settled now: that it has failed is bad input, of which all ranks hear.
        """
        pending = validate.previous_event(previous_event)
        if pending is None or self.streams is not None:
            return pending
        if finish.async_finish and not pending.is_over:
            return pending
        pending.current_stream_wait()
        return None

    def _sum(self, rows_ND: Tensor, handle: Handle) -> Tensor:
        """Memory for the sums of these rows."""
        num_tokens, width, dtype = handle.num_tokens, rows_ND.shape[1], rows_ND.dtype
        if num_tokens * width * rows_ND.element_size() < _SMALL:
            return memory.empty(num_tokens, width, dtype=dtype, device=self._device)
        return self.transport.empty(num_tokens, width, dtype)

    def _terms(self, out: Outgoing) -> Terms:
        call = _call(
            "dispatch",
            out.x,
            out.scales,
            num_topk=-1 if out.topk_idx is None else out.topk_idx.shape[1],
            num_experts=out.placement.num_experts,
            tag=out.tag,
            **_rings(out.config),
        )
        payload = counts.tell(out.route, out.layout, out.placement, self._one_node)
        offer = self.transport.offer_rows(None, ())
        return Terms(call, offer, payload, out.x.shape[0], out.num_worst_tokens)

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
            error = self._agreement.named(stage, ValueError(short))
        self._agreement.confirm(stage, error)

    def _send(
        self, columns: Sequence[Tensor | None], rows: RowsOut
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Rows of the columns that are there; zeros after those that arrive."""
        present, flow, stage, failure = rows.columns, rows.flow, rows.stage, None
        try:
            arrive, move = self.transport.send(rows)
        except MemoryError as error:
            failure = SharedMemoryError(f"{stage}: {error}, on rank {self.rank}")
        if not self.transport.offers_memory and flow.most_rows * sum(_widths(present)) >= _LARGE:
            told = np.full((self.num_ranks, 1), NO_MEMORY if failure else 0, np.int64)
            check(self.transport.exchange(told, stage), [failure], stage, self.rank)
        if failure is not None:
            raise failure

        def move_and_fill() -> None:
            move()
            for column in arrive:
                column[flow.num_received :].view(torch.uint8).zero_()

        each = iter(arrive)
        placed = [None if column is None else next(each) for column in columns]
        return placed, move_and_fill if flow.num_rows > flow.num_received else move


def _widths(columns: Sequence[Tensor | None]) -> list[int]:
    """Bytes of a row of each column that is there."""
    return [one.shape[1] * one.element_size() for one in columns if one is not None]


def _rows_out(
    columns: Sequence[Tensor | None], flow: Flow, agreed: Agreed, config: Config, stage: str
) -> RowsOut:
    present = [column for column in columns if column is not None]
    return RowsOut(present, flow, agreed.offer, agreed.offers, config, stage)


def _rings(config: Config) -> dict[str, int]:
    """What sender and receiver must divide rings by alike."""
    return {
        "num_channels": config.num_channels,
        "num_slots": config.num_max_nvl_chunked_recv_tokens,
    }


def _call(stage: str, x: Tensor, scales: Tensor | None, **more: int) -> Call:
    return Call(
        stage=STAGES.index(stage),
        hidden=x.shape[1],
        dtype=ROW_DTYPES.index(x.dtype),
        num_scales=-1 if scales is None else scales.shape[1],
        scales_dtype=-1 if scales is None else SCALE_DTYPES.index(scales.dtype),
        **more,
    )
