"""An ElasticBuffer's dispatch: compact or expanded, counted anew or along a handle."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.compat.elastic.handle import EPHandle, Kept, kept_of
from tokenyard.compat.elastic.refusal import heard_by_all, tag_means
from tokenyard.engine.engine import Engine
from tokenyard.engine.inputs import AgainRequest, DispatchRequest
from tokenyard.results import Handle, Rows
from tokenyard.runtime import memory
from tokenyard.runtime.completion import AT_ONCE
from tokenyard.types import ByExpert, Config, round_up

_DISPATCH = "dispatch"
_COLUMN_ROWS = 4  # scales by column have room for a multiple of so many rows, as TMA wants it


class Asked(NamedTuple):
    """What a user asked a new dispatch for, unchecked."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    stats: Any
    num_experts: Any
    num_max_tokens_per_rank: Any
    expert_alignment: Any
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool


class Arrived(NamedTuple):
    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


class _Rows(NamedTuple):
    """What came, and what the handle keeps of it."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor
    place_NK: Tensor
    counts_L: list[int]
    handle: Handle


def dispatch(engine: Engine, asked: Asked, config: Config, num_scaleup_ranks: int) -> Arrived:
    """Each token's row to every rank, or to every expert, that it chose."""
    with heard_by_all(engine, _DISPATCH):
        alignment = validate.alignment(asked.expert_alignment)
        num_max = _check_num_max(asked)
        _check_stats(engine, asked)
        weights = asked.topk_weights
        if weights is None:
            shape, device = asked.topk_idx.shape, asked.topk_idx.device
            weights = torch.zeros(shape, dtype=torch.float32, device=device)
    # All ranks must give the same num_max_tokens_per_rank: it travels as the tag.
    request = DispatchRequest.plain(
        asked.x, asked.topk_idx, weights, asked.num_experts, 1, config, num_max or -1
    )
    if not asked.do_cpu_sync:
        request = request._replace(num_worst_tokens=engine.num_ranks * num_max)
    with tag_means("num_max_tokens_per_rank"):
        if not asked.do_expand:
            got = _compact(engine, request)
        elif asked.do_cpu_sync:
            got = _expanded(engine, request._replace(expert_alignment=alignment))
        else:
            got = _expanded_to_the_worst(engine, request, alignment)
    ledger = got.handle.ledger
    if asked.stats is not None:
        counted = torch.tensor(got.counts_L, dtype=torch.int32, device=asked.stats.device)
        asked.stats.add_(counted)
    kept = Kept(
        handle=got.handle,
        topk_idx_TK=asked.topk_idx.clone(),
        rank_of_expert_E=engine.local.placement(asked.num_experts).rank_of_expert,
        place_NK=got.place_NK,
        counts_L=got.counts_L,
        expert_alignment=alignment,
        num_max_tokens_per_rank=num_max or int(ledger.tokens_R.max()),
        num_scaleup_ranks=num_scaleup_ranks,
        do_expand=asked.do_expand,
        num_rows=got.x.shape[0],
    )
    handle = EPHandle(
        do_expand=asked.do_expand,
        num_experts=asked.num_experts,
        expert_alignment=alignment,
        num_max_tokens_per_rank=kept.num_max_tokens_per_rank,
        num_sms=config.num_sms,
        topk_idx=asked.topk_idx.clone() if asked.do_handle_copy else asked.topk_idx,
        num_recv_tokens=ledger.num_rows,
        num_expanded_tokens=got.x.shape[0],
        num_recv_tokens_per_expert_list=kept.aligned_L() if asked.do_cpu_sync else [],
        kept=kept,
    )
    given = None if asked.topk_weights is None else got.topk_weights
    return Arrived(got.x, got.scales, got.topk_idx, given, handle)


def dispatch_again(
    engine: Engine, x: Any, topk_weights: Any, handle: Any, do_expand: bool, config: Config
) -> Arrived:
    """Rows, and weights if they are given, the way of an earlier dispatch."""
    with heard_by_all(engine, _DISPATCH):
        kept = kept_of(handle)
        validate.require(
            kept.do_expand or not do_expand,
            "do_expand is True and the handle is compact, want that of an expanded dispatch",
        )
        rows, scales = validate.dispatched(x, device=engine.transport.device)
        columns = _beside(engine, rows, scales, topk_weights, kept)
        # Expanded rows lie in memory that is taken before others rely on this rank.
        room = [
            engine.transport.empty(kept.num_rows, one.shape[1], one.dtype)
            for one in (rows, scales)
            if do_expand and one is not None
        ]
    request = AgainRequest(columns, kept.handle, config)
    recv_x, beside, _ = engine.calls.dispatch_again(request, AT_ONCE)
    num_scales = 0 if scales is None else scales.shape[1]
    scales, weights = beside, None
    if beside is not None and topk_weights is not None:
        scales = beside[:, :num_scales].contiguous() if num_scales else None
        came = beside[:, num_scales:].contiguous().view(torch.float32)
        weights = torch.where(kept.place_NK >= 0, came, 0.0)
    if not do_expand:
        topk_idx = None if kept.do_expand else kept.place_NK.clone()
        return Arrived(recv_x, scales, topk_idx, weights, handle)
    place = kept.place_NK
    return Arrived(
        _spread(engine, recv_x, place, room[0]),
        None if scales is None else _spread(engine, scales, place, room[1]),
        None,
        None if weights is None else _one_by_row(weights, place, kept.num_rows),
        handle,
    )


def by_column(scales: Tensor) -> Tensor:
    """Lay scales out one column after the other, each with room for a multiple of 4 rows.

    >>> by_column(torch.ones(5, 2)).stride()
    (1, 8)
    """
    num_rows, num_scales = scales.shape
    room = scales.new_zeros(num_scales, round_up(num_rows, _COLUMN_ROWS))
    columns = room.t()[:num_rows]
    columns.copy_(scales)
    return columns


def _check_num_max(asked: Asked) -> int:
    num_max = validate.integer("num_max_tokens_per_rank", asked.num_max_tokens_per_rank, at_least=0)
    validate.require(
        num_max > 0 or asked.do_cpu_sync,
        "num_max_tokens_per_rank is 0, want how many tokens a rank may have, since do_cpu_sync is "
        "False",
    )
    validate.require(
        isinstance(asked.topk_idx, Tensor),
        f"topk_idx is {validate.kind(asked.topk_idx)}, want a torch.Tensor, or a handle",
    )
    num_tokens = asked.topk_idx.shape[0]
    if 0 < num_max < num_tokens:
        raise ValueError(
            f"x has {num_tokens} tokens, want at most num_max_tokens_per_rank={num_max}"
        )
    return num_max


def _check_stats(engine: Engine, asked: Asked) -> None:
    stats = asked.stats
    if stats is None:
        return
    own = engine.local.placement(asked.num_experts).experts_of_rank[engine.rank]
    want = f"want an int32 tensor of {len(own)} numbers, one a local expert"
    validate.require(
        isinstance(stats, Tensor) and stats.dtype == torch.int32 and stats.shape == (len(own),),
        f"cumulative_local_expert_recv_stats is {validate.kind(stats)}, {want}",
    )


def _compact(engine: Engine, request: DispatchRequest) -> _Rows:
    got, handle, _ = engine.calls.dispatch(request, AT_ONCE, _DISPATCH)
    assert got.topk_idx is not None
    assert got.topk_weights is not None
    # A copy: the handle must not keep the memory in which the rows lie, and users may write there.
    place, counts = got.topk_idx.clone(), got.num_tokens_per_expert
    return _Rows(got.x, got.scales, got.topk_idx, got.topk_weights, place, counts, handle)


def _expanded(engine: Engine, request: DispatchRequest) -> _Rows:
    got, handle = engine.calls.dispatch_by_expert(request)
    by_expert = handle.by_expert
    assert by_expert is not None
    counts = got.num_tokens_per_expert
    if request.expert_alignment > 1:
        counts = _count(by_expert.row_of, got.offsets)
    weights = _one_by_row(by_expert.topk_weights, by_expert.row_of, by_expert.num_rows)
    return _Rows(got.x, got.scales, None, weights, by_expert.row_of, counts, handle)


def _expanded_to_the_worst(engine: Engine, request: DispatchRequest, alignment: int) -> _Rows:
    """Dispatch with as many rows as could come, however many do."""
    got, handle, _ = engine.calls.dispatch(request, AT_ONCE, _DISPATCH)
    assert got.topk_idx is not None
    assert got.topk_weights is not None
    counts = got.num_tokens_per_expert
    places, _ = engine.kernels.place(got.topk_idx, len(counts), alignment)
    most = got.x.shape[0] * min(got.topk_idx.shape[1], len(counts)) + (alignment - 1) * len(counts)
    # A token that names an expert twice, as dummy batches of zeros do, may need more.
    num_rows = max(round_up(most, alignment), places.num_rows)

    def placed(rows: Tensor) -> Tensor:  # zeros that nobody reads take no memory
        size = num_rows * rows.shape[1] * rows.element_size()
        room = torch.zeros(size, dtype=torch.uint8, device=rows.device)
        out = room.view(rows.dtype).view(num_rows, rows.shape[1])
        _spread(engine, rows, places.row_of, out[: places.num_rows])
        return out

    weights = _one_by_row(got.topk_weights, places.row_of, num_rows)
    handle.by_expert = ByExpert(
        num_rows=num_rows, row_of=places.row_of, topk_weights=got.topk_weights.clone()
    )
    scales = None if got.scales is None else placed(got.scales)
    return _Rows(placed(got.x), scales, None, weights, places.row_of, counts, handle)


def _spread(engine: Engine, rows: Tensor, row_of: Tensor, out: Tensor) -> Tensor:
    """Each row at its places of `out`, zeros elsewhere."""
    engine.kernels.spread(memory.as_bytes(rows), row_of, memory.as_bytes(out))
    return out


def _one_by_row(weights_NK: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    """[M]: the weight of each expanded row, 0.0 in padding."""
    out = weights_NK.new_zeros(num_rows + 1)
    out[row_of.flatten()] = weights_NK.flatten()  # -1 finds the last, which is cut off
    return out[:num_rows]


def _count(row_of: Tensor, offsets: Tensor) -> list[int]:
    rows = row_of[row_of >= 0]
    experts = torch.bucketize(rows, offsets.long(), right=True)
    return torch.bincount(experts, minlength=len(offsets)).tolist()


def _beside(
    engine: Engine, rows: Tensor, scales: Tensor | None, topk_weights: Any, kept: Kept
) -> Rows:
    """Rows with the weights as further scales, so that both travel at once."""
    if topk_weights is None:
        return rows if scales is None else (rows, scales)
    shape = kept.topk_idx_TK.shape
    weights = validate.topk_weights(topk_weights, shape, device=engine.transport.device)
    if scales is None:
        return rows, weights
    return rows, torch.cat([scales, weights.view(scales.dtype)], 1)
