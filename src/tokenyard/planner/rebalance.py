"""Change a placement so that loads are as even as asked, with few moves.

Two ways, of which the one with fewer moves is taken. One starts from what is there, and takes the
step that helps most for its moves, again and again: two slots swap experts (two moves), or a slot
that holds a copy which others have too takes a copy of a busy expert (one move). The other places
all experts anew, and gives each rank the shelf that has most of its experts already.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenyard.planner.balance import Move, Rebalancing, SlotPlacement, as_loads, place

_NEAR = 1e-9


def rebalance(
    current: SlotPlacement, load_E: Tensor | np.ndarray, want: float = 1.0
) -> Rebalancing:
    """Towards an imbalance of at most `want`; if neither way gets there, the more even one."""
    load = as_loads(load_E, current.num_experts)
    before = current.imbalance(load)
    if before <= want + _NEAR:
        return Rebalancing(placement=current, moves=[], before=before, after=before)
    ways = [_step_by_step(current, load, want), _anew(current, load)]
    found = []
    for one in ways:
        after = one.imbalance(load)
        found.append(
            Rebalancing(placement=one, moves=moves(current, one), before=before, after=after)
        )
    return min(found, key=lambda one: (max(one.after, want + _NEAR), len(one.moves)))


def moves(old: SlotPlacement, new: SlotPlacement) -> list[Move]:
    """Slots whose rank had no copy of their expert before. Sources take turns."""
    before = old.physical_to_logical.reshape(old.num_ranks, -1).tolist()
    after = new.physical_to_logical.reshape(new.num_ranks, -1).tolist()
    holders: dict[int, list[int]] = {}
    for rank, experts in enumerate(before):
        for expert in experts:
            holders.setdefault(expert, []).append(rank)
    found = []
    for rank, experts in enumerate(after):
        for place_, expert in enumerate(experts):
            if expert not in before[rank]:
                sources = holders[expert]
                sources.append(sources.pop(0))
                found.append(Move(expert, sources[-1], rank, rank * len(experts) + place_))
    return found


def _anew(current: SlotPlacement, load_E: np.ndarray) -> SlotPlacement:
    fresh = place(load_E, current.num_slots, current.num_ranks)
    shape = (current.num_ranks, current.num_experts)
    has, wants = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for marks, one in ((has, current), (wants, fresh)):
        marks[one.rank_of_slot.numpy(), one.physical_to_logical.numpy()] = 1
    common = has @ wants.T  # [rank, shelf]
    shelves = fresh.physical_to_logical.numpy().reshape(current.num_ranks, -1)
    given = np.empty_like(shelves)
    for _ in range(current.num_ranks):
        rank, shelf = divmod(int(common.argmax()), current.num_ranks)
        given[rank] = shelves[shelf]
        common[rank], common[:, shelf] = -1, -1
    return _keep_places(current, given)


def _keep_places(current: SlotPlacement, given_RS: np.ndarray) -> SlotPlacement:
    """Experts that stay on a rank stay in their slots."""
    old = current.physical_to_logical.numpy().reshape(current.num_ranks, -1)
    kept = np.full_like(old, -1)
    for rank, experts in enumerate(given_RS.tolist()):
        for place_, expert in enumerate(old[rank].tolist()):
            if expert in experts:
                kept[rank, place_] = expert
                experts.remove(expert)
        kept[rank, kept[rank] == -1] = experts
    return SlotPlacement(torch.from_numpy(kept.reshape(-1)), current.num_experts, current.num_ranks)


def _step_by_step(current: SlotPlacement, load_E: np.ndarray, want: float) -> SlotPlacement:
    slots = current.physical_to_logical.numpy().copy()
    rank_of = current.rank_of_slot.numpy()
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
    return SlotPlacement(torch.from_numpy(slots), current.num_experts, num_ranks)


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
