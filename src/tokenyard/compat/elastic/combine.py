"""An ElasticBuffer's combine: the sums of a token's rows by top-k lane, and its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.compat.elastic.domains import Domains
from tokenyard.compat.elastic.handle import Kept, kept_of
from tokenyard.compat.elastic.refusal import heard_by_all, tag_means
from tokenyard.engine.engine import Engine
from tokenyard.engine.homeward import bring_home, pick, sum_by_lane
from tokenyard.engine.inputs import CombineRequest
from tokenyard.runtime.completion import AT_ONCE
from tokenyard.types import Config

_COMBINE = "combine"


def combine(
    engine: Engine,
    x: Any,
    handle: Any,
    topk_weights: Any,
    bias: Any,
    config: Config,
    domains: Domains,
    allow_multiple_reduction: bool,
) -> tuple[Tensor, Tensor | None]:
    """[T, D], and [T, K] if weights are given."""
    with heard_by_all(engine, _COMBINE):
        kept = kept_of(handle)
        at_once = kept.do_expand and not allow_multiple_reduction
        by_node = domains.node_of_rank is not None
        at_home = at_once or by_node or not kept.list_by_lane(engine.transport)
    if at_home:
        return _sum_at_home(engine, x, kept, topk_weights, bias, config, domains, at_once)
    known = kept.handle
    if topk_weights is None and bias is None and kept.do_expand:
        request = CombineRequest.plain(x, known, None, config, -1)
        return engine.calls.combine_by_expert(request, False), None
    with heard_by_all(engine, _COMBINE):
        weights = _weights(engine, topk_weights, kept)
        rows = _shares(engine, x, kept) if kept.do_expand else x
    request = CombineRequest(rows, known, weights, bias, None, config, None, -1)
    sums, picked, _ = engine.calls.combine(request, AT_ONCE, _COMBINE)
    return sums, picked


def _sum_at_home(
    engine: Engine,
    x: Any,
    kept: Kept,
    topk_weights: Any,
    bias: Any,
    config: Config,
    domains: Domains,
    at_once: bool,
) -> tuple[Tensor, Tensor | None]:
    """`at_once`: all expanded rows travel, and each token's are summed in one go."""
    with heard_by_all(engine, _COMBINE):
        flow, lanes = kept.handle.flow, kept.lanes
        weights = _weights(engine, topk_weights, kept)
        rows = (
            _shares(engine, x, kept) if kept.do_expand and not at_once else _rows(engine, x, kept)
        )
        biases = validate.biases(bias, rows, kept.handle.num_tokens, None)
        counts = flow.recv_counts
        place = kept.place_NK[: flow.num_received]
        if at_once:
            own = place >= 0
            rows = rows[place[own]]
            weights = None if weights is None else weights[: flow.num_received][own][:, None]
            counts = tuple(int(part.sum()) for part in own.split(list(counts)))
            chosen = lanes.rank_TK >= 0
        else:
            rows = rows[: flow.num_received]
            weights = None if weights is None else weights[: flow.num_received]
            chosen = lanes.is_last_TK
    with tag_means("the handle (by the number of the call that made it)"):
        home, beside = bring_home(engine, rows, weights, counts, config, kept.handle.call)
    row_TK = lanes.home_rows(chosen)
    sums = sum_by_lane(engine, home, row_TK, lanes, domains.node_of_rank, biases)
    if beside is None:
        return sums, None
    if not at_once:
        return sums, pick(beside, lanes)
    found = torch.cat([beside.flatten(), beside.new_zeros(1)])[row_TK]  # -1 finds the 0.0
    return sums, 0.0 + found


def _rows(engine: Engine, x: Any, kept: Kept) -> Tensor:
    return validate.rows(
        "x",
        x,
        num_rows=kept.num_rows,
        dtypes=validate.SUMMABLE,
        device=engine.transport.device,
    )


def _shares(engine: Engine, x: Any, kept: Kept) -> Tensor:
    """[N, D]: this rank's sum for each token that it got, by ascending lane."""
    rows = _rows(engine, x, kept)
    out = engine.transport.empty(kept.place_NK.shape[0], rows.shape[1], rows.dtype)
    engine.kernels.unpermute(rows, kept.place_NK, None, out)
    return out


def _weights(engine: Engine, topk_weights: Any, kept: Kept) -> Tensor | None:
    """[N, K], 0.0 where another rank has the expert; given so, or [M] if expanded."""
    if topk_weights is None:
        return None
    place, device = kept.place_NK, engine.transport.device
    own = place >= 0
    if not kept.do_expand:
        given = validate.topk_weights(topk_weights, place.shape, device=device)
        return torch.where(own, given, 0.0)
    given = validate.tensor(
        "topk_weights", topk_weights, shape=(kept.num_rows,), dtypes=(torch.float32,), device=device
    )
    return torch.where(own, torch.cat([given, given.new_zeros(1)])[place], 0.0)
