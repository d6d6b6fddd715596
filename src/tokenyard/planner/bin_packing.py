"""Items of different weights on shelves with as many places each, so that no shelf is heavy.

Largest first, then swaps between the heaviest shelf and others while they help. Swaps only ever
lower the heaviest shelf, so the result is never worse than largest-first alone.
"""

from __future__ import annotations

import numpy as np

_MOST_SWAPS = 20  # for each item


def largest_first(weights_N: np.ndarray, kinds_N: np.ndarray, num_shelves: int) -> np.ndarray:
    """[N]: the shelf of each item, each on the lightest that has a place and none of its kind.

    If every shelf with a place has one of that kind, the lightest of them takes it.

    >>> largest_first(np.array([5.0, 4.0, 3.0, 2.0]), np.arange(4), 2).tolist()
    [0, 1, 1, 0]
    """
    places = np.full(num_shelves, -(-len(weights_N) // num_shelves))
    carried, shelf_of = np.zeros(num_shelves), np.empty(len(weights_N), np.int64)
    holders: dict[int, list[int]] = {}
    for item in np.argsort(-weights_N, kind="stable"):
        held = holders.setdefault(int(kinds_N[item]), [])
        open_S = places > 0
        free_S = open_S.copy()
        free_S[held] = False
        allowed = free_S if free_S.any() else open_S
        shelf = int(np.where(allowed, carried, np.inf).argmin())
        shelf_of[item] = shelf
        carried[shelf] += weights_N[item]
        places[shelf] -= 1
        held.append(shelf)
    return shelf_of


def pack(weights_N: np.ndarray, kinds_N: np.ndarray, num_shelves: int) -> np.ndarray:
    """[N]: the shelf of each item; N is a multiple of num_shelves."""
    assert len(weights_N) % num_shelves == 0, "shelves have as many places each"
    shelf_of = largest_first(weights_N, kinds_N, num_shelves)
    carried = np.bincount(shelf_of, weights_N, num_shelves)
    for _ in range(_MOST_SWAPS * len(weights_N)):
        swap = best_swap(weights_N, kinds_N, shelf_of, carried)
        if swap is None:
            break
        item, other = swap
        heavy, light = shelf_of[item], shelf_of[other]
        shelf_of[item], shelf_of[other] = light, heavy
        less = weights_N[item] - weights_N[other]
        carried[heavy] -= less
        carried[light] += less
    return shelf_of


def best_swap(
    weights_N: np.ndarray, kinds_N: np.ndarray, shelf_of: np.ndarray, carried_S: np.ndarray
) -> tuple[int, int] | None:
    """An item of the heaviest shelf and one of another, whose swap lowers the heavier of the two
    most; None if no swap does.
    """
    heavy = int(carried_S.argmax())
    mine = np.flatnonzero(shelf_of == heavy)
    less = weights_N[mine][:, None] - weights_N[None]  # [mine, N]
    after = np.maximum(carried_S[heavy] - less, carried_S[shelf_of][None] + less)
    after[:, mine] = np.inf
    # One of a kind on a shelf is enough.
    after[:, np.isin(kinds_N, kinds_N[mine])] = np.inf
    for place, item in enumerate(mine):
        holders = shelf_of[kinds_N == kinds_N[item]]
        after[place, np.isin(shelf_of, holders[holders != heavy])] = np.inf
    best = int(after.argmin())
    place, other = divmod(best, len(weights_N))
    if not after[place, other] < carried_S[heavy] * (1.0 - 1e-12):
        return None
    return int(mine[place]), other
