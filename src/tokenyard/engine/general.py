"""Calls on any transport, step by step: layout -> notify -> dispatch -> combine.

Every call that exchanges rows has three steps:

    prepare   check the input and count its rows; local, so it may fail on one rank alone
    agree     tell the other ranks; all go on together, or all raise
    move      give results their memory; rows move at once, or on the Buffer's thread
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
from torch import Tensor

from tokenyard import validate
from tokenyard.engine import arrivals, by_expert, counts
from tokenyard.engine.agreement import Agreed, Call, Heard, Terms
from tokenyard.engine.by_expert import RowsByExpert
from tokenyard.engine.core import Core
from tokenyard.engine.inputs import AgainRequest, Checked, CombineRequest, Counted, DispatchRequest
from tokenyard.engine.statistics import ENCLOSED, GENERAL
from tokenyard.errors import SharedMemoryError
from tokenyard.results import Handle, ListedLedger
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.events import EventOverlap
from tokenyard.shm.shared_rows import check
from tokenyard.transports import RowsBack, RowsOut
from tokenyard.types import Config, Flow, Received
from tokenyard.wire.columns import row_widths
from tokenyard.wire.message import NO_MEMORY

_LARGE = 32 << 20  # bytes of a result that a rank may not have: ranks ask each other first


class GeneralCalls:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._one_node = core.topology.num_nodes == 1

    def dispatch(
        self,
        request: DispatchRequest,
        completion: Completion,
        stage: str,
        heard: Heard | None = None,
    ) -> tuple[Received, Handle, EventOverlap]:
        """Each token's row to every rank that owns one of its experts.

        `heard` if a compiled call has got as far as the agreement, and could not go on.
        """
        core, agreement = self._core, self._core.agreement
        begin = time.monotonic_ns()
        core.before_words()
        with core.scope(completion, request.previous_event):
            try:
                given = core.local.check(request)
                number = agreement.number
                counted = core.local.count(given)
                numbers = core.local.token_numbers(given.x.shape[0])
                columns = [given.x, given.scales, given.topk_idx, given.topk_weights, numbers]
                terms = self._dispatch_terms(stage, given, counted, columns, heard)
                terms = terms._replace(call=terms.call._replace(**request.also))
            except Exception as error:
                self._reject(stage, error, heard)

            agreed = agreement.meet(stage, terms, heard)
            route, rank = counted.route, core.rank
            if counted.on_device is not None and agreed.numbers is not None:
                route = counted.on_device.settle(agreed.numbers)
            flow, per_expert = counts.hear(agreed, route, given.placement, rank)
            self._check_worst(stage, agreed, flow)

            marks_TR = counted.layout.is_token_in_rank.clone()  # a user may have given it
            rows = core.transport.learn_route(
                _rows_out(columns, flow, agreed, given.config, stage), marks_TR
            )
            flow = rows.flow
            arrive, move = self._send(columns, rows)
            received, src_idx = arrivals.received(given, flow, arrive, per_expert)
        work = partial(
            arrivals.receive, move, flow, arrive, core.kernels, given.placement, rank, src_idx
        )
        event = core.finish(work, completion, None, [*columns, *arrive, src_idx], stage)
        if given.topk_idx is not None:
            load = core.statistics.load(given.placement)
            load += per_expert
        present = [column for column in columns if column is not None]
        width = sum(row_widths(present))
        core.statistics.count_flow(stage, begin, flow, width, _way(agreed))
        ledger = ListedLedger(flow, marks_TR, src_idx)
        return received, core.handle(number, given, ledger, event.event), event

    def dispatch_again(
        self, request: AgainRequest, completion: Completion
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Rows along a handle: (x, scales), without counting."""
        core, stage, begin = self._core, "cached dispatch", time.monotonic_ns()
        config = request.config
        core.before_words()
        with core.scope(completion, request.previous_event):
            try:
                pending = core.pending(request.previous_event, completion)
                columns, known = core.check_again(request, pending)
                call = Call.of_rows(stage, *columns, config, handle=core.number_of(known))
                offer = core.transport.offer_dispatch(
                    known.flow, columns, known.ledger.is_token_in_rank, pending is None
                )
                terms = Terms(call, offer)
            except Exception as error:
                core.agreement.reject(stage, error)

            agreed = core.agreement.meet(stage, terms)

            (recv_x, recv_scales), move = self._send(
                columns, _rows_out(columns, known.flow, agreed, config, stage)
            )
        assert recv_x is not None
        work = partial(arrivals.receive_again, move, known.flow, (recv_x, recv_scales))
        used = [*columns, recv_x, recv_scales]
        event = core.finish(work, completion, pending, used, stage)
        present = [column for column in columns if column is not None]
        width = sum(row_widths(present))
        core.statistics.count_flow(stage, begin, known.flow, width, _way(agreed))
        return recv_x, recv_scales, event

    def combine(
        self,
        request: CombineRequest,
        completion: Completion,
        stage: str,
        heard: Heard | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The sums of each token's rows, in `out` if it is given, and of its weights. `heard` is as
        in `dispatch`.
        """
        core, begin = self._core, time.monotonic_ns()
        config = request.config
        core.before_words()
        with core.scope(completion, request.previous_event):
            try:
                pending = core.pending(request.previous_event, completion)
                known = core.known(request.handle)
                sums = core.local.combine(request, known, pending)
                core.local.config(config)
                if heard is None:
                    offer = core.transport.offer_combine(sums, known, pending is None)
                else:
                    offer = heard.offer
                call = core.combine_call(stage, sums, known, config, request.tag)
                terms = Terms(call, offer)
            except Exception as error:
                self._reject(stage, error, heard)

            agreed = core.agreement.meet(stage, terms, heard)

            move = core.transport.sum_back(
                RowsBack(sums, known, agreed.offer, agreed.offers, config, stage)
            )
        used = [tensor for one in sums for tensor in (one.rows_ND, *one.biases_TD, one.out_TD)]
        event = core.finish(move, completion, pending, used, stage)
        width = sum(row_widths([one.rows_ND for one in sums]))
        core.statistics.count_flow(stage, begin, known.flow, width, _way(agreed), back=True)
        return sums[0].out_TD, sums[1].out_TD if len(sums) > 1 else None, event

    def dispatch_by_expert(self, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
        return by_expert.dispatch_and_spread(self._core, self.dispatch, request)

    def combine_by_expert(self, request: CombineRequest, weigh: Any) -> Tensor:
        return by_expert.share_and_combine(self._core, self.combine, request, weigh)

    def forget(self) -> None:
        """The placement has changed."""

    def wait_to_leave(self) -> None:
        """Wait before memory is unmade that other ranks may still read."""

    def _reject(self, stage: str, error: Exception, heard: Heard | None) -> NoReturn:
        """Bad input. The other ranks must hear of it, unless they heard that all is well."""
        if heard is not None:
            raise error
        self._core.reject(stage, error)

    def _dispatch_terms(
        self,
        stage: str,
        given: Checked,
        counted: Counted,
        columns: Sequence[Tensor | None],
        heard: Heard | None,
    ) -> Terms:
        call = Call.of_rows(
            stage,
            given.x,
            given.scales,
            given.config,
            num_topk=-1 if given.topk_idx is None else given.topk_idx.shape[1],
            num_experts=given.placement.num_experts,
            tag=given.tag,
        )
        payload, counting = None, None
        if counted.on_device is None:
            payload = counts.tell(counted.route, counted.layout, given.placement, self._one_node)
        else:
            counting = counts.tell_from_device(given, counted.on_device, self._one_node)
        if heard is None:
            marks_TR = counted.layout.is_token_in_rank
            offer = self._core.transport.offer_dispatch(None, columns, marks_TR, True)
        else:
            offer = heard.offer
            if heard.send_counts != counted.route.send_counts:
                raise RuntimeError(
                    f"{stage}: topk_idx has changed meanwhile, on rank {self._core.rank}"
                )
        return Terms(call, offer, payload, given.x.shape[0], given.num_worst_tokens, counting)

    def _check_worst(self, stage: str, agreed: Agreed, flow: Flow) -> None:
        """Where some rank's num_worst_tokens is too small for the worst routing, which all ranks
        can see, they ask each other whether it was too small for this one.
        """
        worst, core = agreed.num_worst_tokens, self._core
        if not any(worst) or not any(0 < one < agreed.num_tokens.sum() for one in worst):
            return
        mine, error = worst[core.rank], None
        if 0 < mine < flow.num_received:
            error = core.agreement.named(stage, validate.too_few_rows(mine, flow.num_received))
        core.agreement.confirm(stage, error)

    def _send(
        self, columns: Sequence[Tensor | None], rows: RowsOut
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        """Where the rows of each column arrive, and the move that brings them."""
        present, flow, stage, failure = rows.columns, rows.flow, rows.stage, None
        transport, rank = self._core.transport, self._core.rank
        try:
            arrive, move = transport.send(rows)
        except MemoryError as error:
            failure = SharedMemoryError(f"{stage}: {error}, on rank {rank}")
        if not transport.offers_memory and flow.most_rows * sum(row_widths(present)) >= _LARGE:
            told = np.full((self._core.num_ranks, 1), NO_MEMORY if failure else 0, np.int64)
            check(transport.exchange(told, stage), [failure], stage, rank)
        if failure is not None:
            raise failure
        each = iter(arrive)
        return [None if column is None else next(each) for column in columns], move


def _rows_out(
    columns: Sequence[Tensor | None], flow: Flow, agreed: Agreed, config: Config, stage: str
) -> RowsOut:
    present = [column for column in columns if column is not None]
    return RowsOut(present, flow, agreed.offer, agreed.offers, config, stage)


def _way(agreed: Agreed) -> str:
    return GENERAL if agreed.offer.came is None else ENCLOSED
