"""The specification of rows by expert: against dense sums, and against dispatch and permute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenyard import spec
from tokenyard.spec import World
from tokenyard.testing import assert_same, numbered_tokens, routing

HIDDEN = 5
WORLDS = {
    "even": (World.even(8, 4), "uniform"),
    "holes": (World.even(8, 4), "holes"),
    "two-nodes": (World.even(8, 4, 2), "uniform"),
    "uneven-experts": (World((2, 0, 2, 2, 0, 1, 2), (0, 0, 0)), "uniform"),
    "a-rank-without-experts": (World((0, 2, 0, 2), (0, 0, 0)), "skewed"),
    "one-expert": (World.even(6, 3), "one"),
    "nobody": (World.even(6, 3), "none"),
    "one-rank": (World.even(5, 1), "holes"),
}
EVERY_WORLD = pytest.mark.parametrize("name", WORLDS)


def topk_of(name: str) -> tuple[World, list[Tensor], list[Tensor]]:
    """Rank 1 has no tokens."""
    world, kind = WORLDS[name]
    tokens = [0 if rank == 1 else 3 + rank for rank in range(world.num_ranks)]
    drawn = [
        routing(kind, num_tokens, 3, world.num_experts, seed=rank)
        for rank, num_tokens in enumerate(tokens)
    ]
    return world, [idx for idx, _ in drawn], [weights for _, weights in drawn]


def tokens_of(topk_idxs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [
        numbered_tokens(len(topk_idx), HIDDEN, first=100 * rank, dtype=dtype)
        for rank, topk_idx in enumerate(topk_idxs)
    ]


@EVERY_WORLD
@pytest.mark.parametrize("weighted", [True, False])
def test_sums_are_dense_sums_over_all_experts(name: str, weighted: bool) -> None:
    world, topk_idxs, weights = topk_of(name)
    xs = tokens_of(topk_idxs, torch.float64)
    received = spec.dispatch_by_expert(xs, topk_idxs, world, expert_alignment=3)
    ys = []
    for rank, got in enumerate(received):
        y, begin = torch.full_like(got.x, torch.nan), 0  # of padding: must not be read
        for expert, end in zip(world.experts_of(rank), got.offsets.tolist(), strict=True):
            assert end % 3 == 0
            for row in range(begin, end):
                if got.pairs[row] is not None:
                    y[row] = got.x[row] * (expert + 1)
            begin = end
        ys.append(y)
    given = weights if weighted else None
    sums = spec.combine_by_expert(ys, received, topk_idxs, world, topk_weights=given)
    for x, topk_idx, weight, got_sum in zip(xs, topk_idxs, weights, sums, strict=True):
        factor = torch.where(topk_idx < 0, 0, topk_idx + 1).double()
        if weighted:
            factor = factor * weight
        # Sums of a few numbers in float64, in another order.
        torch.testing.assert_close(got_sum, x * factor.sum(1, keepdim=True), rtol=1e-12, atol=0)


@EVERY_WORLD
@pytest.mark.parametrize("alignment", [1, 4])
def test_it_is_dispatch_permute_unpermute_combine(name: str, alignment: int) -> None:
    world, topk_idxs, weights = topk_of(name)
    xs = tokens_of(topk_idxs, torch.bfloat16)
    scales = [torch.rand(len(x), 2) for x in xs]
    layouts = [spec.layout(topk_idx, world) for topk_idx in topk_idxs]
    plain = spec.dispatch(
        xs, layouts, world, topk_idxs=topk_idxs, topk_weights=weights, scales=scales
    )
    by_expert = spec.dispatch_by_expert(
        xs, topk_idxs, world, scales=scales, expert_alignment=alignment
    )
    ys, shares = [], []
    for rank, (row, got) in enumerate(zip(plain, by_expert, strict=True)):
        assert row.topk_idx is not None
        want = spec.permute(
            row.x,
            row.topk_idx,
            len(world.experts_of(rank)),
            expert_alignment=alignment,
            scales=row.scales,
        )
        assert_same(got.x, want.x)
        assert_same(got.scales, want.scales)
        assert_same(got.offsets, want.offsets)
        ys.append(got.x * (rank + 1.5))
        shares.append(spec.unpermute(ys[-1], want.row_of, weights=row.topk_weights))
    sums = spec.combine_by_expert(ys, by_expert, topk_idxs, world, topk_weights=weights)
    for got_sum, want_sum in zip(sums, spec.combine(shares, layouts, world), strict=True):
        assert_same(got_sum, want_sum)
