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
from tokenyard.replicas import Replicas

_NEAR = 1e-9


def rebalance(current: Replicas, load_E: Tensor | np.ndarray, want: float = 1.0) -> Rebalancing:
    """Towards an imbalance of at most `want`; if neither way gets there, the more even one."""
    load = as_loads(load_E, current.num_experts)
    if imbalance_of(current, load) <= want + _NEAR:
        return Rebalancing.between(current, current, load)
    ways = [_step_by_step(current, load, want)]
    if len(set(map(len, current.experts_of_rank))) == 1:  # `place` gives ranks as many slots each
        ways.append(_anew(current, load))
    found = [Rebalancing.between(current, one, load) for one in ways]
    return min(found, key=lambda one: (max(one.after, want + _NEAR), len(one.moves)))


def _anew(current: Replicas, load_E: np.ndarray) -> Replicas:
    fresh = place(load_E, current.num_slots, current.num_ranks)
    shape = (current.num_ranks, current.num_experts)
    has, wants = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for marks, one in ((has, current), (wants, fresh)):
        marks[one.rank_of_slot, one.expert_of_slot] = 1
    common = has @ wants.T  # [rank, shelf]
    given: dict[int, tuple[int, ...]] = {}
    for _ in range(current.num_ranks):
        rank, shelf = divmod(int(common.argmax()), current.num_ranks)
        given[rank] = fresh.experts_of_rank[shelf]
        common[rank], common[:, shelf] = -1, -1
    return Replicas(
        [_keep_slots(held, given[rank]) for rank, held in enumerate(current.experts_of_rank)],
        current.num_experts,
    )


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


def _step_by_step(current: Replicas, load_E: np.ndarray, want: float) -> Replicas:
    slots, rank_of = np.array(current.expert_of_slot), np.array(current.rank_of_slot)
    num_ranks = current.num_ranks
    limit = max(want, 1.0) * load_E.sum() / num_ranks
    for _ in range(4 * current.num_slots):
        copies = np.bincount(slots, minlength=current.num_experts)
        each = (load_E / copies)[slots]
        carried = np.bincount(rank_of, each, num_ranks)
        if carried.max() <= limit * (1.0 + _NEAR):
            break
        steps = [
            _best_swap(slots, rank_of, each, carried, limit),
            _best_copy(slots, rank_of, load_E, carried, limit),
        ]
        gain, changed = max(steps, key=lambda step: step[0])
        if gain <= carried.max() ** 2 * 1e-12:
            break
        for slot, expert in changed:
            slots[slot] = expert
    ends = np.cumsum([len(held) for held in current.experts_of_rank])[:-1]
    return Replicas([held.tolist() for held in np.split(slots, ends)], current.num_experts)


_Step = tuple[float, list[tuple[int, int]]]  # what a move gains, and the slots that change


def _excess(carried: np.ndarray, limit: float) -> np.ndarray:
    return np.maximum(carried - limit, 0.0) ** 2


def _held(slots_P: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """[R, E] bool: does the rank have the expert?"""
    held = np.zeros((num_ranks, slots_P.max() + 1), bool)
    held[rank_of, slots_P] = True
    return held


def _best_swap(
    slots_P: np.ndarray, rank_of: np.ndarray, each_P: np.ndarray, carried: np.ndarray, limit: float
) -> _Step:
    """Swap a slot of the busiest rank with one of another rank."""
    busy = int(carried.argmax())
    mine = np.flatnonzero(rank_of == busy)
    held = _held(slots_P, rank_of, len(carried))
    less = each_P[mine][:, None] - each_P[None]
    there = carried[rank_of][None]
    gain = _excess(carried[busy], limit) + _excess(there, limit)
    gain = gain - _excess(carried[busy] - less, limit) - _excess(there + less, limit)
    gain[:, held[busy, slots_P]] = -np.inf
    gain[held[rank_of][:, slots_P[mine]].T] = -np.inf
    place_, other = divmod(int(gain.argmax()), len(slots_P))
    item = int(mine[place_])
    changed = [(item, int(slots_P[other])), (other, int(slots_P[item]))]
    return float(gain.max()) / 2.0, changed


def _best_copy(
    slots_P: np.ndarray, rank_of: np.ndarray, load_E: np.ndarray, carried: np.ndarray, limit: float
) -> _Step:
    """Give an expert of the busiest rank a copy in a slot whose own expert has others."""
    copies = np.bincount(slots_P, minlength=len(load_E))
    number_RE = np.zeros((len(carried), len(load_E)))
    np.add.at(number_RE, (rank_of, slots_P), 1.0)
    spare = np.flatnonzero(copies[slots_P] > 1)
    old = slots_P[spare]
    # Copies of what such a slot held carry more if it is gone.
    now, then = load_E[old] / copies[old], load_E[old] / (copies[old] - 1)
    without = carried + (then - now)[:, None] * number_RE[:, old].T
    without[np.arange(len(spare)), rank_of[spare]] -= then
    best: _Step = (-np.inf, [])
    for expert in np.unique(slots_P[rank_of == carried.argmax()]):
        free = number_RE[rank_of[spare], expert] == 0
        if not free.any():
            continue
        slots = spare[free]
        share, less = load_E[expert] / copies[expert], load_E[expert] / (copies[expert] + 1)
        after = without[free] - (share - less) * number_RE[:, expert]
        after[np.arange(len(slots)), rank_of[slots]] += less
        gain = _excess(carried, limit).sum() - _excess(after, limit).sum(1)
        if gain.max() > best[0]:
            best = (float(gain.max()), [(int(slots[gain.argmax()]), int(expert))])
    return best
