"""Change a placement so that loads are as even as asked, with few moves.

Two ways, of which the one with fewer moves is taken. One starts from what is there, and takes the
step that helps most for its moves, again and again: two slots swap experts (two moves), or a slot
that holds a copy which others have too takes a copy of a busy expert (one move). The other places
all experts anew, and gives each rank the shelf that has most of its experts already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tokenyard.planner.balance import Rebalancing, as_loads, imbalance_of, place
from tokenyard.planner.copies import nodes_of, slot_loads
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology

_NEAR = 1e-9


def even_out(
    current: Replicas,
    load_E: Tensor | np.ndarray,
    want: float = 1.0,
    topology: Topology | None = None,
) -> Rebalancing:
    """Towards an imbalance of at most `want`. If neither way gets there, the more even one; if
    neither helps, nothing moves.
    """
    load = as_loads(load_E, current.num_experts)
    if imbalance_of(current, load, topology) <= want + _NEAR:
        return Rebalancing.between(current, current, load, topology)
    node_R = nodes_of(current, topology)
    ways = [current, _step_by_step(current, load, want, node_R)]
    if len(set(map(len, current.experts_of_rank))) == 1:  # `place` gives ranks as many slots each
        fresh = place(load, current.num_slots, current.num_ranks, topology)
        ways.append(_shelves_to_ranks(current, fresh, node_R))
    found = [Rebalancing.between(current, one, load, topology) for one in ways]
    return min(found, key=lambda one: (max(one.after, want + _NEAR), len(one.moves)))


def _shelves_to_ranks(current: Replicas, fresh: Replicas, node_R: np.ndarray) -> Replicas:
    """The fresh placement, with its nodes and then its ranks renumbered so that few experts move:
    what it gives to one node stays on one node.
    """
    shape = (current.num_ranks, current.num_experts)
    has, wants = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for marks, one in ((has, current), (wants, fresh)):
        marks[one.rank_of_slot, one.expert_of_slot] = 1
    common = has @ wants.T  # [rank, shelf]
    node_of_shelf = node_R
    sizes = np.bincount(node_R)
    if (sizes == sizes[0]).all():
        on_node = np.eye(len(sizes), dtype=np.int64)[node_R]
        taken = _most_in_common(on_node.T @ common @ on_node)  # by node, the node of its shelves
        node_of_shelf = np.argsort(taken)[node_R]
    shelf_of = _most_in_common(np.where(node_R[:, None] == node_of_shelf, common, -1))
    return Replicas(
        [
            _keep_slots(held, fresh.experts_of_rank[shelf])
            for held, shelf in zip(current.experts_of_rank, shelf_of)
        ],
        current.num_experts,
    )


def _most_in_common(common_NN: np.ndarray) -> np.ndarray:
    """[N]: for each row a column of its own, the largest number first.

    >>> _most_in_common(np.array([[3, 5], [2, 9]])).tolist()
    [0, 1]
    """
    left, column_of = common_NN.copy(), np.empty(len(common_NN), np.int64)
    for _ in range(len(left)):
        row, column = divmod(int(left.argmax()), len(left))
        column_of[row] = column
        left[row], left[:, column] = -2, -2
    return column_of


def _keep_slots(held: Sequence[int], given: Sequence[int]) -> list[int]:
    """The experts that a rank is given: those that it held stay in their slots.

    >>> _keep_slots(held=[4, 7, 2], given=[2, 5, 4])
    [4, 5, 2]
    """
    new = list(given)
    kept: list[int | None] = []
    for expert in held:
        stays = expert in new
        kept.append(expert if stays else None)
        if stays:
            new.remove(expert)
    return [new.pop(0) if expert is None else expert for expert in kept]


def _step_by_step(
    current: Replicas, load_E: np.ndarray, want: float, node_R: np.ndarray
) -> Replicas:
    rank_P = np.array(current.rank_of_slot)
    held = _Held(np.array(current.expert_of_slot), rank_P, node_R, load_E)
    limit = max(want, 1.0) * load_E.sum() / current.num_ranks
    for _ in range(4 * current.num_slots):
        most = held.carried_R.max()
        if most <= limit * (1.0 + _NEAR):
            break
        gain, changed = max(held.best_swap(limit), held.best_copy(limit), key=lambda one: one[0])
        if gain <= most**2 * 1e-12:
            break
        slots = held.slots_P.copy()
        for slot, expert in changed:
            slots[slot] = expert
        held = _Held(slots, rank_P, node_R, load_E)
    ends = np.cumsum([len(experts) for experts in current.experts_of_rank])[:-1]
    return Replicas([one.tolist() for one in np.split(held.slots_P, ends)], current.num_experts)


_Step = tuple[float, list[tuple[int, int]]]  # what a step gains, and the slots that change


def _excess(carried: np.ndarray, limit: float) -> np.ndarray:
    return np.maximum(carried - limit, 0.0) ** 2


class _Held:
    """The expert in each slot, what slots and ranks carry, and the best step from there.

    Only experts without copies change their node, and a node that has an expert keeps a copy of it:
    so a step changes what the slots of its two experts carry on their nodes, and nothing else.
    """

    def __init__(
        self, slots_P: np.ndarray, rank_P: np.ndarray, node_R: np.ndarray, load_E: np.ndarray
    ) -> None:
        self.slots_P, self._rank_P = slots_P, rank_P
        self._each_P = slot_loads(slots_P, rank_P, node_R, load_E)
        self.carried_R = np.bincount(rank_P, self._each_P, len(node_R))
        self._copies_RE = np.zeros((len(node_R), len(load_E)))
        np.add.at(self._copies_RE, (rank_P, slots_P), 1.0)
        self._busy = int(self.carried_R.argmax())
        self._near_R = node_R == node_R[self._busy]
        self._near_P = self._near_R[rank_P]

    def best_swap(self, limit: float) -> _Step:
        """Swap a slot of the busiest rank with one of another rank."""
        slots_P, busy = self.slots_P, self.carried_R[self._busy]
        mine = np.flatnonzero(self._rank_P == self._busy)
        has_RE, alone_P = self._copies_RE > 0, self._copies_RE.sum(0)[slots_P] == 1
        less = self._each_P[mine][:, None] - self._each_P[None]
        there = self.carried_R[self._rank_P][None]
        gain = _excess(busy, limit) + _excess(there, limit)
        gain = gain - _excess(busy - less, limit) - _excess(there + less, limit)
        gain[:, has_RE[self._busy, slots_P]] = -np.inf
        gain[has_RE[self._rank_P][:, slots_P[mine]].T] = -np.inf
        gain[:, ~self._near_P & ~alone_P] = -np.inf
        gain[np.ix_(~alone_P[mine], ~self._near_P)] = -np.inf
        place_, other = divmod(int(gain.argmax()), len(slots_P))
        item = int(mine[place_])
        changed = [(item, int(slots_P[other])), (other, int(slots_P[item]))]
        return float(gain.max()) / 2.0, changed

    def best_copy(self, limit: float) -> _Step:
        """Give an expert of the busiest rank a copy in a slot of its node whose own expert has
        others there.
        """
        near = np.flatnonzero(self._near_P)
        experts, carried = self.slots_P[near], self.carried_R
        number_RE = self._copies_RE * self._near_R[:, None]  # the node's, as load and copies
        load_E = np.bincount(experts, self._each_P[near], len(number_RE.T))
        copies = number_RE.sum(0)
        spare = near[copies[experts] > 1]
        old, rank_of = self.slots_P[spare], self._rank_P[spare]
        # Copies of what such a slot held carry more if it is gone.
        now, then = load_E[old] / copies[old], load_E[old] / (copies[old] - 1)
        without = carried + (then - now)[:, None] * number_RE[:, old].T
        without[np.arange(len(spare)), rank_of] -= then
        best: _Step = (-np.inf, [])
        for expert in np.unique(self.slots_P[self._rank_P == self._busy]):
            free = number_RE[rank_of, expert] == 0
            if not free.any():
                continue
            slots = spare[free]
            share, less = load_E[expert] / copies[expert], load_E[expert] / (copies[expert] + 1)
            after = without[free] - (share - less) * number_RE[:, expert]
            after[np.arange(len(slots)), rank_of[free]] += less
            gain = _excess(carried, limit).sum() - _excess(after, limit).sum(1)
            if gain.max() > best[0]:
                best = (float(gain.max()), [(int(slots[gain.argmax()]), int(expert))])
        return best
