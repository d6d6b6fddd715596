"""Where experts live, and how many copies each has, for the load that was measured.

A placement is `Replicas`; here it gives each rank as many slots. `place` makes ranks even;
`place_by_nodes` keeps groups of experts on one node each, for routers that choose groups first.
`even_out` changes a placement with few moves, and a `balancer.Balancer` calls it as loads come in.

Copies of an expert share its load evenly on one node. Over several nodes tokens prefer the copies
on their own node (see `copies`), so that copies share evenly only if all are on one node, or as
many on each. With a `topology`, placements are even by that rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard.planner.bin_packing import pack
from tokenyard.planner.copies import nodes_of, slot_loads
from tokenyard.planner.cost import imbalance
from tokenyard.replicas import Moves, Replicas
from tokenyard.topology import Topology

_MOST_HOT = 17  # `place` puts fewer experts than this on every node
_EVEN = 1.002  # an imbalance that `place` does not try to better


def rank_loads(
    placement: Replicas, load_E: Tensor | np.ndarray, topology: Topology | None = None
) -> np.ndarray:
    """[R]: what ranks carry, if the tokens of all ranks choose alike.

    >>> rank_loads(Replicas([[0, 1], [0, 2]]), np.array([4.0, 1.0, 3.0]))
    array([3., 5.])
    """
    load, rank_P = as_loads(load_E, placement.num_experts), np.array(placement.rank_of_slot)
    node_R = nodes_of(placement, topology)
    each_P = slot_loads(np.array(placement.expert_of_slot), rank_P, node_R, load)
    return np.bincount(rank_P, each_P, placement.num_ranks)


def imbalance_of(
    placement: Replicas, load_E: Tensor | np.ndarray, topology: Topology | None = None
) -> float:
    """The load of the busiest rank to the average."""
    return imbalance(rank_loads(placement, load_E, topology))


def as_loads(load_E: Tensor | np.ndarray, num_experts: int) -> np.ndarray:
    """Loads as float64, checked."""
    load = np.asarray(load_E, np.float64)
    if load.shape != (num_experts,):
        raise ValueError(f"loads have shape {list(load.shape)}, want [{num_experts}]")
    if not np.isfinite(load).all() or (load < 0).any():
        raise ValueError("loads: want finite numbers of at least 0")
    return load


def spread_copies(load_E: np.ndarray, num_slots: int, most: int) -> np.ndarray:
    """[E]: how many copies each expert gets: a further slot goes where a copy carries most.

    No expert has more than `most`, the number of ranks: a second copy on a rank helps nobody.

    >>> spread_copies(np.array([6.0, 1.0, 2.0]), 6, most=4).tolist()
    [4, 1, 1]
    """
    copies = np.ones(len(load_E), np.int64)
    for _ in range(num_slots - len(load_E)):
        each = np.where(copies < most, load_E / copies, -1.0)
        copies[each.argmax()] += 1
    return copies


def place(
    load_E: Tensor | np.ndarray, num_slots: int, num_ranks: int, topology: Topology | None = None
) -> Replicas:
    """A placement for these loads. Over several nodes that are alike, the most even of some: copies
    anywhere, or some of the hottest experts on every node and each of the others on one. The more
    are on every node the better, as their tokens need not leave it.
    """
    load = as_loads(load_E, len(load_E))
    num_experts = len(load)
    _check_slots(num_experts, num_slots, num_ranks)
    made = Replicas(_fill(np.arange(num_experts), load, num_slots, num_ranks), num_experts)
    best = imbalance_of(made, load, topology)
    num_nodes = 1 if topology is None else topology.num_nodes
    if num_nodes == 1 or topology != Topology.even(num_ranks, num_ranks // num_nodes):
        return made
    slots, ranks = num_slots // num_nodes, num_ranks // num_nodes
    hottest, node_share = np.argsort(-load, kind="stable"), load.sum() / num_nodes
    for num_hot in reversed(range(min(_MOST_HOT, num_experts))):
        hot, others = hottest[:num_hot], np.sort(hottest[num_hot:])
        most = num_hot + -(-len(others) // num_nodes)  # experts of a node
        least = most - (-len(others)) % num_nodes
        fits = most <= slots <= least * ranks
        if best <= _EVEN or not fits or load[others].max() >= best * node_share:
            continue
        other = _fill_nodes(load, hot, others[:, None], slots, ranks, num_nodes)
        found = imbalance_of(other, load, topology)
        if found < best:
            made, best = other, found
    return made


def place_by_nodes(
    load_E: Tensor | np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int
) -> Replicas:
    """A placement for these loads that keeps groups of consecutive experts together: groups to
    nodes, as many to each, then copies among a node's slots, then slots to its ranks.
    """
    load = as_loads(load_E, len(load_E))
    _check_slots(len(load), num_slots, num_ranks)
    if len(load) % num_groups or num_groups % num_nodes or num_ranks % num_nodes:
        raise ValueError(
            f"{len(load)} experts in {num_groups} groups, {num_ranks} ranks on {num_nodes} nodes: "
            "want groups that divide experts, and nodes that divide groups and ranks"
        )
    groups = np.arange(len(load)).reshape(num_groups, -1)
    slots, ranks = num_slots // num_nodes, num_ranks // num_nodes
    return _fill_nodes(load, groups[:0, 0], groups, slots, ranks, num_nodes)


def _fill_nodes(
    load_E: np.ndarray,
    hot: np.ndarray,
    groups: np.ndarray,
    num_slots: int,
    num_ranks: int,
    num_nodes: int,
) -> Replicas:
    """Hot experts on every node, for its own tokens; each group of the others on one node. A node
    has num_slots and num_ranks.
    """
    weights, no_group = load_E[groups].sum(1), -len(groups) % num_nodes
    weights = np.append(weights, np.zeros(no_group))  # nodes get as many
    node_of_group = pack(weights, np.arange(len(weights)), num_nodes)[: len(groups)]
    load_here = load_E.copy()
    load_here[hot] /= num_nodes
    ranks: list[list[int]] = []
    for node in range(num_nodes):
        experts = np.append(hot, groups[node_of_group == node])
        ranks += _fill(experts, load_here, num_slots, num_ranks)
    return Replicas(ranks, len(load_E))


def _fill(
    experts: np.ndarray, load_E: np.ndarray, num_slots: int, num_ranks: int
) -> list[list[int]]:
    """These experts and their copies, by rank."""
    copies = spread_copies(load_E[experts], num_slots, num_ranks)
    items = np.repeat(experts, copies)
    each = np.repeat(load_E[experts] / copies, copies)
    by_rank = items[np.lexsort((items, pack(each, items, num_ranks)))]
    ranks: list[list[int]] = by_rank.reshape(num_ranks, -1).tolist()
    return ranks


def _check_slots(num_experts: int, num_slots: int, num_ranks: int) -> None:
    if num_slots < num_experts or num_slots % num_ranks:
        raise ValueError(
            f"{num_slots} slots: want at least {num_experts}, one an expert, and a multiple of "
            f"{num_ranks} ranks"
        )
    if num_slots > num_experts * num_ranks:
        raise ValueError(f"{num_slots} slots: want at most {num_experts * num_ranks}")


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
    """A change of placement, and how uneven the load is before and after it."""

    moves: Moves
    before: float  # imbalance
    after: float

    @classmethod
    def between(
        cls,
        old: Replicas,
        new: Replicas,
        load_E: Tensor | np.ndarray,
        topology: Topology | None = None,
    ) -> Rebalancing:
        before, after = (imbalance_of(one, load_E, topology) for one in (old, new))
        moves = old.moves(new, None if topology is None else topology.node_of_rank)
        return cls(moves=moves, before=before, after=after)

    @property
    def placement(self) -> Replicas:
        """The placement to give to `Buffer.rebalance` and `nn.rebalance`."""
        return self.moves.after

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "before": self.before,
            "after": self.after,
            "experts": self.placement.experts_of_rank,
            "moves": [
                {"expert": expert, "source": source._asdict(), "target": target._asdict()}
                for expert, source, target in self.moves.between_ranks
            ],
        }
