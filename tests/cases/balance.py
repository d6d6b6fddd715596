"""Random exchanges of Buffers with a balance, beside `spec`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard import spec
from tokenyard.testing import assert_same

HIDDEN = 24


@dataclass(frozen=True, kw_only=True)
class Round:
    """One exchange: how many tokens each rank has, and what they choose."""

    seed: int
    tokens: tuple[int, ...]
    num_topk: int
    alignment: int
    spread: float  # 0: all experts are chosen as often; the larger, the more the first ones are

    def given(self, rank: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        draw, num_tokens = torch.Generator().manual_seed(self.seed * 64 + rank), self.tokens[rank]
        chances = torch.arange(1.0, num_experts + 1) ** -self.spread
        chances = chances.expand(max(1, num_tokens), -1)
        ids = torch.multinomial(chances, self.num_topk, generator=draw)[:num_tokens]
        ids[torch.rand(ids.shape, generator=draw) < 0.1] = -1
        x = torch.randn(num_tokens, HIDDEN, generator=draw).bfloat16()
        return x, ids, torch.rand(ids.shape, generator=draw)


@dataclass(frozen=True, kw_only=True)
class Case:
    owners: tuple[int, ...]
    nodes: tuple[int, ...]  # of the ranks
    transport: str
    slack: float
    rounds: tuple[Round, ...]

    @property
    def world(self) -> spec.World:
        return spec.World(self.owners, self.nodes)

    @property
    def is_balanced(self) -> bool:
        """Whether some rank has a neighbour."""
        return len(set(self.nodes)) < len(self.nodes)

    @property
    def slots(self) -> spec.World:
        return spec.node_slots(self.world).physical if self.is_balanced else self.world


def draw_case(number: int, transport: str, num_ranks: int, num_rounds: int) -> Case:
    draw = random.Random(number)
    sizes: list[int] = []
    while sum(sizes) < num_ranks:
        most = num_ranks - sum(sizes)
        sizes.append(draw.randint(1, most) if transport in ("hierarchical", "collective") else most)
    num_experts = draw.choice([1, 3, 8, 13, 40])
    owners = [draw.randrange(num_ranks) for _ in range(num_experts)]
    if draw.random() < 0.5:
        owners = list(spec.World.even(num_experts, num_ranks).rank_of_expert)
    rounds = [
        Round(
            seed=draw.randrange(1 << 40),
            tokens=tuple(draw.choice([0, 1, 2, 7, 12]) for _ in range(num_ranks)),
            num_topk=draw.randint(1, min(num_experts, 6)),
            alignment=draw.choice([1, 1, 4]),
            spread=draw.choice([0.0, 1.0, 1.5, 4.0]),
        )
        for _ in range(num_rounds)
    ]
    return Case(
        owners=tuple(owners),
        nodes=tuple(node for node, size in enumerate(sizes) for _ in range(size)),
        transport=transport,
        slack=draw.choice([0.0, 0.0, 0.05, 0.3]),
        rounds=tuple(rounds),
    )


def open_buffer(group: Any, case: Case) -> tokenyard.Buffer:
    sizes = [case.nodes.count(node) for node in sorted(set(case.nodes))]
    return tokenyard.Buffer(
        group,
        transport=case.transport,
        ranks_per_node=sizes,
        placement=torch.tensor(case.owners),
        balance=case.slack or "exact",
    )


def experts(x: Tensor, offsets: Tensor, ids: list[int]) -> Tensor:
    """Each row times its expert's number and one."""
    y, begin = torch.zeros_like(x), 0
    for expert, end in zip(ids, offsets.tolist(), strict=True):
        y[begin:end] = x[begin:end] * (expert + 1)
        begin = end
    return y


def job(group: Any, case: Case) -> list[dict[str, Any]]:
    """All rounds by expert, by source, and by an exchange that was prepared."""
    outs, num_experts = [], len(case.owners)
    with open_buffer(group, case) as buffer:
        assert buffer.balance == (case.slack if case.is_balanced else None)
        ids = buffer.get_node_experts(num_experts)
        assert buffer.get_local_experts(num_experts) == case.world.experts_of(buffer.rank)
        for turn in case.rounds:
            given, out = turn.given(buffer.rank, num_experts), dict[str, Any]()
            more: dict[str, Any] = {"num_experts": num_experts, "expert_alignment": turn.alignment}
            got: Any = buffer.dispatch_by_expert(*given, **more)
            y = experts(got.x, got.offsets, ids)
            out |= {"x": got.x, "offsets": got.offsets}
            out["sums"] = buffer.combine_by_expert(y, got.handle)
            x, topk_idx, weights = given
            plain: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, **more)
            out |= {"rows": plain.recv_x, "ids": plain.recv_topk_idx}
            out["plain sums"] = buffer.combine(plain.recv_x, plain.handle).x
            step = buffer.prepare(max_tokens=12, hidden=HIDDEN, num_topk=turn.num_topk, **more)
            prepared = step.dispatch(*given)
            assert_same(prepared.x, got.x, "prepared rows")
            out["prepared sums"] = step.combine(experts(prepared.x, prepared.offsets, ids))
            outs.append(out)
    return outs


def expected(case: Case, turn: Round) -> list[dict[str, Any]]:
    """What `spec` says, by rank."""
    world, slots, ranks = case.world, case.slots, range(len(case.nodes))
    xs, asked, weights = zip(*(turn.given(rank, len(case.owners)) for rank in ranks))
    chosen = spec.balance(asked, world, case.slack) if case.is_balanced else list(asked)
    received = spec.dispatch_by_expert(xs, chosen, slots, expert_alignment=turn.alignment)
    held = spec.node_slots(world).experts_of_rank if case.is_balanced else None
    ids = [world.experts_of(rank) if held is None else list(held[rank]) for rank in ranks]
    ys = [experts(got.x, got.offsets, own) for got, own in zip(received, ids)]
    sums = spec.combine_by_expert(ys, received, chosen, slots, topk_weights=weights)
    layouts = [spec.layout(one, slots) for one in chosen]
    plain = spec.dispatch(xs, layouts, slots, topk_idxs=chosen, topk_weights=weights)
    plain_sums = spec.combine([got.x for got in plain], layouts, slots)
    return [
        {
            "x": received[rank].x,
            "offsets": received[rank].offsets,
            "sums": sums[rank],
            "prepared sums": sums[rank],
            "rows": plain[rank].x,
            "ids": plain[rank].topk_idx,
            "plain sums": plain_sums[rank],
        }
        for rank in ranks
    ]


def check(case: Case, outs: list[list[dict[str, Any]]]) -> None:
    for number, turn in enumerate(case.rounds):
        for rank, want in enumerate(expected(case, turn)):
            for name, value in want.items():
                got = outs[rank][number][name]
                assert_same(got, value, f"round {number}, rank {rank}: {name}")
