"""Rows by expert in the conformance cases: what a rank does, and what `spec` says."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases.exchange import FP8, Case, Inputs, inputs, open_buffer
from tokenyard import spec
from tokenyard.testing import assert_same


def experts(x: Tensor, offsets: Tensor, own: list[int], y: Tensor) -> Tensor:
    """y[row] = x[row] * (e + 1), e being the row's global expert."""
    begin = 0
    for expert, end in zip(own, offsets.tolist(), strict=True):
        y[begin:end] = (x[begin:end].double() * (expert + 1)).to(y.dtype)
        begin = end
    return y


def job(group: Any, case: Case) -> dict[str, Any]:
    """What a user does: two dispatches in flight, experts, and combines of rows that lie in memory
    of the user, in the Buffer's, or in both, by rank.
    """
    rank = group.rank()
    own = case.world.experts_of(rank)
    with open_buffer(group, case) as buffer:
        out: dict[str, Any] = {}
        got = []
        for turn in range(2):
            got.append(_dispatch(buffer, case, inputs(case, rank, turn), turn, out))
        for turn in (1, 0):
            x, handle = out[f"{turn} x"], got[turn].handle
            mine = torch.empty(x.shape, dtype=case.sum_dtype)
            shared = buffer.get_next_combine_buffer(handle)
            assert (shared.shape, shared.dtype) == (mine.shape, mine.dtype)
            for way, target in {
                "mine": mine,
                "shared": shared,
                "either": (mine, shared)[(rank + turn) % 2],
            }.items():
                y = experts(x, got[turn].offsets, own, target)
                y[torch.tensor(_padding(case, rank, turn), dtype=torch.int64)] = torch.nan
                out[f"{turn} {way}"] = buffer.combine_by_expert(y, handle)
                out[f"{turn} {way} unweighted"] = buffer.combine_by_expert(y, handle, weigh=False)
        given = inputs(case, rank, 1)
        into = torch.empty(given.x.shape, dtype=case.sum_dtype)
        assert buffer.combine_by_expert(y, got[0].handle, out=into[: case.num_tokens(rank)]).shape
        assert_same(into, out["0 either"])
        again = buffer.dispatch(_rows(inputs(case, rank, 0)), handle=got[0].handle)
        out["cached x"] = again.recv_x[0] if case.dtype == FP8 else again.recv_x
        return out


def _dispatch(
    buffer: tokenyard.Buffer, case: Case, given: Inputs, turn: int, out: dict[str, Any]
) -> Any:
    got: Any = buffer.dispatch_by_expert(
        _rows(given),
        given.topk_idx,
        given.topk_weights,
        num_experts=case.num_experts,
        expert_alignment=case.expert_alignment,
    )
    x, scales = got.x if case.dtype == FP8 else (got.x, None)
    named = {"x": x, "scales": scales, "offsets": got.offsets}
    named["per_expert"] = got.num_tokens_per_expert
    out.update({f"{turn} {name}": value for name, value in named.items()})
    return got


def _rows(given: Inputs) -> Any:
    return given.x if given.scales is None else (given.x, given.scales)


def _padding(case: Case, rank: int, turn: int) -> list[int]:
    """The rows of a rank that no pair has."""
    return [row for row, pair in enumerate(_received(case, turn)[rank].pairs) if pair is None]


def _received(case: Case, turn: int) -> list[spec.ReceivedByExpert]:
    given = [inputs(case, rank, turn) for rank in range(case.num_ranks)]
    return spec.dispatch_by_expert(
        [one.x for one in given],
        [one.topk_idx for one in given],
        case.world,
        scales=[one.scales for one in given if one.scales is not None] or None,
        expert_alignment=case.expert_alignment,
    )


def expected(case: Case) -> list[dict[str, Any]]:
    """What `spec` says, by rank: the same for all transports and kernel sets."""
    plain = replace(case, transport=Case.transport, kernels=Case.kernels)
    return _expected(plain)


@lru_cache(maxsize=4)
def _expected(case: Case) -> list[dict[str, Any]]:
    world, ranks = case.world, range(case.num_ranks)
    outs: list[dict[str, Any]] = [{} for _ in ranks]
    for turn in range(2):
        given, received = [inputs(case, rank, turn) for rank in ranks], _received(case, turn)
        topk_idxs = [one.topk_idx for one in given]
        ys = [
            experts(
                got.x,
                got.offsets,
                world.experts_of(rank),
                torch.empty(got.x.shape, dtype=case.sum_dtype),
            )
            for rank, got in enumerate(received)
        ]
        sums = {
            "": spec.combine_by_expert(
                ys, received, topk_idxs, world, topk_weights=[one.topk_weights for one in given]
            ),
            " unweighted": spec.combine_by_expert(ys, received, topk_idxs, world),
        }
        for rank, got in enumerate(received):
            ends = [0, *got.offsets.tolist()]
            named = {
                "x": got.x,
                "scales": got.scales,
                "offsets": got.offsets,
                "per_expert": [end - begin for begin, end in pairwise(ends)],
            }
            for how, each in sums.items():
                named |= {f"{way}{how}": each[rank] for way in ("mine", "shared", "either")}
            outs[rank].update({f"{turn} {name}": value for name, value in named.items()})
    layouts = [spec.layout(inputs(case, rank, 0).topk_idx, world) for rank in ranks]
    plain = spec.dispatch([inputs(case, rank, 0).x for rank in ranks], layouts, world)
    for out, received_plain in zip(outs, plain, strict=True):
        out["cached x"] = received_plain.x
    return outs


def check(case: Case, outs: list[dict[str, Any]]) -> None:
    for rank, (got, want) in enumerate(zip(outs, expected(case), strict=True)):
        assert got.keys() == want.keys()
        for name in want:
            assert_same(got[name], want[name], f"rank {rank}: {name}")
