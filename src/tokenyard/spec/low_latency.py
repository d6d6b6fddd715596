"""The low-latency mode, of all ranks at once: fixed slots for every expert, no counting round.

A token is copied once for each expert that it chose. Every expert has R * num_max slots, enough for
all that R ranks may send it, so rows can move before anybody knows counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.spec.exchange import World
from tokenyard.spec.local import cast_to_fp8
from tokenyard.spec.logfmt import logfmt


@dataclass(frozen=True, kw_only=True, eq=False)
class LowLatencyReceived:
    """What one rank gets. The rows of a local expert fill its first `count` slots, ordered by
    (source rank, token).

    In the other slots x and scales are 0 here, and src_info is -1. Real results leave them
    unspecified.
    """

    x: Tensor  # [L, R * num_max, D]
    scales: Tensor | None  # [L, R * num_max, D / 128] float32, or D / 512 packed int32; FP8 only
    count: Tensor  # [L] int32
    src_info: Tensor  # [L, R * num_max] int32, the token's index on its source rank
    layout_range: Tensor  # [L, R] int64, begin << 32 | count of the rows from each source rank


def low_latency_dispatch(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    world: World,
    num_max: int,
    *,
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> list[LowLatencyReceived]:
    """One copy for each (token, k) that is not -1. The last two options need use_fp8.

    Expert 0 is on rank 0, experts 1 and 2 are on rank 1; a rank may send 2 tokens:

    >>> world = World(rank_of_expert=(0, 1, 1), node_of_rank=(0, 0))
    >>> xs = [torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0]])]
    >>> topk_idxs = [torch.tensor([[2, 0], [-1, 2]]), torch.tensor([[2, 1]])]
    >>> first, second = low_latency_dispatch(xs, topk_idxs, world, num_max=2)
    >>> first.x.flatten(1).tolist(), first.count.tolist()
    ([[10.0, 0.0, 0.0, 0.0]], [1])
    >>> second.x.flatten(1).tolist(), second.count.tolist()
    ([[20.0, 0.0, 0.0, 0.0], [10.0, 11.0, 20.0, 0.0]], [1, 3])
    >>> second.src_info.tolist()
    [[0, -1, -1, -1], [0, 1, 0, -1]]
    >>> [divmod(r, 2**32) for r in second.layout_range[1].tolist()]  # two rows from 0, one from 2
    [(0, 2), (2, 1)]
    """
    _check(topk_idxs, num_max)
    rows: list[Tensor] = list(xs)
    scales: list[Tensor] | None = None
    if use_fp8:
        cast = [cast_to_fp8(x, round_scale=round_scale, use_ue8m0=use_ue8m0) for x in xs]
        rows, scales = [values for values, _ in cast], [scale for _, scale in cast]
    return [
        _receive(rank, rows, scales, topk_idxs, world, num_max) for rank in range(world.num_ranks)
    ]


def low_latency_combine(
    ys: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor],
    received: Sequence[LowLatencyReceived],
    world: World,
    *,
    masked: Collection[int] = (),
    use_logfmt: bool = False,
) -> list[Tensor]:
    """Every token gets the sum of weight * y over its experts, read from the slots that dispatch
    filled. ys[r] is [L, R * num_max, D].

    The sum starts from 0, adds in top-k order in float32 (float64 for float64), and is rounded
    once. A product is rounded before it is added: no fused multiply-add. Entries of -1 and experts
    on masked ranks add nothing. With use_logfmt a row is what `logfmt` leaves of it, in float32.

    >>> world = World(rank_of_expert=(0, 1, 1), node_of_rank=(0, 0))
    >>> xs = [torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0]])]
    >>> topk_idxs = [torch.tensor([[2, 0], [-1, 2]]), torch.tensor([[2, 1]])]
    >>> weights = [torch.tensor([[0.5, 2.0], [9.0, 1.0]]), torch.tensor([[0.5, 0.25]])]
    >>> received = low_latency_dispatch(xs, topk_idxs, world, num_max=2)
    >>> ys = [got.x for got in received]
    >>> combined = low_latency_combine(ys, topk_idxs, weights, received, world)
    >>> [x.tolist() for x in combined]
    [[[25.0], [11.0]], [[15.0]]]
    >>> combined = low_latency_combine(ys, topk_idxs, weights, received, world, masked={1})
    >>> [x.tolist() for x in combined]
    [[[20.0], [0.0]], [[0.0]]]
    """
    dtype, hidden = ys[0].dtype, ys[0].shape[2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    combined = []
    for source, topk_idx in enumerate(topk_idxs):
        out = torch.zeros(topk_idx.shape[0], hidden, dtype=dtype)
        for token, experts in enumerate(topk_idx.tolist()):
            total = torch.zeros(hidden, dtype=wide)
            for k, expert in enumerate(experts):
                if expert == -1 or world.rank_of_expert[expert] in masked:
                    continue
                owner = world.rank_of_expert[expert]
                local = world.experts_of(owner).index(expert)
                slot = _find(received[owner], local, source, token)
                weight = topk_weights[source][token, k].to(wide)
                row = ys[owner][local, slot]
                total = total + weight * (logfmt(row) if use_logfmt else row.to(wide))
            out[token] = total.to(dtype)
        combined.append(out)
    return combined


def _check(topk_idxs: Sequence[Tensor], num_max: int) -> None:
    for rank, topk_idx in enumerate(topk_idxs):
        num_tokens = topk_idx.shape[0]
        if num_tokens > num_max:
            raise ValueError(f"x has {num_tokens} tokens, want at most {num_max}, on rank {rank}")
        for token, experts in enumerate(topk_idx.tolist()):
            for expert in experts:
                if expert != -1 and experts.count(expert) > 1:
                    raise ValueError(
                        f"topk_idx[{token}] names expert {expert} {experts.count(expert)} times, "
                        f"want once at most, on rank {rank}"
                    )


def _receive(
    rank: int,
    xs: Sequence[Tensor],
    scales: Sequence[Tensor] | None,
    topk_idxs: Sequence[Tensor],
    world: World,
    num_max: int,
) -> LowLatencyReceived:
    own = world.experts_of(rank)
    slots = (len(own), world.num_ranks * num_max)
    x = torch.zeros(*slots, xs[0].shape[1], dtype=xs[0].dtype)
    scale = None
    if scales is not None:
        scale = torch.zeros(*slots, scales[0].shape[1], dtype=scales[0].dtype)
    src_info = torch.full(slots, -1, dtype=torch.int32)
    count = torch.zeros(len(own), dtype=torch.int32)
    layout_range = torch.zeros(len(own), world.num_ranks, dtype=torch.int64)
    for local, expert in enumerate(own):
        slot = 0
        for source, topk_idx in enumerate(topk_idxs):
            begin = slot
            for token, experts in enumerate(topk_idx.tolist()):
                if expert in experts:
                    x[local, slot] = xs[source][token]
                    if scale is not None and scales is not None:
                        scale[local, slot] = scales[source][token]
                    src_info[local, slot] = token
                    slot += 1
            layout_range[local, source] = begin << 32 | (slot - begin)
        count[local] = slot
    return LowLatencyReceived(
        x=x, scales=scale, count=count, src_info=src_info, layout_range=layout_range
    )


def _find(received: LowLatencyReceived, local: int, source: int, token: int) -> int:
    """The slot of a local expert that holds a source rank's token."""
    begin, count = divmod(int(received.layout_range[local, source]), 2**32)
    return begin + received.src_info[local, begin : begin + count].tolist().index(token)
