"""Where experts live, and how many copies each has, for the load that was measured.

A placement is `Replicas`; here it gives each rank as many slots, and copies of an expert share its
load evenly. `place` uses all ranks alike; `place_by_nodes` keeps groups of experts
on one node each, for routers that choose groups first. `rebalance` changes a placement with few
moves, and a `Balancer` calls it by a `Policy` as loads come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard.planner.cost import imbalance
from tokenyard.planner.shelves import pack
from tokenyard.replicas import Moves, Replicas


def rank_loads(placement: Replicas, load_E: Tensor | np.ndarray) -> np.ndarray:
    """[R]: what ranks carry if copies share an expert's load evenly.

    >>> rank_loads(Replicas([[0, 1], [0, 2]]), np.array([4.0, 1.0, 3.0]))
    array([3., 5.])
    """
    each = as_loads(load_E, placement.num_experts) / np.array(placement.num_copies)
    carried = each[np.array(placement.expert_of_slot)]
    return np.bincount(np.array(placement.rank_of_slot), carried, placement.num_ranks)


def imbalance_of(placement: Replicas, load_E: Tensor | np.ndarray) -> float:
    """The load of the busiest rank to the average."""
    return imbalance(rank_loads(placement, load_E))


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


def place(load_E: Tensor | np.ndarray, num_slots: int, num_ranks: int) -> Replicas:
    """For these loads, on ranks that are all alike."""
    load = as_loads(load_E, len(load_E))
    _check_slots(len(load), num_slots, num_ranks)
    experts = np.arange(len(load))
    return Replicas(_fill(experts, load, num_slots, num_ranks), len(load))


def place_by_nodes(
    load_E: Tensor | np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int
) -> Replicas:
    """For these loads, groups of consecutive experts first: groups to nodes, as many to each, then
    copies of a node's experts among its slots, then slots to its ranks.
    """
    load = as_loads(load_E, len(load_E))
    _check_slots(len(load), num_slots, num_ranks)
    if len(load) % num_groups or num_groups % num_nodes or num_ranks % num_nodes:
        raise ValueError(
            f"{len(load)} experts in {num_groups} groups, {num_ranks} ranks on {num_nodes} nodes: "
            "want groups that divide experts, and nodes that divide groups and ranks"
        )
    members = np.arange(len(load)).reshape(num_groups, -1)
    node_of_group = pack(load[members].sum(1), np.arange(num_groups), num_nodes)
    slots_here, ranks_here = num_slots // num_nodes, num_ranks // num_nodes
    ranks: list[list[int]] = []
    for node in range(num_nodes):
        ranks += _fill(members[node_of_group == node].reshape(-1), load, slots_here, ranks_here)
    return Replicas(ranks, len(load))


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
    def between(cls, old: Replicas, new: Replicas, load_E: Tensor | np.ndarray) -> Rebalancing:
        before, after = imbalance_of(old, load_E), imbalance_of(new, load_E)
        return cls(moves=old.moves(new), before=before, after=after)

    @property
    def placement(self) -> Replicas:
        """For `Buffer.rebalance` and `nn.rebalance`."""
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


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to rebalance: every so many steps, if the load since then is uneven enough."""

    every: int = 50
    if_over: float = 1.1  # imbalance
    want: float = 1.05  # imbalance to reach, with as few moves as that takes

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, want at least 1 step")
        if not 1.0 <= self.want <= self.if_over:
            raise ValueError(f"want is {self.want}, want 1.0 to if_over, {self.if_over}")


@dataclass
class Balancer:
    """Closes the loop from measured load to placement. All ranks give it the same loads, and so
    come to the same placement, which keeps the number of slots that it began with.
    """

    placement: Replicas
    policy: Policy = field(default_factory=Policy)
    _load: np.ndarray | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    def observe(self, load_E: Tensor | np.ndarray | Sequence[float]) -> Rebalancing | None:
        """One step's load of every expert. Returns what to change, if it is time to."""
        from tokenyard.planner.rebalance import rebalance

        load = as_loads(np.asarray(load_E), self.placement.num_experts)
        self._load = load if self._load is None else self._load + load
        self._steps += 1
        if self._steps < self.policy.every:
            return None
        measured, self._load, self._steps = self._load, None, 0
        if imbalance_of(self.placement, measured) <= self.policy.if_over:
            return None
        change = rebalance(self.placement, measured, self.policy.want)
        self.placement = change.placement
        return change
