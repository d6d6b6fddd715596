"""The four stages, written once: layout -> notify -> dispatch -> combine.

The engine alone joins kernels and transports. Every call that exchanges rows has three steps:
prepare (local, may fail), agree (all ranks go on together or all raise), move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenyard import notify, validate
from tokenyard.agreement import STAGES, Agreed, Agreement, Call, Terms
from tokenyard.kernels import Kernels
from tokenyard.memory import as_bytes
from tokenyard.topology import Placement, Topology
from tokenyard.transports import Transport
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Handle, Layout, Received, Route


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """What a user asked dispatch for, unchecked."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    num_tokens_per_rank: Any
    is_token_in_rank: Any
    num_tokens_per_expert: Any
    num_experts: Any
    expert_alignment: Any
    num_worst_tokens: Any
    config: Any
    previous_event: Any


@dataclass(frozen=True, kw_only=True)
class _Outgoing:
    """The rows of a dispatch, checked, listed and counted."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    layout: Layout
    route: Route
    placement: Placement
    expert_alignment: int
    num_worst_tokens: int
    num_channels: int
    channel_prefix: Tensor | None


class Engine:
    def __init__(
        self,
        transport: Transport,
        kernels: Kernels,
        agreement: Agreement,
        topology: Topology,
        placement: Placement | None,
        buffer_id: int,
    ) -> None:
        self.transport = transport
        self.topology = topology
        self.buffer_id = buffer_id
        self.rank, self.num_ranks = transport.rank, transport.size
        self._kernels = kernels
        self._agreement = agreement
        self._given_placement = placement
        self._even_placements: dict[int, Placement] = {}
        self._one_node = topology.num_nodes == 1
        self._numbers = torch.empty(0, 1, dtype=torch.int32)

    def layout(self, topk_idx: Any, num_experts: Any, previous_event: Any) -> Layout:
        """Who gets each token. Local, so bad input raises on this rank alone."""
        try:
            validate.previous_event(previous_event)
            return self._layout(topk_idx, num_experts)
        except ValueError as error:
            raise self._agreement.named("get_dispatch_layout", error) from None

    def dispatch(self, request: DispatchRequest) -> tuple[Received, Handle]:
        stage = "dispatch"
        call = self._agreement.number
        out, agreed = self._agreement.agree(
            stage, lambda: self._prepare_dispatch(request), self._terms
        )
        num_local = len(out.placement.experts_of_rank[self.rank])
        channels = out.num_channels if self._one_node else None
        incoming = notify.hear(agreed.payload, out.placement, num_local, channels)
        num_rows = self._num_rows(stage, agreed, sum(incoming.rows))

        token = self._token_numbers(out.x.shape[0])
        x, scales, topk_idx, topk_weights, src_idx = self._send(
            [out.x, out.scales, out.topk_idx, out.topk_weights, token],
            out.route,
            incoming.rows,
            num_rows,
            stage,
        )
        assert x is not None
        assert src_idx is not None
        if num_rows > sum(incoming.rows):
            for column in (src_idx, topk_idx):
                if column is not None:
                    column[sum(incoming.rows) :] = -1
        if topk_idx is not None:
            self._kernels.localise(topk_idx, topk_weights, out.placement.local_table(self.rank))
        aligned = -(-incoming.per_expert // out.expert_alignment) * out.expert_alignment
        received = Received(
            x=x,
            scales=scales,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            src_idx=src_idx[:, 0],
            num_tokens_per_expert=aligned.tolist(),
        )
        handle = Handle(
            buffer_id=self.buffer_id,
            call=call,
            route=out.route,
            recv_counts=incoming.rows,
            num_recv_rows=num_rows,
            hidden=out.x.shape[1],
            combine_dtype=out.x.dtype if out.x.dtype in validate.SUMMABLE else torch.bfloat16,
            num_channels=out.num_channels,
            is_token_in_rank=out.layout.is_token_in_rank,
            recv_src_idx=received.src_idx,
            counts=incoming.counts,
            channel_prefix_matrix=out.channel_prefix,
        )
        return received, handle

    def dispatch_cached(
        self, x: Any, handle: Any, beside: Sequence[str], previous_event: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rows along a handle: (x, scales), without counting. `beside`: what else was given."""
        stage = "cached dispatch"

        def prepare() -> tuple[Tensor, Tensor | None, Handle]:
            validate.previous_event(previous_event)
            known = validate.handle(handle, self.buffer_id)
            validate.require(
                not beside,
                f"{', '.join(beside)} given with a handle, which has the routing already",
            )
            values, scales = validate.dispatched(x)
            validate.require(
                values.shape[0] == known.num_tokens,
                f"x has {values.shape[0]} tokens, want {known.num_tokens}, those of the handle",
            )
            return values, scales, known

        def terms(made: tuple[Tensor, Tensor | None, Handle]) -> Terms:
            return Terms(call=_call(stage, *made[:2], handle=made[2].call))

        (values, scales, known), _ = self._agreement.agree(stage, prepare, terms)
        recv_x, recv_scales = self._send(
            [values, scales], known.route, known.recv_counts, known.num_recv_rows, stage
        )
        assert recv_x is not None
        return recv_x, recv_scales

    def combine(
        self, x: Any, handle: Any, topk_weights: Any, bias: Any, config: Any, previous_event: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The sums of each token's rows, and of its weights."""
        stage = "combine"

        def prepare() -> tuple[Tensor, Tensor | None, list[Tensor], Handle]:
            validate.previous_event(previous_event)
            known = validate.handle(handle, self.buffer_id)
            rows = validate.rows("x", x, num_rows=known.num_recv_rows, dtypes=validate.SUMMABLE)
            if config is not None:
                validate.config(config)
            weights = None
            if topk_weights is not None:
                weights = validate.topk_weights(topk_weights, [known.num_recv_rows, "topk"])
            return rows, weights, validate.biases(bias, rows, known.num_tokens), known

        def terms(made: tuple[Tensor, Tensor | None, list[Tensor], Handle]) -> Terms:
            rows, weights, _, known = made
            num_topk = -1 if weights is None else weights.shape[1]
            return Terms(call=_call(stage, rows, None, handle=known.call, num_topk=num_topk))

        (rows, weights, biases, known), _ = self._agreement.agree(stage, prepare, terms)
        num_received = sum(known.recv_counts)
        columns = [rows] if weights is None else [rows, weights]
        given_back = self.transport.give_back(
            [as_bytes(column)[:num_received] for column in columns],
            known.recv_counts,
            known.route.send_counts,
            stage,
        )
        with given_back as back:
            sums = [
                self._kernels.reduce(
                    [part.view(column.dtype) for part in parts],
                    known.route,
                    self.topology.node_of_rank,
                    biases if column is rows else [],
                    self._empty(known.num_tokens, column.shape[1], column.dtype),
                )
                for column, parts in zip(columns, back)
            ]
        return sums[0], sums[1] if weights is not None else None

    def combine_buffer(self, handle: Any) -> Tensor:
        """Rows for the experts' output, where combine finds them without copying."""
        try:
            known = validate.handle(handle, self.buffer_id)
        except ValueError as error:
            raise self._agreement.named("get_next_combine_buffer", error) from None
        return self._empty(known.num_recv_rows, known.hidden, known.combine_dtype)

    def close(self) -> None:
        self.transport.close()

    def _layout(self, topk_idx: Any, num_experts: Any) -> Layout:
        topk_idx = validate.topk_idx(topk_idx, "tokens")
        placement = self._placement(num_experts)
        nodes = None if self._one_node else self.topology.node_of_rank
        layout, first_bad = self._kernels.layout(
            topk_idx, placement.rank_of_expert, self.num_ranks, nodes
        )
        if first_bad >= 0:
            raise validate.bad_expert(topk_idx, first_bad, placement.num_experts)
        return layout

    def _token_numbers(self, num_tokens: int) -> Tensor:
        """[T, 1] int32: 0, 1, 2, ..., made anew only where there are more tokens than ever."""
        if num_tokens > self._numbers.shape[0]:
            self._numbers = torch.arange(num_tokens, dtype=torch.int32)[:, None]
        return self._numbers[:num_tokens]

    def _empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self.transport.empty(num_rows, width * dtype.itemsize).view(dtype)

    def _placement(self, num_experts: Any) -> Placement:
        given = self._given_placement
        validate.num_experts(num_experts, None if given is None else given.num_experts)
        if given is not None:
            return given
        if num_experts not in self._even_placements:
            self._even_placements[num_experts] = Placement.even(num_experts, self.num_ranks)
        return self._even_placements[num_experts]

    def _prepare_dispatch(self, request: DispatchRequest) -> _Outgoing:
        validate.previous_event(request.previous_event)
        x, scales = validate.dispatched(request.x)
        topk_idx, topk_weights = validate.topk(request.topk_idx, request.topk_weights, x.shape[0])
        alignment = validate.integer("expert_alignment", request.expert_alignment, at_least=1)
        num_worst = validate.integer("num_worst_tokens", request.num_worst_tokens, at_least=0)
        num_channels = validate.config(request.config).num_channels
        layout = validate.layout(
            request.num_tokens_per_rank,
            request.is_token_in_rank,
            request.num_tokens_per_expert,
            num_tokens=x.shape[0],
            num_ranks=self.num_ranks,
        )
        if layout is None:
            validate.require(
                topk_idx is not None and request.num_experts is not None,
                "no layout is given, want num_tokens_per_rank, is_token_in_rank and "
                "num_tokens_per_expert, or topk_idx and num_experts",
            )
            layout = self._layout(topk_idx, request.num_experts)
        else:
            validate.layout_fits(layout, topk_idx, request.num_experts)
        route = self._kernels.route(layout.is_token_in_rank)
        validate.same_counts(layout, route)
        return _Outgoing(
            x=x,
            scales=scales,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            layout=layout,
            route=route,
            placement=self._placement(layout.num_tokens_per_expert.shape[0]),
            expert_alignment=alignment,
            num_worst_tokens=num_worst,
            num_channels=num_channels,
            channel_prefix=(
                self._kernels.channel_prefix(route, num_channels) if self._one_node else None
            ),
        )

    def _terms(self, out: _Outgoing) -> Terms:
        return Terms(
            call=_call(
                "dispatch",
                out.x,
                out.scales,
                num_topk=-1 if out.topk_idx is None else out.topk_idx.shape[1],
                num_experts=out.placement.num_experts,
                num_channels=out.num_channels,
            ),
            payload=notify.tell(out.route, out.layout, out.placement, out.channel_prefix),
            num_tokens=out.x.shape[0],
            num_worst_tokens=out.num_worst_tokens,
        )

    def _num_rows(self, stage: str, agreed: Agreed, num_received: int) -> int:
        """The rows of recv_x: those that arrive, or num_worst_tokens.

        Where some rank's num_worst_tokens is too small for the worst routing, which all ranks can
        see, they ask each other whether it was too small for this one.
        """
        worst = agreed.num_worst_tokens
        if ((worst > 0) & (worst < agreed.num_tokens.sum())).any():
            mine, error = int(worst[self.rank]), None
            if 0 < mine < num_received:
                short = f"num_worst_tokens is {mine}, want at least the {num_received} that arrive"
                error = self._agreement.named(stage, ValueError(short))
            self._agreement.confirm(stage, error)
        return int(worst[self.rank]) or num_received

    def _send(
        self,
        columns: Sequence[Tensor | None],
        route: Route,
        recv_counts: Sequence[int],
        num_rows: int,
        stage: str,
    ) -> list[Tensor | None]:
        """Rows of the columns that are there, as bytes and back; zeros after those that arrive."""
        present = [as_bytes(column) for column in columns if column is not None]
        arrived = self.transport.send(present, route, recv_counts, num_rows, stage)
        if num_rows > sum(recv_counts):
            for column in arrived:
                column[sum(recv_counts) :] = 0
        each = iter(arrived)
        return [None if column is None else next(each).view(column.dtype) for column in columns]


def _call(stage: str, x: Tensor, scales: Tensor | None, **more: int) -> Call:
    return Call(
        stage=STAGES.index(stage),
        hidden=x.shape[1],
        dtype=ROW_DTYPES.index(x.dtype),
        num_scales=-1 if scales is None else scales.shape[1],
        scales_dtype=-1 if scales is None else SCALE_DTYPES.index(scales.dtype),
        **more,
    )
