"""A prepared exchange in the conformance cases: what a rank does, and what `spec` says."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.cases.by_expert import experts
from tests.cases.exchange import FP8, Case, inputs, open_buffer
from tests.cases.exchange import expected as expected_by_source
from tokenyard import spec
from tokenyard.testing import assert_same, fake_experts

_TURNS = 5


def can(case: Case) -> bool:
    """Whether such calls can be prepared."""
    return case.dtype != FP8 and not case.worst


def turn_of(case: Case, turn: int) -> Case:
    """Each turn has other numbers of tokens: those of the case, moved on by a rank; fewer; none."""
    tokens = case.tokens[turn % len(case.tokens) :] + case.tokens[: turn % len(case.tokens)]
    if turn == 3:
        tokens = tuple(count // 2 for count in tokens)
    return replace(case, tokens=tokens, seed=case.seed + 7 * turn)


def job(group: Any, case: Case, by_expert: bool) -> dict[str, Any]:
    """What a user does: dispatches and combines in turn, among other calls of the Buffer, with the
    experts' rows in memory of the user, or in the memory of the rows that came.
    """
    rank, own, out = group.rank(), case.world.experts_of(group.rank()), dict[str, Any]()
    with open_buffer(group, case) as buffer:
        step = buffer.prepare(
            max_tokens=max(case.tokens) or 1,
            hidden=case.hidden,
            num_topk=case.num_topk,
            num_experts=case.num_experts,
            dtype=case.dtype,
            by_expert=by_expert,
            expert_alignment=case.expert_alignment,
        )
        kept, before = None, None
        for turn in range(_TURNS):
            given = inputs(turn_of(case, turn), rank, 0)
            rows = step.dispatch(given.x, given.topk_idx, given.topk_weights)
            if kept is not None:  # the rows of the dispatch before are good until the next
                assert before is not None
                assert_same(before.x, kept)
            before, kept = rows, rows.x.clone()
            out[f"{turn} x"] = kept
            out[f"{turn} per_expert"] = rows.num_tokens_per_expert
            lists = _lists(rows, by_expert)
            out.update({f"{turn} {name}": value for name, value in lists.items()})
            y = _apply(by_expert, rows.x, lists, own, torch.empty_like(rows.x))
            out[f"{turn} sums"] = step.combine(y)
            if turn == 1:  # another call in between
                buffer.all_gather(given.x)
            into = torch.empty_like(given.x.contiguous())
            assert step.combine(y, weigh=False, out=into) is into
            out[f"{turn} unweighted"] = into
            if turn % 2:
                rows.x.copy_(y)
                out[f"{turn} in place"] = step.combine(rows.x)
                kept = y
        return out


def _lists(rows: Any, by_expert: bool) -> dict[str, Tensor]:
    if by_expert:
        assert rows.topk_idx is rows.topk_weights is None
        return {"offsets": rows.offsets.clone()}
    assert rows.offsets is None
    return {"topk_idx": rows.topk_idx.clone(), "topk_weights": rows.topk_weights.clone()}


def _apply(
    by_expert: bool, x: Tensor, lists: dict[str, Tensor], own: list[int], y: Tensor
) -> Tensor:
    if by_expert:
        return experts(x, lists["offsets"], own, y)
    y.copy_(fake_experts(x, lists["topk_idx"], lists["topk_weights"], own, x.dtype))
    return y


@lru_cache(maxsize=4)
def expected(case: Case, by_expert: bool) -> list[dict[str, Any]]:
    outs: list[dict[str, Any]] = [{} for _ in range(case.num_ranks)]
    for turn in range(_TURNS):
        wanted = _by_expert(turn_of(case, turn)) if by_expert else _by_source(turn_of(case, turn))
        for out, want in zip(outs, wanted, strict=True):
            if turn % 2:
                want["in place"] = want["sums"]
            out.update({f"{turn} {name}": value for name, value in want.items()})
    return outs


def _by_source(case: Case) -> list[dict[str, Any]]:
    outs = []
    plain = replace(case, transport=Case.transport, kernels=Case.kernels, num_biases=0)
    for want in expected_by_source(plain):
        out = {name: want[f"0 {name}"] for name in ("x", "topk_idx", "topk_weights", "per_expert")}
        out["sums"] = out["unweighted"] = want["0 combined alone"]
        outs.append(out)
    return outs


def _by_expert(case: Case) -> list[dict[str, Any]]:
    world, ranks = case.world, range(case.num_ranks)
    given = [inputs(case, rank, 0) for rank in ranks]
    ids, weights = [one.topk_idx for one in given], [one.topk_weights for one in given]
    xs, alignment = [one.x for one in given], case.expert_alignment
    came = spec.dispatch_by_expert(xs, ids, world, expert_alignment=alignment)
    ys = [
        experts(got.x, got.offsets, world.experts_of(rank), torch.empty_like(got.x))
        for rank, got in enumerate(came)
    ]
    sums = spec.combine_by_expert(ys, came, ids, world, topk_weights=weights)
    plain = spec.combine_by_expert(ys, came, ids, world)
    return [
        {
            "x": got.x,
            "offsets": got.offsets,
            "per_expert": got.offsets.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist(),
            "sums": sums[rank],
            "unweighted": plain[rank],
        }
        for rank, got in enumerate(came)
    ]


def check(case: Case, by_expert: bool, outs: list[dict[str, Any]]) -> None:
    for rank, (got, want) in enumerate(zip(outs, expected(case, by_expert), strict=True)):
        assert got.keys() == want.keys()
        for name in want:
            assert_same(got[name], want[name], f"rank {rank}: {name}")
