"""Rows by expert, of all ranks at once: a dispatch whose rows arrive grouped by local expert, and
the combine that takes such rows. `xs[r]` is rank r's tensor.

A *pair* is one (token, k) with an expert. Every pair has a row of its own on its expert's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.spec.exchange import World, combine, layout

Pair = tuple[int, int, int]  # source rank, token, k


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedByExpert:
    """What one rank gets: its rows by (local expert, source rank, token, k)."""

    x: Tensor  # [M, D], padding rows are zeros
    scales: Tensor | None  # [M, S], padding rows are zeros
    offsets: Tensor  # [L] int32, the end of each expert's rows with their padding
    pairs: list[Pair | None]  # M, whose row it is; None in padding rows


def dispatch_by_expert(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    world: World,
    *,
    scales: Sequence[Tensor] | None = None,
    expert_alignment: int = 1,
) -> list[ReceivedByExpert]:
    """Every pair's row to its expert's rank. Each local expert's rows lie one after the other, by
    (source rank, token, k), and zeros pad them to a multiple of expert_alignment.

    That is `dispatch` and then `permute` of what arrived.

    >>> world = World.even(num_experts=4, num_ranks=2)
    >>> topk_idxs = [torch.tensor([[0, 3]]), torch.tensor([[1, -1], [2, 3]])]
    >>> xs = [torch.tensor([[10.0]]), torch.tensor([[20.0], [21.0]])]
    >>> first, second = dispatch_by_expert(xs, topk_idxs, world, expert_alignment=2)
    >>> first.x.flatten().tolist(), first.offsets.tolist()  # experts 0 and 1 have a pair each
    ([10.0, 0.0, 20.0, 0.0], [2, 4])
    >>> second.x.flatten().tolist(), second.offsets.tolist()  # expert 3 has two
    ([21.0, 0.0, 10.0, 21.0], [2, 4])
    >>> second.pairs
    [(1, 1, 0), None, (0, 0, 1), (1, 1, 1)]
    """
    received = []
    for rank in range(world.num_ranks):
        pairs: list[Pair | None] = []
        offsets = []
        for expert in world.experts_of(rank):
            for source, topk_idx in enumerate(topk_idxs):
                for token, chosen in enumerate(topk_idx.tolist()):
                    pairs += [(source, token, k) for k, one in enumerate(chosen) if one == expert]
            while len(pairs) % expert_alignment:
                pairs.append(None)
            offsets.append(len(pairs))
        received.append(
            ReceivedByExpert(
                x=_rows(xs, pairs),
                scales=None if scales is None else _rows(scales, pairs),
                offsets=torch.tensor(offsets, dtype=torch.int32),
                pairs=pairs,
            )
        )
    return received


def combine_by_expert(
    ys: Sequence[Tensor],
    received: Sequence[ReceivedByExpert],
    topk_idxs: Sequence[Tensor],
    world: World,
    *,
    topk_weights: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Every token gets the sum of its pairs' rows, each times its weight if weights are given.

    Each rank's share of a token comes first: from 0, the rows of its pairs there, by ascending k,
    each times its weight, in float32 (float64 for float64). A product is rounded before it is
    added, and the share is rounded once, to the rows' dtype. Then `combine` sums the shares. So
    this is `unpermute` with weights, and then `combine`.

    DeepEP V2 (do_expand) has the same shares, of rows that its user has weighted and rounded. It
    adds the shares not by ascending rank but in the order of each rank's last k, so that its bits
    may differ from three ranks on.

    Token 0 of rank 0 chose experts 0 and 1 of rank 0 and expert 2 of rank 1. In bfloat16 256 + 1
    is 256, so rank 0's share loses its 1, and rank 1's 2 is added to what is left:

    >>> world = World((0, 0, 1), (0, 0))
    >>> topk_idxs = [torch.tensor([[0, 1, 2]]), torch.zeros(0, 3, dtype=torch.int64)]
    >>> xs = [torch.zeros(1, 1), torch.zeros(0, 1)]
    >>> received = dispatch_by_expert(xs, topk_idxs, world)
    >>> ys = [torch.tensor([[256.0], [1.0]]).bfloat16(), torch.tensor([[2.0]]).bfloat16()]
    >>> combine_by_expert(ys, received, topk_idxs, world)[0].item()
    258.0
    >>> weights = [torch.tensor([[0.5, 3.0, 10.0]]), torch.zeros(0, 3)]
    >>> combine_by_expert(ys, received, topk_idxs, world, topk_weights=weights)[0].item()
    151.0
    """
    dtype = ys[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layouts = [layout(topk_idx, world) for topk_idx in topk_idxs]
    shares = []
    for rank, got in enumerate(received):
        row_of = {pair: row for row, pair in enumerate(got.pairs) if pair is not None}
        summed = []
        for source, lay in enumerate(layouts):
            for token in lay.is_token_in_rank[:, rank].nonzero().flatten().tolist():
                share = torch.zeros(ys[rank].shape[1], dtype=wide)
                for k in range(topk_idxs[source].shape[1]):
                    if (source, token, k) in row_of:
                        term = ys[rank][row_of[source, token, k]].to(wide)
                        if topk_weights is not None:
                            term = topk_weights[source][token, k].to(wide) * term
                        share = share + term
                summed.append(share.to(dtype))
        empty = ys[rank].new_empty(0, ys[rank].shape[1])
        shares.append(torch.stack(summed) if summed else empty)
    return combine(shares, layouts, world)


def _rows(xs: Sequence[Tensor], pairs: Sequence[Pair | None]) -> Tensor:
    """The token's row for each pair, zeros where there is none."""
    rows = torch.zeros(len(pairs), xs[0].shape[1], dtype=xs[0].dtype)
    for row, pair in enumerate(pairs):
        if pair is not None:
            source, token, _ = pair
            rows[row] = xs[source][token]
    return rows
