"""Which rank of a node computes which pairs, in plain loops over arrays of int64.

The set "numba" compiles these functions; the others run them as they are. `spec.balanced` says what
they do. All ranks give the same counts, and so find the same runs.
"""

from __future__ import annotations

import numpy as np

MILLION = 1_000_000
# What `assign` finds of this rank's node, and of this rank: pairs of all its ranks; the most that a
# rank would have without balance, and has; those, and the experts, that this rank borrows.
TOTAL, BEFORE, AFTER, BORROWED, EXPERTS, NUM_FIGURES = range(6)


def count_pairs(ids_P: np.ndarray, counts_E: np.ndarray) -> int:
    """Count the pairs of each expert. -1, or the first pair that is no expert."""
    num_experts = len(counts_E)
    for e in range(num_experts):
        counts_E[e] = 0
    for pair in range(len(ids_P)):
        expert = ids_P[pair]
        if expert < -1 or expert >= num_experts:
            return pair
        if expert >= 0:
            counts_E[expert] += 1
    return -1


def assign(
    counts_RE: np.ndarray,
    owners_E: np.ndarray,
    nodes_R: np.ndarray,
    slack: int,
    rank: int,
    runs_3N: np.ndarray,
    first_E: np.ndarray,
    figures: np.ndarray,
) -> None:
    """List the runs that are lent: `first` has each expert's first run, -1 if it has none, and run
    n is (rank, pairs, next run). `slack` is in millionths.
    """
    size, num_experts = counts_RE.shape
    kept, last = np.zeros(num_experts, np.int64), np.empty(num_experts, np.int64)
    loads = np.zeros(size, np.int64)
    for e in range(num_experts):
        for r in range(size):
            kept[e] += counts_RE[r, e]
        loads[owners_E[e]] += kept[e]
        first_E[e] = -1
    for i in range(NUM_FIGURES):
        figures[i] = 0
    num_runs = 0
    for home in range(size):  # there are no more nodes than ranks
        total, here = np.int64(0), np.int64(0)
        for r in range(size):
            if nodes_R[r] == home:
                total += loads[r]
                here += 1
                if home == nodes_R[rank]:
                    figures[BEFORE] = max(figures[BEFORE], loads[r])
        if here == 0:
            break
        if home == nodes_R[rank]:
            figures[TOTAL] = total
        most = -((-total * (MILLION + slack)) // (here * MILLION))
        for giver in range(size):
            while nodes_R[giver] == home and loads[giver] > most:
                taker = giver
                for r in range(size):
                    if nodes_R[r] == home and (loads[r] < loads[taker]):
                        taker = r
                room = min(loads[giver] - most, most - loads[taker])
                whole, largest = -1, -1
                for e in range(num_experts):
                    if owners_E[e] == giver:
                        if largest < 0 or kept[e] > kept[largest]:
                            largest = e
                        if 0 < kept[e] <= room and (whole < 0 or kept[e] > kept[whole]):
                            whole = e
                expert = largest if whole < 0 else whole
                count = min(kept[expert], room)
                kept[expert] -= count
                loads[giver] -= count
                loads[taker] += count
                runs_3N[0, num_runs], runs_3N[1, num_runs], runs_3N[2, num_runs] = taker, count, -1
                if first_E[expert] < 0:
                    first_E[expert] = num_runs
                else:
                    runs_3N[2, last[expert]] = num_runs
                last[expert] = num_runs
                num_runs += 1
                if taker == rank:
                    figures[BORROWED] += count
                    figures[EXPERTS] += 1
    for r in range(size):
        if nodes_R[r] == nodes_R[rank]:
            figures[AFTER] = max(figures[AFTER], loads[r])


def take_slots(
    ids_P: np.ndarray,
    counts_RE: np.ndarray,
    owners_E: np.ndarray,
    rank: int,
    runs_3N: np.ndarray,
    first_E: np.ndarray,
    slots_RE: np.ndarray,
    out_P: np.ndarray,
) -> None:
    """The slot of each pair of this rank: slots[r, e] is that of expert e on rank r."""
    num_experts = len(owners_E)
    left = np.empty(num_experts, np.int64)  # of the run that an expert's next pair is of
    ranks = owners_E.copy()  # whose run it is
    runs = first_E.copy()  # the run after it
    for e in range(num_experts):
        lent, run = np.int64(0), first_E[e]
        while run >= 0:
            lent += runs_3N[1, run]
            run = runs_3N[2, run]
        left[e] = -lent
        for r in range(rank, len(counts_RE)):  # all that ranks have, but for those of lower ranks
            left[e] += counts_RE[r, e]
    for pair in range(len(ids_P)):
        e = ids_P[pair]
        if e < 0:
            out_P[pair] = -1
            continue
        while left[e] <= 0:  # below 0 where pairs of lower ranks are in later runs, too
            run = runs[e]
            ranks[e], runs[e] = runs_3N[0, run], runs_3N[2, run]
            left[e] += runs_3N[1, run]
        left[e] -= 1
        out_P[pair] = slots_RE[ranks[e], e]
