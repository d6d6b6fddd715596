"""Cases of experts with copies: what ranks do with them, and what `spec` says."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases.exchange import FP8
from tests.cases.inside import POSTED, leave_compiled_calls_at
from tokenyard import Replicas, spec
from tokenyard.testing import assert_same, numbered_tokens, routing

# By number of ranks: the logical experts of each rank's slots. Expert 0 is hot everywhere.
SLOTS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((2, 0, 1, 0, 3, 4, 5),),
    2: ((0, 1, 2, 0), (3, 0, 4, 5, 1)),
    3: ((0, 5), (0, 1, 4), (3, 0, 2)),
    4: ((0, 1), (0, 2, 5), (3, 0), (4, 1, 0)),
    5: ((0,), (5, 0, 1), (2, 3), (4, 0), (1, 0)),
    6: ((0, 1), (1, 0), (2, 3), (3, 0), (4, 5), (0, 0)),
    7: ((0, 1), (), (2, 3), (3, 0), (4, 5), (0, 0), (1,)),
    8: ((0, 1), (5, 0), (2, 3), (3, 0), (4,), (0, 0), (1, 2), (0, 4)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int
    transport: str = "auto"
    kernels: str = "numba"
    dtype: torch.dtype = torch.bfloat16
    ranks_per_node: int | None = None
    kind: str = "skewed"
    compiled: bool = True  # of few rows between nodes
    num_experts: int = 6
    num_topk: int = 3
    hidden: int = 32
    fp8: bool = False  # of the low-latency mode

    @property
    def world(self) -> spec.ReplicaWorld:
        per_node = self.ranks_per_node or self.num_ranks
        nodes = tuple(rank // per_node for rank in range(self.num_ranks))
        return spec.ReplicaWorld(SLOTS[self.num_ranks], nodes)

    def num_tokens(self, rank: int) -> int:
        return (9, 0, 14, 5)[rank % 4]


def inputs(case: Case, rank: int, turn: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    num_tokens, seed = case.num_tokens(rank), 100 * turn + rank
    x = numbered_tokens(num_tokens, case.hidden, first=1000 * seed, dtype=case.dtype)
    topk_idx, weights = routing(case.kind, num_tokens, case.num_topk, case.num_experts, seed=seed)
    if num_tokens > 2:
        topk_idx[1, 0] = -1
    scales = None
    if case.dtype == FP8:
        scales = torch.rand(num_tokens, 2, generator=torch.Generator().manual_seed(seed))
    return x, topk_idx, weights, scales


def copies(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Experts that give rows back as they are, in a dtype that can be summed."""
    return x.to(torch.bfloat16 if dtype == FP8 else dtype)


def open_buffer(group: Any, case: Case, **more: Any) -> tokenyard.Buffer:
    buffer = tokenyard.Buffer(
        group,
        transport=case.transport,
        kernels=case.kernels,
        ranks_per_node=case.ranks_per_node,
        placement=Replicas(SLOTS[case.num_ranks]),
        **more,
    )
    if not case.compiled:
        leave_compiled_calls_at(buffer, POSTED)
    return buffer


def job(group: Any, case: Case) -> dict[str, Any]:
    """Every call of the normal mode that names experts, and its way back."""
    rank = group.rank()
    x, topk_idx, weights, scales = inputs(case, rank)
    rows = x if scales is None else (x, scales)
    with open_buffer(group, case) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, case.num_experts)
        parts = {
            "num_tokens_per_rank": layout.num_tokens_per_rank,
            "is_token_in_rank": layout.is_token_in_rank,
            "num_tokens_per_expert": layout.num_tokens_per_expert,
        }
        out: dict[str, Any] = {
            **parts,
            "by logical": buffer.sum_replicas(layout.num_tokens_per_expert),
            "experts": buffer.get_local_experts(case.num_experts),
        }
        routed: dict[str, Any] = {"topk_idx": topk_idx, "topk_weights": weights}
        for name, more in (("", {"num_experts": case.num_experts}), ("layout ", parts)):
            got = buffer.dispatch(rows, **routed, **more)
            out[name + "x"], out[name + "scales"] = (
                got.recv_x if isinstance(got.recv_x, tuple) else (got.recv_x, None)
            )
            out[name + "topk_idx"] = got.recv_topk_idx
            out[name + "topk_weights"] = got.recv_topk_weights
            out[name + "per_expert"] = got.num_recv_tokens_per_expert_list
            y = copies(out[name + "x"], case.dtype)
            out[name + "combined"] = buffer.combine(y, got.handle).x
        sorted_rows = buffer.dispatch_by_expert(
            rows, topk_idx, weights, num_experts=case.num_experts
        )
        by_expert = sorted_rows.x[0] if isinstance(sorted_rows.x, tuple) else sorted_rows.x
        out["by_expert x"] = by_expert.clone()
        out["by_expert counts"] = sorted_rows.num_tokens_per_expert
        y = copies(by_expert, case.dtype)
        out["by_expert combined"] = buffer.combine_by_expert(y, sorted_rows.handle)
        return out


def check(case: Case, outs: list[dict[str, Any]]) -> None:
    world, ranks = case.world.physical, range(case.num_ranks)
    given = [inputs(case, rank) for rank in ranks]
    xs, weights = [one[0] for one in given], [one[2] for one in given]
    chosen = [spec.choose(one[1], rank, case.world) for rank, one in enumerate(given)]
    layouts = [spec.layout(one, world) for one in chosen]
    scales = [one[3] for one in given] if case.dtype == FP8 else None
    received = spec.dispatch(
        xs, layouts, world, topk_idxs=chosen, topk_weights=weights, scales=scales
    )
    combined = spec.combine([copies(one.x, case.dtype) for one in received], layouts, world)
    by_expert = spec.dispatch_by_expert(xs, chosen, world, scales=scales)
    ys = [copies(one.x, case.dtype) for one in by_expert]
    back = spec.combine_by_expert(ys, by_expert, chosen, world, topk_weights=weights)
    for rank, (got, want) in enumerate(zip(outs, received, strict=True)):
        layout = layouts[rank]
        expected = {
            "num_tokens_per_rank": layout.num_tokens_per_rank,
            "is_token_in_rank": layout.is_token_in_rank,
            "num_tokens_per_expert": layout.num_tokens_per_expert,
            "by logical": torch.tensor(
                spec.sum_replicas(layout.num_tokens_per_expert.tolist(), case.world),
                dtype=torch.int32,
            ),
            "experts": list(case.world.experts_of_rank[rank]),
            "by_expert x": by_expert[rank].x,
            "by_expert counts": [
                int(e - b) for b, e in pairwise((0, *by_expert[rank].offsets.tolist()))
            ],
            "by_expert combined": back[rank],
        }
        for name in ("", "layout "):
            expected |= {
                name + "x": want.x,
                name + "scales": want.scales,
                name + "topk_idx": want.topk_idx,
                name + "topk_weights": want.topk_weights,
                name + "per_expert": want.num_tokens_per_expert,
                name + "combined": combined[rank],
            }
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(got[name], value, f"rank {rank}: {name}")


def low_latency_job(group: Any, case: Case) -> list[Any]:
    """Three calls of one shape: the later ones take the quick way, where there is one."""
    rank, out = group.rank(), []
    with open_buffer(group, case, low_latency_mode=True) as buffer:
        for turn in range(3):
            x, topk_idx, weights, _ = inputs(case, rank, turn)
            got: Any = buffer.low_latency_dispatch(
                x, topk_idx, 16, case.num_experts, use_fp8=case.fp8, return_recv_hook=turn == 1
            )
            if got.hook is not None:
                got.hook()
            assert got.handle[4] == case.num_experts
            recv_x, scales = got.recv_x if case.fp8 else (got.recv_x, None)
            y = torch.nan_to_num(recv_x.to(torch.bfloat16))
            for local, count in enumerate(got.recv_count.tolist()):
                y[local, count:] = 0
            sums = buffer.low_latency_combine(y, topk_idx, weights, got.handle).combined_x
            scales = None if scales is None else scales.clone()
            out.append((recv_x.clone(), scales, got.recv_count.clone(), sums.clone()))
    return out


def check_low_latency(case: Case, outs: list[list[Any]]) -> None:
    world = case.world.physical
    for turn in range(3):
        given = [inputs(case, rank, turn) for rank in range(case.num_ranks)]
        chosen = [spec.choose(one[1], rank, case.world) for rank, one in enumerate(given)]
        want = spec.low_latency_dispatch(
            [one[0] for one in given], chosen, world, 16, use_fp8=case.fp8
        )
        ys = [one.x.to(torch.bfloat16) for one in want]
        sums = spec.low_latency_combine(ys, chosen, [one[2] for one in given], want, world)
        for rank, (one, total) in enumerate(zip(want, sums)):
            x, scales, count, combined = outs[rank][turn]
            what = f"turn {turn} on rank {rank}: "
            assert_same(count, one.count, what + "count")
            for local, rows in enumerate(count.tolist()):
                assert_same(x[local, :rows], one.x[local, :rows], what + "x")
                if one.scales is not None:
                    assert_same(scales[local, :rows], one.scales[local, :rows], what + "scales")
            assert_same(combined, total, what + "combined")
