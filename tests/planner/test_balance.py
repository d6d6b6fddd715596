"""Placements with copies: how even they are, and how little changes."""

from __future__ import annotations

import numpy as np
import pytest

from tokenyard.planner.balance import (
    imbalance_of,
    place,
    place_by_nodes,
    rank_loads,
    spread_copies,
)
from tokenyard.planner.balancer import Balancer, Policy
from tokenyard.planner.bin_packing import largest_first, pack
from tokenyard.planner.copies import expected_traffic
from tokenyard.planner.even_out import even_out
from tokenyard.replicas import Moves, Replicas
from tokenyard.topology import Topology


def zipf(num_experts: int, seed: int = 0, exponent: float = 1.0) -> np.ndarray:
    share = 1.0 / np.arange(1, num_experts + 1) ** exponent
    return np.random.default_rng(seed).permutation(share)


# The example of EPLB's README: loads of two layers, and the experts that it places in 16 slots.
EPLB_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
EPLB_SLOTS = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


@pytest.mark.parametrize("layer", [0, 1])
def test_at_least_as_even_as_eplbs_example(layer: int) -> None:
    load = np.array(EPLB_LOADS[layer], float)
    theirs = Replicas(np.array(EPLB_SLOTS[layer]).reshape(8, 2))
    ours = place_by_nodes(load, num_slots=16, num_ranks=8, num_nodes=2, num_groups=4)
    assert imbalance_of(ours, load) <= imbalance_of(theirs, load) + 1e-12
    assert imbalance_of(place(load, 16, 8), load) <= imbalance_of(ours, load) + 1e-12
    # A group's experts are on one node.
    for group in range(4):
        experts = range(3 * group, 3 * group + 3)
        assert len({slot.rank // 4 for expert in experts for slot in ours.slots_of(expert)}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_zipf_load_on_32_ranks_with_32_spare_slots(seed: int) -> None:
    load = zipf(256, seed)
    made = place(load, 288, 32)
    assert imbalance_of(Replicas.even(256, 32), load) > 3
    assert imbalance_of(made, load) <= 1.05
    _check_slots(made)


def _check_slots(made: Replicas) -> None:
    """Ranks have as many slots, and no rank has two of one expert. (Replicas hold all experts.)"""
    for experts in made.experts_of_rank:
        assert len(set(experts)) == len(experts) == made.num_slots // made.num_ranks


@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_largest_first(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    num_ranks = int(numbers.integers(2, 9))
    num_experts = num_ranks * int(numbers.integers(1, 5))
    num_slots = num_experts + num_ranks * int(numbers.integers(0, 2))
    load = numbers.pareto(1.0, num_experts) * numbers.integers(0, 2, num_experts) + 0.1
    made = place(load, num_slots, num_ranks)
    _check_slots(made)
    copies = spread_copies(load, num_slots, num_ranks)
    items, each = np.repeat(np.arange(num_experts), copies), np.repeat(load / copies, copies)
    greedy = np.bincount(largest_first(each, items, num_ranks), each)
    assert rank_loads(made, load).max() <= greedy.max() + 1e-9
    assert rank_loads(made, load).sum() == pytest.approx(load.sum())


@pytest.mark.parametrize("num_ranks, per_node", [(32, 8), (64, 8), (16, 2)], ids=str)
def test_loads_are_even_over_nodes_that_prefer_their_own_copies(
    num_ranks: int, per_node: int
) -> None:
    load, topology = zipf(256), Topology.even(num_ranks, per_node)
    num_slots = 256 + num_ranks
    regardless = place(load, num_slots, num_ranks)
    made = place(load, num_slots, num_ranks, topology)
    assert imbalance_of(regardless, load) <= 1.01 < 1.03 < imbalance_of(regardless, load, topology)
    assert imbalance_of(made, load, topology) <= 1.01
    _check_slots(made)
    # Tokens of hot experts need not leave their node.
    node_R = np.array(topology.node_of_rank)
    inside = [
        expected_traffic(one, load, topology)[node_R[:, None] == node_R].sum() / load.sum()
        for one in (regardless, made)
    ]
    assert inside[1] > 1.2 * inside[0]
    drifted = load * np.random.default_rng(1).uniform(0.6, 1.6, 256)
    change = even_out(made, drifted, 1.05, topology)
    assert change.before == pytest.approx(imbalance_of(made, drifted, topology))
    assert change.before > 1.1
    assert change.after <= 1.05 + 1e-9
    _check_slots(change.placement)
    _check_slots_stay(change.moves)


def test_nodes_of_different_sizes_are_placed_as_well() -> None:
    load, topology = zipf(32), Topology.of_sizes([4, 2, 2])
    made = place(load, 40, 8, topology)
    _check_slots(made)
    change = even_out(made, np.roll(load, 5), 1.05, topology)
    assert change.after < change.before


def test_swaps_help_where_largest_first_fails() -> None:
    weights, kinds = np.array([3.0, 3.0, 2.0, 2.0, 2.0, 0.0]), np.arange(6)
    assert np.bincount(largest_first(weights, kinds, 2), weights).max() == 7.0
    assert np.bincount(pack(weights, kinds, 2), weights).max() == 6.0


def test_rebalancing_moves_few_experts() -> None:
    """The load drifts a little: a few slots change, where a placement anew would move most."""
    load = zipf(256)
    current = place(load, 288, 32)
    drifted = load * np.random.default_rng(1).uniform(0.6, 1.6, 256)
    change = even_out(current, drifted, want=1.05)
    assert change.before == pytest.approx(imbalance_of(current, drifted))
    assert change.before > 1.14
    assert change.after <= 1.05
    anew = place(drifted, 288, 32)
    assert len(change.moves) < 0.1 * len(current.moves(anew))
    _check_slots(change.placement)
    _check_slots_stay(change.moves)


def _check_slots_stay(moves: Moves) -> None:
    """What does not travel stays in its slot: no rank copies weights from one slot to another."""
    for rank, sources in enumerate(moves.sources):
        for local, source in enumerate(sources):
            assert source.rank != rank or source.local == local


def test_ranks_with_different_numbers_of_slots_keep_them() -> None:
    current, load = Replicas([[0, 1, 2], [3, 4], [5, 0]]), np.array([1.0, 2.0, 6.0, 1.0, 1.0, 1.0])
    change = even_out(current, load, want=1.5)
    assert change.after < change.before
    assert [len(held) for held in change.placement.experts_of_rank] == [3, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_no_change_makes_ranks_less_even(seed: int) -> None:
    """Any nodes, ranks with any numbers of slots, also two of one expert."""
    numbers = np.random.default_rng(seed)
    num_ranks, num_experts = int(numbers.integers(1, 13)), int(numbers.integers(1, 40))
    topology = Topology.from_marks(numbers.integers(0, 4, num_ranks).tolist())
    experts = np.append(np.arange(num_experts), numbers.integers(0, num_experts, 6))
    rank_P = numbers.integers(0, num_ranks, len(experts))
    current = Replicas([experts[rank_P == rank] for rank in range(num_ranks)])
    load = numbers.pareto(1.0, num_experts) * numbers.integers(0, 2, num_experts)
    change = even_out(current, load, 1.05, topology)
    assert change.after <= max(change.before, 1.05)
    assert change.before == pytest.approx(imbalance_of(current, load, topology))
    assert change.after == pytest.approx(imbalance_of(change.placement, load, topology))
    sizes = [list(map(len, one.experts_of_rank)) for one in (current, change.placement)]
    assert sizes[0] == sizes[1]


def test_a_balancer_that_cannot_help_says_nothing() -> None:
    balancer = Balancer(Replicas.even(2, 2), Policy(every=1))
    assert balancer.observe(np.array([3.0, 1.0])) is None


def test_less_gain_takes_fewer_moves() -> None:
    load = zipf(64, 3)
    current = Replicas.even(64, 8, 72)
    counts = [len(even_out(current, load, want).moves) for want in (1.5, 1.2, 1.05)]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[2]


def test_a_placement_that_is_even_enough_stays() -> None:
    current = Replicas.even(8, 4)
    change = even_out(current, np.ones(8), want=1.0)
    assert (len(change.moves), change.before, change.after) == (0, 1.0, 1.0)
    assert change.placement is current


def test_the_policy_closes_the_loop() -> None:
    """A router drifts; loads come in step by step, and the placement follows when it must."""
    balancer = Balancer(Replicas.even(32, 4, 36), Policy(every=5, if_over=1.2, want=1.05))
    numbers, changes = np.random.default_rng(0), []
    for step in range(40):
        load = np.roll(zipf(32, 1), step // 20) * numbers.uniform(0.95, 1.05, 32)
        change = balancer.observe(load)
        if change is not None:
            changes.append(step)
            assert change.before > 1.2 > 1.06 > change.after
            assert change.placement is balancer.placement
    assert changes[0] == 4  # at once, then only when the load has moved on
    assert 24 in changes
    assert len(changes) <= 3


def test_mistakes_say_what_is_wanted() -> None:
    with pytest.raises(ValueError, match="10 slots: want at least 8, one an expert, and a mult"):
        place(np.ones(8), 10, 4)
    with pytest.raises(ValueError, match="loads: want finite numbers of at least 0"):
        place(np.array([1.0, -1.0]), 2, 2)
    with pytest.raises(ValueError, match=r"loads have shape \[3\], want \[8\]"):
        imbalance_of(Replicas.even(8, 2), np.ones(3))
    with pytest.raises(ValueError, match="nodes that divide groups and ranks"):
        place_by_nodes(np.ones(8), 8, 4, num_nodes=3, num_groups=4)
    with pytest.raises(ValueError, match="every is 0, want at least 1 step"):
        Policy(every=0)
