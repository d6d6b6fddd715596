"""Copies are chosen as a Buffer chooses them, and shared as the planner expects."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cases.replicas import SLOTS
from tokenyard import spec
from tokenyard.engine.balanced import shared_out
from tokenyard.engine.choice import Choice
from tokenyard.planner.copies import BalancedChooser, CopyChooser, dealt, expected_traffic, shares
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology


def chosen_by_buffers(placement: Replicas, topology: Topology, topk_TK: np.ndarray) -> np.ndarray:
    """[T, K]: the ranks to which Buffers send tokens that are dealt out; -1 stays -1."""
    source_T, found = dealt(len(topk_TK), placement.num_ranks), []
    ranks = np.append(np.array(placement.rank_of_slot), -1)
    for rank in range(placement.num_ranks):
        choice = Choice(placement, rank, topology.node_of_rank)
        mine = torch.from_numpy(topk_TK[source_T == rank])
        found.append(ranks[choice(mine).numpy()])
    return np.concatenate(found)


@pytest.mark.parametrize("nodes", [[4], [2, 2], [1, 1, 1, 1], [3, 1], [0, 1, 0, 1]], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 3, 50])
def test_ranks_are_those_that_buffers_choose(nodes: list[int], num_tokens: int) -> None:
    placement = Replicas(SLOTS[4])
    topology = Topology(tuple(nodes)) if 0 in nodes else Topology.of_sizes(nodes)
    numbers = np.random.default_rng(num_tokens)
    topk_idx = numbers.integers(-1, placement.num_experts, (num_tokens, 3))
    got = CopyChooser(placement, topology).ranks(topk_idx)
    want = chosen_by_buffers(placement, topology, topk_idx)
    assert np.where(got == 4, -1, got).tolist() == want.tolist()


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_traffic_is_what_many_tokens_send(per_node: int) -> None:
    placement, topology = Replicas(SLOTS[4]), Topology.even(4, per_node)
    load = np.arange(1.0, placement.num_experts + 1.0)
    odds = load / load.sum()
    topk_idx = np.random.default_rng(0).choice(len(load), (40_000, 1), p=odds)
    sent = np.zeros((4, 4))
    np.add.at(
        sent, (dealt(len(topk_idx), 4), CopyChooser(placement, topology).ranks(topk_idx)[:, 0]), 1
    )
    expected = expected_traffic(placement, odds, topology)
    assert sent / len(topk_idx) == pytest.approx(expected, abs=0.005)
    assert expected.sum() == pytest.approx(1.0)


def test_all_of_an_expert_is_shared() -> None:
    placement = Replicas(SLOTS[4])
    experts, ranks = np.array(placement.expert_of_slot), np.array(placement.rank_of_slot)
    for per_node in (1, 2, 4):
        for share_P in shares(experts, ranks // per_node, 4 // per_node):
            assert np.bincount(experts, share_P) == pytest.approx(np.ones(6))


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks hold experts, want 4"):
        CopyChooser(Replicas.even(4, 2), Topology.even(4, 2))


@pytest.mark.parametrize("per_node", [2, 4])
def test_choices_with_a_balance_are_those_of_the_specification(per_node: int) -> None:
    chances = 1 / torch.arange(1.0, 13).expand(50, -1)
    topk_idx = torch.multinomial(chances, 3, generator=torch.Generator().manual_seed(0))
    topk_idx[::7, 1] = -1
    placement, topology = Replicas.even(12, 4), Topology.even(4, per_node)
    ranks = BalancedChooser(placement, topology, 0.05).ranks(topk_idx.numpy())
    world = spec.World.even(12, 4, per_node)
    source = torch.from_numpy(dealt(50, 4))
    wanted = spec.balance([topk_idx[source == rank] for rank in range(4)], world, 0.05)
    owners = torch.tensor([*spec.node_slots(world).physical.rank_of_expert, 4])
    assert ranks.tolist() == owners[torch.cat(wanted)].tolist()
    pairs = np.bincount(ranks[ranks < 4], minlength=4)
    by_owner = np.bincount(topk_idx[topk_idx >= 0] // 3, minlength=4)
    busiest, borrowed = shared_out(by_owner[None], np.array(topology.node_of_rank), 0.05)
    assert busiest[0] == pairs.max() < by_owner.max()
    home = np.append(np.arange(12) // 3, 4)[topk_idx.numpy()]  # -1 finds the last
    assert borrowed[0] == (ranks != home).sum() > 0
