"""One case of the conformance tests: its inputs, what a rank does with them, and what `spec` says.

A rank's job returns every output by name; `expected` gives the same names for all ranks at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tests.cases import inside
from tokenyard import spec
from tokenyard.testing import fake_experts, numbered_tokens, routing

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int
    tokens: tuple[int, ...] = (7, 0, 12, 5)  # by rank, again and again
    hidden: int = 40
    num_topk: int = 3
    num_experts: int = 8
    dtype: torch.dtype = torch.bfloat16
    kind: str = "uniform"
    placement: tuple[int, ...] | None = None
    ranks_per_node: int | tuple[int, ...] | None = None
    kernels: str = "numba"
    transport: str = "auto"
    num_biases: int = 0
    expert_alignment: int = 1
    worst: bool = False  # num_worst_tokens
    strided: bool = False  # inputs that are not contiguous
    num_sms: int = 20
    seed: int = 0
    way: str = "compiled"  # of few rows between nodes: or "general", or "mixed", see `take_way`

    @property
    def world(self) -> spec.World:
        if isinstance(self.ranks_per_node, tuple):
            nodes = tuple(n for n, size in enumerate(self.ranks_per_node) for _ in range(size))
            even = replace(spec.World.even(self.num_experts, self.num_ranks), node_of_rank=nodes)
        else:
            even = spec.World.even(self.num_experts, self.num_ranks, self.ranks_per_node)
        return even if self.placement is None else spec.World(self.placement, even.node_of_rank)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    def num_tokens(self, rank: int) -> int:
        return self.tokens[rank % len(self.tokens)]

    def worst_tokens(self) -> int:
        return sum(self.num_tokens(rank) for rank in range(self.num_ranks)) + 3 if self.worst else 0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    biases: list[Tensor]


def inputs(case: Case, rank: int, turn: int) -> Inputs:
    """Of the turn-th dispatch; tokens are numbered over all ranks."""
    num_tokens, seed = case.num_tokens(rank), case.seed + 1000 * turn + rank
    first = 10_000 * turn + sum(case.num_tokens(r) for r in range(rank))
    x = numbered_tokens(num_tokens, case.hidden, first=first, dtype=case.dtype)
    topk_idx, weights = routing(case.kind, num_tokens, case.num_topk, case.num_experts, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    scales = None
    if case.dtype == FP8:
        scales = torch.rand(3, num_tokens, generator=generator).t()
    biases = [
        torch.randn(num_tokens, case.hidden, generator=generator).to(case.sum_dtype)
        for _ in range(case.num_biases)
    ]
    if case.strided:
        x, topk_idx = x.t().contiguous().t(), topk_idx.repeat_interleave(2, 1)[:, ::2]
        weights = weights.t().contiguous().t()
    return Inputs(x=x, scales=scales, topk_idx=topk_idx, topk_weights=weights, biases=biases)


def job(group: Any, case: Case) -> dict[str, Any]:
    with open_buffer(group, case) as buffer:
        return rounds(buffer, case)


def open_buffer(group: Any, case: Case) -> tokenyard.Buffer:
    return tokenyard.Buffer(
        group,
        transport=case.transport,
        kernels=case.kernels,
        ranks_per_node=case.ranks_per_node,
        placement=None if case.placement is None else torch.tensor(case.placement),
    )


def rounds(buffer: tokenyard.Buffer, case: Case) -> dict[str, Any]:
    """What a user does: two dispatches in flight, experts, their combines, a cached dispatch."""
    rank = buffer.rank
    out: dict[str, Any] = {}
    handles = []
    ways = random.Random(f"{case.seed} {rank}")
    for turn in range(2):
        given = inputs(case, rank, turn)
        take_way(buffer, case.way, ways)
        handles.append(_dispatch(buffer, case, given, turn, out))
    own = case.world.experts_of(rank)
    for turn in (1, 0):
        given = inputs(case, rank, turn)
        y = fake_experts(
            out[f"{turn} x"],
            out[f"{turn} topk_idx"],
            out[f"{turn} topk_weights"],
            own,
            case.sum_dtype,
        )
        weights = out[f"{turn} topk_weights"]
        combined = buffer.combine(y, handles[turn], weights, _bias(given.biases))
        out[f"{turn} combined"], out[f"{turn} combined weights"] = combined[:2]
        take_way(buffer, case.way, ways)
        out[f"{turn} combined alone"] = buffer.combine(y, handles[turn]).x
    given = inputs(case, rank, 0)
    again = buffer.dispatch(_rows(given), handle=handles[0])
    assert again[1:5] == (None, None, None, None)
    out["cached x"] = again.recv_x[0] if case.dtype == FP8 else again.recv_x
    return out


def take_way(buffer: tokenyard.Buffer, way: str, draw: random.Random) -> None:
    """How this rank makes its next call of few rows between nodes: by compiled steps, or by general
    ones, or by general ones from a phase on that is drawn.
    """
    if way == "general":
        inside.leave_compiled_calls_at(buffer, inside.POSTED)
    elif way == "mixed":
        phase = draw.choice((inside.NOWHERE, inside.POSTED, inside.MET))
        inside.leave_compiled_calls_at(buffer, phase)


def _dispatch(
    buffer: tokenyard.Buffer, case: Case, given: Inputs, turn: int, out: dict[str, Any]
) -> tokenyard.Handle:
    """With the layout on the first turn, with num_experts on the second."""
    layout = buffer.get_dispatch_layout(given.topk_idx, case.num_experts)
    parts = {
        "num_tokens_per_rank": layout.num_tokens_per_rank,
        "is_token_in_rank": layout.is_token_in_rank,
        "num_tokens_per_expert": layout.num_tokens_per_expert,
    }
    got: Any = buffer.dispatch(
        _rows(given),
        topk_idx=given.topk_idx,
        topk_weights=given.topk_weights,
        expert_alignment=case.expert_alignment,
        num_worst_tokens=case.worst_tokens(),
        config=tokenyard.Config(case.num_sms),
        **(parts if turn == 0 else {"num_experts": case.num_experts}),
    )
    named = {**parts, "num_tokens_per_node": layout.num_tokens_per_rdma_rank}
    named["x"], named["scales"] = got.recv_x if case.dtype == FP8 else (got.recv_x, None)
    named["topk_idx"], named["topk_weights"] = got.recv_topk_idx, got.recv_topk_weights
    named["per_expert"] = got.num_recv_tokens_per_expert_list
    named["src_idx"] = got.handle.recv_src_idx
    for field in ("rank_prefix_matrix", "channel_prefix_matrix", "recv_channel_prefix_matrix"):
        named[field] = getattr(got.handle, field)
    named["send_head"] = got.handle.send_head
    out.update({f"{turn} {name}": value for name, value in named.items()})
    return got.handle


def _rows(given: Inputs) -> Any:
    return given.x if given.scales is None else (given.x, given.scales)


def _bias(biases: list[Tensor]) -> Any:
    """None, one tensor or a pair: all the forms that combine takes."""
    return tuple(biases) if len(biases) > 1 else next(iter(biases), None)


def expected(case: Case) -> list[dict[str, Any]]:
    """What `spec` says, by rank: the same for all transports and kernel sets, whose tests follow
    each other.
    """
    plain = replace(case, transport=Case.transport, kernels=Case.kernels, way=Case.way)
    return _expected(plain)


@lru_cache(maxsize=4)
def _expected(case: Case) -> list[dict[str, Any]]:
    world, ranks = case.world, range(case.num_ranks)
    outs: list[dict[str, Any]] = [{} for _ in ranks]
    for turn in range(2):
        given = [inputs(case, rank, turn) for rank in ranks]
        layouts = [spec.layout(one.topk_idx, world) for one in given]
        notices = spec.notify(layouts, max(1, case.num_sms // 2))
        received = spec.dispatch(
            [one.x for one in given],
            layouts,
            world,
            topk_idxs=[one.topk_idx for one in given],
            topk_weights=[one.topk_weights for one in given],
            scales=[one.scales for one in given] if case.dtype == FP8 else None,
            expert_alignment=case.expert_alignment,
        )
        ys = [
            fake_experts(got.x, got.topk_idx, got.topk_weights, world.experts_of(r), case.sum_dtype)
            for r, got in enumerate(received)
        ]
        combined = spec.combine(ys, layouts, world, biases=[one.biases for one in given])
        alone = spec.combine(ys, layouts, world)
        weights = spec.combine([got.topk_weights for got in received], layouts, world)
        one_node = world.num_nodes == 1
        for rank, got in enumerate(received):
            named = {
                **layouts[rank]._asdict(),
                "x": got.x,
                "scales": got.scales,
                "topk_idx": got.topk_idx,
                "topk_weights": got.topk_weights,
                "src_idx": got.src_idx,
                "per_expert": [] if case.worst else got.num_tokens_per_expert,
                "send_head": notices[rank].send_head,
                "combined": combined[rank],
                "combined alone": alone[rank],
                "combined weights": weights[rank],
            }
            for field in (
                "rank_prefix_matrix",
                "channel_prefix_matrix",
                "recv_channel_prefix_matrix",
            ):
                named[field] = getattr(notices[rank], field) if one_node else None
            outs[rank].update({f"{turn} {name}": value for name, value in named.items()})
    for out in outs:
        out["cached x"] = out["0 x"]
    return outs
