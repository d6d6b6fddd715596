"""Rows by expert: dispatch and permute as one call, unpermute and combine as another.

Where all ranks share memory, few rows travel in parcels (`engine.parcels`), and of many rows each
pair's is written once, straight to its place. Elsewhere rows are dispatched, and then copied to
their places. What all ranks have told of this call decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine import pair_counts
from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.compiled import CompiledCalls
from tokenyard.engine.inputs import DispatchRequest, Outgoing
from tokenyard.engine.pair_counts import PairCounts
from tokenyard.engine.parcels import COMBINE, RowsByExpert
from tokenyard.engine.plans import BY_EXPERT
from tokenyard.engine.stages import Engine
from tokenyard.handle import Handle
from tokenyard.kernels.base import wide_dtype
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.memory import as_bytes
from tokenyard.transports import DirectPairs, Offer, PairsBack, PairsOut
from tokenyard.types import ByExpert, Config, KnownPairs, SentPairs
from tokenyard.wire.columns import row_widths
from tokenyard.wire.pairs import SHARES, UNWEIGHED, WEIGHED


def dispatch_by_expert(engine: Engine, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
    pairs = engine.transport.pairs
    if isinstance(engine.compiled, CompiledCalls):
        found = engine.compiled.by_expert.dispatch(request)
        if found is not None:
            return found
    try:
        validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
        alignment = validate.alignment(request.expert_alignment)
    except ValueError as error:
        raise _refused(engine, BY_EXPERT, error) from None
    if pairs is None:
        return _dispatch_and_spread(engine, request, alignment)
    return dispatch_in_one_step(engine, request)


def _dispatch_and_spread(
    engine: Engine, request: DispatchRequest, alignment: int
) -> tuple[RowsByExpert, Handle]:
    received, handle, _ = engine.dispatch(request, Completion(), BY_EXPERT)
    assert received.topk_idx is not None
    assert received.topk_weights is not None
    kernels, per_expert = engine.kernels, received.num_tokens_per_expert
    places, _ = kernels.place(received.topk_idx, len(per_expert), alignment)

    def spread(rows: Tensor) -> Tensor:
        out = engine.transport.empty(places.num_rows, rows.shape[1], rows.dtype)
        kernels.spread(as_bytes(rows), places.row_of, as_bytes(out))
        return out

    x, scales = spread(received.x), received.scales
    # A copy: the handle must not keep the memory in which the rows lie.
    kept = received.topk_weights.clone()
    handle.by_expert = ByExpert(num_rows=places.num_rows, row_of=places.row_of, topk_weights=kept)
    came = None if scales is None else spread(scales)
    return RowsByExpert(x, came, places.offsets, per_expert), handle


def dispatch_in_one_step(engine: Engine, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
    """Each pair's row is written once, straight to its place: what pays for many rows."""
    pairs = engine.transport.pairs
    assert pairs is not None
    number, rank, begin = engine.agreement.number, engine.rank, time.monotonic_ns()
    try:
        out = engine.local.dispatch(request)
        terms = _dispatch_terms(out, pairs.offer())
    except Exception as error:
        engine.agreement.reject(BY_EXPERT, error)
    agreed = engine.agreement.meet(BY_EXPERT, terms)
    one_node = engine.topology.num_nodes == 1
    flow, counts = pair_counts.hear(agreed, out.route, out.placement, rank, one_node)
    if counts.liar >= 0:
        raise pairs.stray(counts.liar, BY_EXPERT)
    assert out.topk_idx is not None
    assert out.topk_weights is not None
    place_TK, rank_TK = pairs.place(out.topk_idx, out.placement.rank_of_expert, counts.first_E)
    sent = SentPairs(
        place_TK=place_TK,
        rank_TK=rank_TK,
        topk_weights_TK=out.topk_weights.clone(),  # the user may change his own
        rows_R=counts.pair_rows_R,
        moved_2R=counts.moved_2R,
    )
    columns = [out.x] if out.scales is None else [out.x, out.scales]
    known = [out.topk_idx, out.topk_weights, engine.local.token_numbers(out.x.shape[0])]
    told = agreed.offer, agreed.offers, BY_EXPERT
    (x, *scales), (topk_idx, topk_weights, src_idx), move = pairs.send(
        PairsOut(columns, known, flow, counts.sent_RR, sent, *told)
    )
    engine.worker.drain()
    move()
    _zero_padding(counts, [x, *scales])
    engine.kernels.localise(topk_idx, topk_weights, out.placement.local_table(rank))
    places, _ = engine.kernels.place(topk_idx, len(counts.ends_L), out.expert_alignment)
    per_expert = [end - begin for begin, end in pairwise((0, *counts.ends_L))]
    handle = engine.handle(number, out, flow, src_idx[:, 0].clone(), None)
    handle.by_expert = ByExpert(
        num_rows=places.num_rows,
        row_of=places.row_of,
        # A copy: the handle must not keep the memory in which the rows lie.
        topk_weights=topk_weights.clone(),
        sent=sent,
    )
    rows = RowsByExpert(
        x=x,
        scales=scales[0] if scales else None,
        offsets=places.offsets,
        num_tokens_per_expert=per_expert,
    )
    load = engine.statistics.load(out.placement.num_experts, len(counts.counts_L))
    load += np.array(counts.counts_L, np.int64)  # a rank may have no experts
    went, came = counts.moved_2R
    engine.statistics.count(BY_EXPERT, begin, went, came, sum(row_widths(columns)))
    return rows, handle


def _dispatch_terms(out: Outgoing, offer: Offer) -> Terms:
    assert out.topk_idx is not None
    call = Call.of_rows(
        BY_EXPERT,
        out.x,
        out.scales,
        out.config,
        num_topk=out.topk_idx.shape[1],
        num_experts=out.placement.num_experts,
        tag=out.tag,
    )
    payload = pair_counts.tell(out.route, out.layout, out.expert_alignment)
    return Terms(call, offer, payload, out.x.shape[0])


def _zero_padding(counts: PairCounts, columns: Sequence[Tensor]) -> None:
    """The rows after each expert's own."""
    begin = 0
    for end, count in zip(counts.ends_L, counts.counts_L):
        if begin + count < end:
            for column in columns:
                column[begin + count : end].view(torch.uint8).zero_()
        begin = end


def combine_by_expert(
    engine: Engine, y: Any, handle: Any, weigh: Any, out: Any, config: Config, tag: Any
) -> Tensor:
    if isinstance(engine.compiled, CompiledCalls) and type(handle) is Handle:
        sums = engine.compiled.by_expert.combine(y, handle, weigh, out, config, tag)
        if sums is not None:
            return sums
    try:
        known, by_expert = _handle(engine, handle)
        rows = validate.rows(
            "y",
            y,
            num_rows=by_expert.num_rows,
            dtypes=validate.SUMMABLE,
            device=engine.transport.device,
        )
        validate.switch("weigh", weigh)
        if out is not None:
            out = validate.out(out, known.num_tokens, rows, [rows])
        pairs = None if by_expert.sent is None else engine.transport.pairs
        if pairs is not None and pairs.lies_here(rows):
            kind = WEIGHED if weigh else UNWEIGHED
        else:
            rows, kind = _sum_own(engine, rows, by_expert, weigh), SHARES
    except Exception as error:
        raise _refused(engine, COMBINE, error) from None
    if pairs is not None:
        return _sum_in_one_step(engine, pairs, rows, kind, known, out, config, tag)
    at_once = Completion()
    sums, *_ = engine.combine(
        rows, known, None, None, out, config, None, tag, at_once, stage=COMBINE
    )
    return sums


def _sum_in_one_step(
    engine: Engine,
    pairs: DirectPairs,
    rows: Tensor,
    kind: int,
    known: Handle,
    out: Tensor | None,
    config: Config,
    tag: Any,
) -> Tensor:
    """Sums of rows in shared memory, of this kind (`wire.pairs`)."""
    by_expert = known.by_expert
    assert by_expert is not None
    assert by_expert.sent is not None
    begin = time.monotonic_ns()
    try:
        if out is None:
            out = engine.local.empty_sum(rows, known.num_tokens)
        more = {"handle": engine.number_of(known), "tag": validate.tag(tag)}
        call = Call.of_rows(COMBINE, rows, None, config, **more)
        terms = Terms(call, pairs.offer_back(rows, kind, known.flow))
    except Exception as error:
        engine.agreement.reject(COMBINE, error)
    agreed = engine.agreement.meet(COMBINE, terms)
    move = pairs.sum_back(PairsBack(rows, known.flow, by_expert.sent, agreed.offers, out, COMBINE))
    engine.worker.drain()
    move()
    width = rows.shape[1] * rows.element_size()
    if kind == SHARES:
        engine.statistics.count_flow(COMBINE, begin, known.flow, width, back=True)
    else:
        went, came = by_expert.sent.moved_2R
        engine.statistics.count(COMBINE, begin, came, went, width)
    return out


def _handle(engine: Engine, handle: Any) -> tuple[Handle, KnownPairs]:
    known = engine.known(handle)
    if known.by_expert is None:
        raise ValueError(
            f"handle is of dispatch call {known.call}, want one that dispatch_by_expert returned"
        )
    return known, known.by_expert


def _sum_own(engine: Engine, y_MD: Tensor, by_expert: KnownPairs, weigh: bool) -> Tensor:
    """[N, D]: this rank's share of each token that it got, where combine need not copy it."""
    row_of = by_expert.row_of
    share = engine.transport.empty(row_of.shape[0], y_MD.shape[1], y_MD.dtype)
    weights = by_expert.topk_weights.to(wide_dtype(y_MD.dtype)) if weigh else None
    engine.kernels.unpermute(y_MD, row_of, weights, share)
    return share


def _refused(engine: Engine, stage: str, error: Exception) -> Exception:
    """All ranks raise: this one the error, the others PeerInputError."""
    engine.refuse(engine.agreement.named(stage, error))
    return AssertionError("a refusal raises")
