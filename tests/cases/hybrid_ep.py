"""HybridEPBuffer: what a rank does with it, and what `spec` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard import spec
from tokenyard.compat.hybrid_ep import indices_to_map
from tokenyard.testing import assert_same, numbered_tokens, routing

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int = 2
    tokens: tuple[int, ...] = (7, 0, 12, 5)  # by rank, again and again
    hidden: int = 24
    experts_per_rank: int = 4
    kind: str = "holes"
    dtype: torch.dtype = torch.bfloat16
    pad_multiple: int | None = None
    with_probs: bool = True
    as_lists: bool = False  # topk_idx instead of a map
    more_rows: int | None = None  # num_permuted_tokens beyond (or short of) what arrives
    rank_0_alone: bool = False  # has more_rows, and the others what arrives
    transport: str = "auto"
    ranks_per_node: int | None = None

    def more(self, rank: int) -> int:
        return 0 if self.rank_0_alone and rank else self.more_rows or 0

    @property
    def num_experts(self) -> int:
        return self.experts_per_rank * self.num_ranks

    @property
    def world(self) -> spec.World:
        return spec.World.even(self.num_experts, self.num_ranks, self.ranks_per_node)

    def given(self, rank: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """x, scales, topk_idx and topk_weights of a rank."""
        num_tokens = self.tokens[rank % len(self.tokens)]
        x = numbered_tokens(num_tokens, self.hidden, first=100 * rank, dtype=self.dtype)
        scales = None
        if self.dtype == FP8:
            scales = torch.rand(num_tokens, 2, generator=torch.Generator().manual_seed(rank))
        # Ranks have other numbers of experts a token: a map does not say how many.
        num_topk = 1 + rank % 3
        topk_idx, weights = routing(self.kind, num_tokens, num_topk, self.num_experts, seed=rank)
        return x, scales, topk_idx, weights

    def maps(self, rank: int) -> tuple[Tensor, Tensor]:
        x, _, topk_idx, weights = self.given(rank)
        routing_map, probs = indices_to_map(topk_idx, weights, len(x), self.num_experts)
        assert probs is not None
        return routing_map, probs

    def lists(self) -> list[Tensor]:
        """[T, E] by rank: a token's experts, ascending, -1 where it has not chosen one."""
        every = torch.arange(self.num_experts)
        maps = [self.maps(rank)[0] for rank in range(self.num_ranks)]
        return [torch.where(routing_map, every, -1) for routing_map in maps]

    def expected_rows(self) -> list[spec.ReceivedByExpert]:
        given = [self.given(rank) for rank in range(self.num_ranks)]
        return spec.dispatch_by_expert(
            [x for x, *_ in given],
            self.lists(),
            self.world,
            scales=[one[1] for one in given] if self.dtype == FP8 else None,
            expert_alignment=self.pad_multiple or 1,
        )


def job(group: Any, case: Case, num_rows: list[int]) -> dict[str, Any]:
    """Dispatch, the same way again, and combine with and without probs."""
    rank = group.rank()
    x, scales, topk_idx, weights = case.given(rank)
    routing_map, probs = case.maps(rank)
    buffer = tokenyard.HybridEPBuffer(
        group,
        case.hidden,
        16,
        case.experts_per_rank,
        transport=case.transport,
        ranks_per_node=case.ranks_per_node,
    )
    how: dict[str, Any] = {"routing_map": routing_map, "probs": probs if case.with_probs else None}
    if case.as_lists:
        how = {"topk_idx": topk_idx, "num_of_experts": case.num_experts}
        how["topk_weights"] = weights if case.with_probs else None
    if case.more_rows is not None:
        how["num_permuted_tokens"] = num_rows[rank] + case.more(rank)
        how["non_blocking"] = True
    got = buffer.dispatch_with_permute(
        hidden=x,
        scaling_factor=scales,
        num_of_experts_per_rank=case.experts_per_rank,
        pad_multiple=case.pad_multiple,
        **how,
    )
    again = buffer.dispatch_with_permute(
        hidden=x,
        scaling_factor=scales,
        probs=probs,
        handle=tuple(got.handle),
        num_permuted_tokens=torch.tensor(len(got.hidden)),
        pad_multiple=case.pad_multiple,
    )
    y = _experts(got.hidden, got.tokens_per_expert, rank * case.experts_per_rank)
    values = torch.arange(1.0, len(y) + 1)
    alone, nothing = buffer.combine_with_unpermute(hidden=y, handle=got.handle)
    assert nothing is None
    both = buffer.combine_with_unpermute(hidden=y, probs=values, handle=tuple(got.handle))
    assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == max(16, len(x))
    buffer.destroy()
    return {
        "x": got.hidden,
        "scales": got.scaling_factor,
        "probs": got.probs,
        "counts": got.tokens_per_expert,
        "unpadded counts": got.handle.tokens_per_expert,
        "overflow": got.handle.overflow_flag,
        "again x": again.hidden,
        "again scales": again.scaling_factor,
        "again probs": again.probs,
        "combined": alone,
        "combined with probs": both[0],
        "combined probs": both[1],
    }


def _experts(x: Tensor, counts: Tensor, first: int) -> Tensor:
    """y[row] = x[row] * (e + 1), e being the row's global expert."""
    expert = torch.repeat_interleave(torch.arange(len(counts)) + first, counts)
    factor = torch.ones(len(x))
    factor[: len(expert)] = expert + 1.0
    dtype = torch.bfloat16 if x.dtype == FP8 else x.dtype
    return (x.double() * factor[:, None]).to(dtype)


def check(case: Case, outs: list[dict[str, Any]]) -> None:
    received, topk_idxs = case.expected_rows(), case.lists()
    maps = [case.maps(rank) for rank in range(case.num_ranks)]
    kept = []
    for rank, (got, want) in enumerate(zip(outs, received, strict=True)):
        num_rows = len(want.x) + case.more(rank)
        probs = torch.zeros(num_rows)
        first = rank * case.experts_per_rank
        unpadded = torch.zeros(case.experts_per_rank, dtype=torch.int32)
        for row, pair in enumerate(want.pairs[:num_rows]):
            if pair is not None:
                source, token, expert = pair  # one lane an expert
                probs[row] = maps[source][1][token, expert]
                unpadded[expert - first] += 1
        kept.append([pair if row < num_rows else None for row, pair in enumerate(want.pairs)])
        where = f"rank {rank}"
        for again in ("", "again "):
            assert_same(got[f"{again}x"], _of_length(want.x, num_rows), where)
            scales = None if want.scales is None else _of_length(want.scales, num_rows)
            assert_same(got[f"{again}scales"], scales, where)
        assert_same(got["probs"], probs if case.with_probs else None, where)
        assert_same(got["again probs"], probs, where)
        ends = want.offsets.long().clamp(max=num_rows)
        assert_same(got["counts"], torch.diff(ends, prepend=torch.zeros(1).long()), where)
        assert_same(got["unpadded counts"], unpadded, where)
        assert bool(got["overflow"]) == (num_rows < len(want.x))
    _check_combine(case, outs, received, kept, topk_idxs)


def _check_combine(
    case: Case,
    outs: list[dict[str, Any]],
    received: list[spec.ReceivedByExpert],
    kept: list[list[tuple[int, int, int] | None]],
    topk_idxs: list[Tensor],
) -> None:
    """Sums of the rows that were kept: a dropped row counts as zeros."""
    ys, values = [], [torch.zeros(one.shape) for one in topk_idxs]
    for rank, want in enumerate(received):
        counts = torch.diff(want.offsets.long(), prepend=torch.zeros(1).long())
        y = _experts(want.x, counts, rank * case.experts_per_rank)
        for row, pair in enumerate(kept[rank]):
            if pair is None:
                y[row] = 0
            else:
                source, token, expert = pair
                values[source][token, expert] = row + 1.0
        ys.append(y)
    sums = spec.combine_by_expert(ys, received, topk_idxs, case.world)
    for rank, got in enumerate(outs):
        assert_same(got["combined"], sums[rank], f"rank {rank}")
        assert_same(got["combined with probs"], sums[rank], f"rank {rank}")
        assert_same(got["combined probs"], values[rank], f"rank {rank}")


def _of_length(rows: Tensor, num_rows: int) -> Tensor:
    longer = torch.zeros(max(num_rows, len(rows)), rows.shape[1]).to(rows.dtype)
    longer[: len(rows)] = rows
    return longer[:num_rows]
