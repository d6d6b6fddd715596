"""Where experts live, and how many copies each has, for the load that was measured.

A placement gives each rank as many *slots*; a slot holds one copy of an expert, and copies of an
expert share its load evenly. `place` uses all ranks alike; `place_by_nodes` keeps groups of experts
on one node each, for routers that choose groups first. `rebalance` changes a placement with few
moves, and a `Balancer` calls it by a `Policy` as loads come in. Letters besides those of `types`:
P slots of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.planner.cost import imbalance
from tokenyard.planner.shelves import pack


@dataclass(frozen=True, eq=False)
class SlotPlacement:
    """The expert in each slot. Slots are numbered by rank: rank r has r * P/R and the next."""

    physical_to_logical: Tensor  # [P] int64
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        experts = self.physical_to_logical
        if experts.dtype != torch.int64 or experts.dim() != 1:
            raise ValueError("physical_to_logical: want int64 [slots]")
        if len(experts) == 0 or len(experts) % self.num_ranks:
            raise ValueError(f"{len(experts)} slots: want a multiple of {self.num_ranks} ranks")
        found = np.bincount(experts.numpy(), minlength=self.num_experts)
        if len(found) > self.num_experts or not found.all():
            raise ValueError(f"want each of {self.num_experts} experts in a slot at least")

    @staticmethod
    def even(num_experts: int, num_ranks: int, num_slots: int | None = None) -> SlotPlacement:
        """Experts in order; slots that are left over hold copies of the first ones.

        >>> SlotPlacement.even(4, 2, 6).physical_to_logical.tolist()
        [0, 1, 2, 3, 0, 1]
        """
        num_slots = num_experts if num_slots is None else num_slots
        return SlotPlacement(torch.arange(num_slots) % num_experts, num_experts, num_ranks)

    @property
    def num_slots(self) -> int:
        return len(self.physical_to_logical)

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def rank_of_slot(self) -> Tensor:
        """[P] int64."""
        return torch.arange(self.num_slots) // self.slots_per_rank

    @property
    def num_copies(self) -> Tensor:
        """[E] int64."""
        return torch.bincount(self.physical_to_logical, minlength=self.num_experts)

    def rank_loads(self, load_E: Tensor | np.ndarray) -> np.ndarray:
        """[R]: what ranks carry if copies share an expert's load evenly.

        >>> SlotPlacement(torch.tensor([0, 1, 0, 2]), 3, 2).rank_loads(np.array([4.0, 1.0, 3.0]))
        array([3., 5.])
        """
        experts = self.physical_to_logical.numpy()
        each = as_loads(load_E, self.num_experts)[experts] / self.num_copies.numpy()[experts]
        return each.reshape(self.num_ranks, -1).sum(1)

    def imbalance(self, load_E: Tensor | np.ndarray) -> float:
        """The load of the busiest rank to the average."""
        return imbalance(self.rank_loads(load_E))


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


def place(load_E: Tensor | np.ndarray, num_slots: int, num_ranks: int) -> SlotPlacement:
    """For these loads, on ranks that are all alike."""
    load = as_loads(load_E, len(load_E))
    _check_slots(len(load), num_slots, num_ranks)
    experts = np.arange(len(load))
    filled = _fill(experts, load, num_slots, num_ranks)
    return SlotPlacement(torch.from_numpy(filled), len(load), num_ranks)


def place_by_nodes(
    load_E: Tensor | np.ndarray, num_slots: int, num_ranks: int, num_nodes: int, num_groups: int
) -> SlotPlacement:
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
    filled = [
        _fill(
            members[node_of_group == node].reshape(-1),
            load,
            num_slots // num_nodes,
            num_ranks // num_nodes,
        )
        for node in range(num_nodes)
    ]
    return SlotPlacement(torch.from_numpy(np.concatenate(filled)), len(load), num_ranks)


def _fill(experts: np.ndarray, load_E: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """[slots]: these experts and their copies, by rank."""
    copies = spread_copies(load_E[experts], num_slots, num_ranks)
    items = np.repeat(experts, copies)
    each = np.repeat(load_E[experts] / copies, copies)
    return items[np.lexsort((items, pack(each, items, num_ranks)))]


def _check_slots(num_experts: int, num_slots: int, num_ranks: int) -> None:
    if num_slots < num_experts or num_slots % num_ranks:
        raise ValueError(
            f"{num_slots} slots: want at least {num_experts}, one an expert, and a multiple of "
            f"{num_ranks} ranks"
        )
    if num_slots > num_experts * num_ranks:
        raise ValueError(f"{num_slots} slots: want at most {num_experts * num_ranks}")


class Move(NamedTuple):
    """A slot that gets another expert, whose weights a rank has that held it before."""

    expert: int
    source: int
    rank: int
    slot: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Rebalancing:
    placement: SlotPlacement
    moves: list[Move]
    before: float  # imbalance
    after: float


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
    come to the same placement.
    """

    placement: SlotPlacement
    policy: Policy = field(default_factory=Policy)
    _load: np.ndarray | None = None
    _steps: int = 0

    def observe(self, load_E: Tensor | np.ndarray | Sequence[float]) -> Rebalancing | None:
        """One step's load of every expert. Returns what to change, if it is time to."""
        from tokenyard.planner.rebalance import rebalance

        load = as_loads(np.asarray(load_E), self.placement.num_experts)
        self._load = load if self._load is None else self._load + load
        self._steps += 1
        if self._steps < self.policy.every:
            return None
        measured, self._load, self._steps = self._load, None, 0
        if self.placement.imbalance(measured) <= self.policy.if_over:
            return None
        change = rebalance(self.placement, measured, self.policy.want)
        self.placement = change.placement
        return change
