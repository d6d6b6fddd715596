"""Rows by expert: dispatch and permute as one call, unpermute and combine as another.

Where the transport can (`Transport.pairs`), and there is much to copy, each pair's row is written
once, straight to its place. Else rows are dispatched, and then copied to their places. All ranks
take the same way: how much there was in the last calls decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine import pair_counts
from tokenyard.engine.agreement import Call, Terms
from tokenyard.engine.compiled import CompiledCalls
from tokenyard.engine.inputs import DispatchRequest, Outgoing
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.pair_counts import PairCounts
from tokenyard.engine.stages import Engine
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.kernels.base import wide_dtype
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.threads import MUCH
from tokenyard.transports import DirectPairs, Offer, PairsBack, PairsOut
from tokenyard.types import ByExpert, Config, Places, SentPairs
from tokenyard.wire.columns import row_widths
from tokenyard.wire.pairs import SHARES, UNWEIGHED, WEIGHED

_DISPATCH, _COMBINE = "dispatch by expert", "combine by expert"


class RowsByExpert(NamedTuple):
    """What dispatch_by_expert brings to one rank: M rows by (local expert, source rank, token)."""

    x: Tensor  # [M, D]
    scales: Tensor | None  # [M, S]; FP8 only
    offsets: Tensor  # [L] int32, the end of each expert's rows with their padding
    num_tokens_per_expert: list[int]  # L, padding included


def dispatch_by_expert(engine: Engine, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
    try:
        validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
        alignment = validate.alignment(request.expert_alignment)
    except ValueError as error:
        raise _refused(engine, _DISPATCH, error) from None
    pairs = engine.transport.pairs
    if pairs is None:
        return _dispatch_and_spread(engine, request, alignment)
    if pairs.large_for:
        rows, handle = _dispatch_in_one_step(engine, pairs, request)
    else:
        rows, handle = _dispatch_and_spread(engine, request, alignment)
    assert handle.by_expert is not None
    num_pairs = sum(handle.ledger.tokens_R.tolist()) * handle.by_expert.row_of.shape[1]
    pairs.learn(num_pairs * rows.x.shape[1] * rows.x.element_size())
    return rows, handle


def _dispatch_and_spread(
    engine: Engine, request: DispatchRequest, alignment: int
) -> tuple[RowsByExpert, Handle]:
    compiled, quick = engine.compiled, None
    if isinstance(compiled, CompiledCalls):
        quick = compiled.dispatch(
            request.x,
            request.topk_idx,
            request.topk_weights,
            request.num_experts,
            alignment,
            request.config,
            request.tag,
            _DISPATCH,
        )
    if quick is not None:
        x, topk_idx, topk_weights, per_expert, handle = quick
        columns = [x]
    else:
        received, handle, _ = engine.dispatch(request, Completion(), _DISPATCH)
        assert received.topk_idx is not None
        assert received.topk_weights is not None
        topk_idx, topk_weights = received.topk_idx, received.topk_weights
        per_expert = received.num_tokens_per_expert
        columns = [received.x] if received.scales is None else [received.x, received.scales]
    (x, *scales), places = _spread(engine, columns, topk_idx, per_expert, alignment)
    # A copy: the handle must not keep the memory in which the rows lie.
    kept = topk_weights.clone()
    handle.by_expert = ByExpert(num_rows=places.num_rows, row_of=places.row_of, topk_weights=kept)
    return RowsByExpert(x, scales[0] if scales else None, places.offsets, per_expert), handle


def _spread(
    engine: Engine,
    columns: Sequence[Tensor],
    topk_idx: Tensor,
    per_expert: Sequence[int],
    alignment: int,
) -> tuple[list[Tensor], Places]:
    """Each row of the columns to the places of its pairs, and where those are."""
    kernels, compiled, num_rows = engine.kernels, engine.compiled, sum(per_expert)
    x = columns[0]
    few = 0 <= num_rows * x.shape[1] * x.itemsize < MUCH  # below 0 if a rank told nonsense
    if few and len(columns) == 1 and isinstance(compiled, CompiledCalls):
        out = engine.transport.empty(num_rows, x.shape[1], x.dtype)
        found = compiled.kernels.place_and_spread(x, topk_idx, len(per_expert), alignment, out)
        if found is not None:
            return [out], found
    places, _ = kernels.place(topk_idx, len(per_expert), alignment)

    def spread(rows: Tensor) -> Tensor:
        out = engine.transport.empty(places.num_rows, rows.shape[1], rows.dtype)
        kernels.spread(as_bytes(rows), places.row_of, as_bytes(out))
        return out

    return [spread(column) for column in columns], places


def _dispatch_in_one_step(
    engine: Engine, pairs: DirectPairs, request: DispatchRequest
) -> tuple[RowsByExpert, Handle]:
    number, rank, begin = engine.agreement.number, engine.rank, time.monotonic_ns()
    try:
        out = engine.local.dispatch(request)
        terms = _dispatch_terms(out, pairs.offer())
    except Exception as error:
        engine.agreement.reject(_DISPATCH, error)
    agreed = engine.agreement.meet(_DISPATCH, terms)
    one_node = engine.topology.num_nodes == 1
    flow, counts = pair_counts.hear(agreed, out.route, out.placement, rank, one_node)
    if counts.liar >= 0:
        raise pairs.stray(counts.liar, _DISPATCH)
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
    told = agreed.offer, agreed.offers, _DISPATCH
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
    engine.statistics.count(_DISPATCH, begin, went, came, sum(row_widths(columns)))
    return rows, handle


def _dispatch_terms(out: Outgoing, offer: Offer) -> Terms:
    assert out.topk_idx is not None
    call = Call.of_rows(
        _DISPATCH,
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
    compiled = engine.compiled
    if isinstance(compiled, CompiledCalls) and type(handle) is Handle:
        share = _share_of_few(engine, compiled, y, handle, weigh, out)
        if share is not None:
            quick = compiled.combine(share, handle, out, config, tag, _COMBINE)
            if quick is not None:
                return quick
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
        raise _refused(engine, _COMBINE, error) from None
    if pairs is not None:
        return _sum_in_one_step(engine, pairs, rows, kind, known, out, config, tag)
    at_once = Completion()
    sums, *_ = engine.combine(
        rows, known, None, None, out, config, None, tag, at_once, stage=_COMBINE
    )
    return sums


def _share_of_few(
    engine: Engine, compiled: CompiledCalls, y: Any, handle: Handle, weigh: Any, out: Any
) -> Tensor | None:
    """This rank's share of each token that it got, of few contiguous rows of y; None if this is
    another call, or one with bad input.
    """
    by_expert = handle.by_expert
    if not (
        by_expert is not None
        and by_expert.sent is None
        and type(handle.ledger) is WrittenLedger
        and type(weigh) is bool
        and validate.lies_at(y, 2) != validate.NOT_PLAIN
        and y.dtype in validate.SUMMABLE
    ):
        return None
    num_rows, hidden = y.shape
    if num_rows != by_expert.num_rows or y.nbytes >= MUCH or hidden == 0:
        return None
    if out is not None and not compiled.fits(out, y, handle.num_tokens, hidden):
        return None
    row_of, weights = by_expert.row_of, by_expert.topk_weights if weigh else None
    if weights is not None and y.dtype is torch.float64:
        weights = weights.double()
    try:
        share = engine.transport.empty(row_of.shape[0], hidden, y.dtype)
    except SharedMemoryError:
        return None
    return share if compiled.kernels.sum_shares(y, row_of, weights, share) else None


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
        call = Call.of_rows(_COMBINE, rows, None, config, **more)
        terms = Terms(call, pairs.offer_back(rows, kind, known.flow))
    except Exception as error:
        engine.agreement.reject(_COMBINE, error)
    agreed = engine.agreement.meet(_COMBINE, terms)
    move = pairs.sum_back(PairsBack(rows, known.flow, by_expert.sent, agreed.offers, out, _COMBINE))
    engine.worker.drain()
    move()
    width = rows.shape[1] * rows.element_size()
    if kind == SHARES:
        engine.statistics.count_flow(_COMBINE, begin, known.flow, width, back=True)
    else:
        went, came = by_expert.sent.moved_2R
        engine.statistics.count(_COMBINE, begin, came, went, width)
    return out


def _handle(engine: Engine, handle: Any) -> tuple[Handle, ByExpert]:
    known = engine.known(handle)
    if known.by_expert is None:
        raise ValueError(
            f"handle is of dispatch call {known.call}, want one that dispatch_by_expert returned"
        )
    return known, known.by_expert


def _sum_own(engine: Engine, y_MD: Tensor, by_expert: ByExpert, weigh: bool) -> Tensor:
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
