"""What holds of every assignment of pairs to the ranks of a node."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.lanes import random_cases
from tokenyard import spec
from tokenyard.kernels import numba as kernels
from tokenyard.wire import balance as of

SLACKS = st.sampled_from([0.0, 0.05, 0.3, 2.0])


@st.composite
def worlds(draw: st.DrawFn) -> spec.World:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
    owners = draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=20))
    return spec.World(tuple(owners), nodes)


@st.composite
def counts_of(draw: st.DrawFn, world: spec.World) -> list[int]:
    one = st.integers(0, 9) | st.sampled_from([0, 1, 1000])
    return draw(st.lists(one, min_size=world.num_experts, max_size=world.num_experts))


def loads(runs: list[list[spec.Run]], world: spec.World) -> list[int]:
    found = [0] * world.num_ranks
    for run in (run for of_expert in runs for run in of_expert):
        found[run.rank] += run.pairs
    return found


@settings(deadline=None, max_examples=random_cases(100))
@given(st.data(), worlds(), SLACKS)
def test_assignment(data: st.DataObject, world: spec.World, slack: float) -> None:
    counts = data.draw(counts_of(world))
    runs = spec.assign(counts, world, slack)
    before = loads([[spec.Run(r, n)] for r, n in zip(world.rank_of_expert, counts)], world)
    after = loads(runs, world)
    for expert, of_expert in enumerate(runs):
        owner = world.rank_of_expert[expert]
        assert sum(run.pairs for run in of_expert) == counts[expert]  # every pair once
        assert all(run.pairs > 0 for run in of_expert)
        assert len({run.rank for run in of_expert}) == len(of_expert)
        assert owner not in [run.rank for run in of_expert[1:]]  # own pairs first
        assert {world.node_of_rank[run.rank] for run in of_expert} <= {world.node_of_rank[owner]}
    for node in range(world.num_nodes):
        ranks = world.ranks_of(node)
        most = spec.most_pairs(sum(before[r] for r in ranks), len(ranks), slack)
        assert max(after[r] for r in ranks) <= max(most, 0)  # within the slack: always possible
        assert max(after[r] for r in ranks) <= max(before[r] for r in ranks)
        for rank in ranks:  # who has no more than he may gives nothing away
            if before[rank] <= most:
                assert all(
                    len(runs[e]) <= 1 and all(run.rank == rank for run in runs[e])
                    for e in world.experts_of(rank)
                )


@settings(deadline=None, max_examples=random_cases(40))
@given(st.data(), worlds(), SLACKS)
def test_slots_and_kernels(data: st.DataObject, world: spec.World, slack: float) -> None:
    """Every pair has a slot of its expert, and kernels find the spec's, on every rank."""
    num_experts, size = world.num_experts, world.num_ranks
    row = st.lists(st.integers(-1, num_experts - 1), min_size=3, max_size=3)
    topk_idxs = [
        torch.tensor(data.draw(st.lists(row, max_size=5)), dtype=torch.int64).view(-1, 3)
        for _ in range(size)
    ]
    chosen = spec.balance(topk_idxs, world, slack)
    slots = spec.node_slots(world)
    for topk_idx, slot in zip(topk_idxs, chosen):
        experts = torch.tensor([*slots.expert_of_slot, -1])
        assert torch.equal(experts[slot], topk_idx)
    # Counts of (source, expert) alone decide how many pairs of each go where.
    turned = spec.balance([one.flip(0) for one in topk_idxs], world, slack)
    for one, other in zip(chosen, turned):
        assert Counter(one.flatten().tolist()) == Counter(other.flatten().tolist())
    slots_RE = np.full((size, num_experts), -1, np.int64)
    for number, owner in enumerate(slots.physical.rank_of_expert):
        slots_RE[owner, slots.expert_of_slot[number]] = number
    owners_E, nodes_R = (np.array(one) for one in (world.rank_of_expert, world.node_of_rank))
    counts_RE = np.zeros((size, num_experts), np.int64)
    ids = [topk_idx.numpy().reshape(-1) for topk_idx in topk_idxs]
    for source in range(size):
        assert kernels.count_pairs(ids[source], counts_RE[source]) == -1
    for rank in range(size):
        runs_3N = np.empty((3, num_experts + 2 * size), np.int64)
        first_E = np.empty(num_experts, np.int64)
        figures, out = np.empty(of.NUM_FIGURES + size, np.int64), np.empty_like(ids[rank])
        millionths = round(slack * of.MILLION)
        where = owners_E, nodes_R, millionths, rank
        kernels.assign(counts_RE, *where, runs_3N, first_E, figures)
        given = ids[rank], counts_RE, owners_E, rank, runs_3N, first_E, slots_RE
        kernels.take_slots(*given, out)
        assert out.tolist() == chosen[rank].flatten().tolist()
        _check_figures(figures.tolist(), rank, topk_idxs, chosen, world)


def _check_figures(
    figures: list[int],
    rank: int,
    topk_idxs: list[torch.Tensor],
    chosen: list[torch.Tensor],
    world: spec.World,
) -> None:
    slots, near = spec.node_slots(world), world.ranks_of(world.node_of_rank[rank])
    asked = [e for one in topk_idxs for e in one.flatten().tolist() if e >= 0]
    found = [s for one in chosen for s in one.flatten().tolist() if s >= 0]
    before = Counter(world.rank_of_expert[e] for e in asked)
    after = Counter(slots.physical.rank_of_expert[s] for s in found)
    borrowed = [
        slots.expert_of_slot[s]
        for s in found
        if slots.physical.rank_of_expert[s] == rank
        and world.rank_of_expert[slots.expert_of_slot[s]] != rank
    ]
    assert figures[: of.NUM_FIGURES] == [
        sum(before[r] for r in near),
        max(before[r] for r in near),
        max(after[r] for r in near),
        len(borrowed),
        len(set(borrowed)),
    ]


def test_a_bad_expert_is_found() -> None:
    counts_E = np.zeros(3, np.int64)
    assert kernels.count_pairs(np.array([0, 2, -1, 3]), counts_E) == 3
    assert kernels.count_pairs(np.array([0, -2]), counts_E) == 1


@pytest.mark.parametrize("changed", [[5, 1 << 40, -7, 2, 2, 2], [2, 2, 2, 2, 2, 2]])
def test_ids_that_change_after_they_were_counted(changed: list[int]) -> None:
    """As when another thread writes to topk_idx meanwhile: what is found are slots, or -1."""
    world = spec.World((0, 0, 1), (0, 0))
    owners_E, nodes_R = np.array(world.rank_of_expert), np.array(world.node_of_rank)
    counts_RE, slots_RE = np.zeros((2, 3), np.int64), np.arange(6).reshape(2, 3)
    assert kernels.count_pairs(np.zeros(6, np.int64), counts_RE[0]) == -1
    runs_3N, first_E = np.full((3, 7), 1 << 40), np.empty(3, np.int64)
    kernels.assign(
        counts_RE, owners_E, nodes_R, 0, 0, runs_3N, first_E, np.empty(of.NUM_FIGURES + 2, np.int64)
    )
    out = np.full(6, 1 << 40)
    kernels.take_slots(np.array(changed), counts_RE, owners_E, 0, runs_3N, first_E, slots_RE, out)
    assert [slot % 3 if slot >= 0 else -1 for slot in out.tolist()] == [
        e if 0 <= e < 3 else -1 for e in changed
    ]
    assert out.max() < 6
