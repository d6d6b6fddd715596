"""Which rank of a node computes which pairs, as `spec.balanced` says.

All ranks have the same counts, and so find the same runs. `balance_call` is a whole call, for ranks
that share memory.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import carray, int64

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.meet import Call, meet
from tokenyard.kernels.numba.llvm.pointers import INT64, pointer
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import balance as of
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.verdicts import BAD, DONE, STRAY

_MOST_PAIRS = np.int64(1) << 31


@njit(nogil=True, cache=True)
def count_pairs(ids_P, counts_E):
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


@njit(nogil=True, cache=True)
def _find_stray(counts_RE):
    """The first rank that has told of more pairs than there can be, or of less than none; or -1."""
    for r in range(len(counts_RE)):
        total = np.int64(0)
        for e in range(counts_RE.shape[1]):
            if counts_RE[r, e] < 0 or counts_RE[r, e] > _MOST_PAIRS:
                return r
            total += counts_RE[r, e]
        if total > _MOST_PAIRS:
            return r
    return -1


@njit(nogil=True, cache=True)
def _find_loads(counts_RE, owners_E, nodes_R, slack, kept_E, loads_R, most_R):
    """The pairs of each expert, and of each rank by owner; and the most that a rank may have."""
    size, num_experts = counts_RE.shape
    for e in range(num_experts):
        for r in range(size):
            kept_E[e] += counts_RE[r, e]
        loads_R[owners_E[e]] += kept_E[e]
    for r in range(size):
        total, here = np.int64(0), np.int64(0)
        for other in range(size):
            if nodes_R[other] == nodes_R[r]:
                total += loads_R[other]
                here += 1
        most_R[r] = -((-total * (of.MILLION + slack)) // (here * of.MILLION))


@njit(nogil=True, cache=True)
def _choose_expert(kept_E, owners_E, giver, room):
    """Of the giver's experts whose pairs fit the room the one with most, or else of all of them."""
    whole, largest = -1, -1
    for e in range(len(kept_E)):
        if owners_E[e] == giver:
            if largest < 0 or kept_E[e] > kept_E[largest]:
                largest = e
            if 0 < kept_E[e] <= room and (whole < 0 or kept_E[e] > kept_E[whole]):
                whole = e
    return largest if whole < 0 else whole


@njit(nogil=True, cache=True)
def assign(counts_RE, owners_E, nodes_R, slack, rank, runs_3N, first_E, figures):
    """List the runs that are lent: `first` has each expert's first run, -1 if it has none, and run
    n is (rank, pairs, next run). `slack` is in millionths.
    """
    size, num_experts = counts_RE.shape
    kept, last = np.zeros(num_experts, np.int64), np.empty(num_experts, np.int64)
    loads, most = np.zeros(size, np.int64), np.empty(size, np.int64)
    _find_loads(counts_RE, owners_E, nodes_R, slack, kept, loads, most)
    for i in range(len(figures)):
        figures[i] = 0
    for r in range(size):
        if nodes_R[r] == nodes_R[rank]:
            figures[of.TOTAL] += loads[r]
            figures[of.BEFORE] = max(figures[of.BEFORE], loads[r])
    for e in range(num_experts):
        first_E[e] = -1
    n = 0
    for giver in range(size):
        while loads[giver] > most[giver]:
            taker = giver
            for r in range(size):
                if nodes_R[r] == nodes_R[giver] and loads[r] < loads[taker]:
                    taker = r
            room = min(loads[giver] - most[giver], most[taker] - loads[taker])
            e = _choose_expert(kept, owners_E, giver, room)
            count = min(kept[e], room)
            kept[e] -= count
            loads[giver] -= count
            loads[taker] += count
            runs_3N[0, n], runs_3N[1, n], runs_3N[2, n] = taker, count, -1
            if first_E[e] < 0:
                first_E[e] = n
            else:
                runs_3N[2, last[e]] = n
            last[e] = n
            n += 1
            if taker == rank:
                figures[of.BORROWED] += count
                figures[of.EXPERTS] += 1
                figures[of.NUM_FIGURES + giver] += count
    for r in range(size):
        if nodes_R[r] == nodes_R[rank]:
            figures[of.AFTER] = max(figures[of.AFTER], loads[r])


@njit(nogil=True, cache=True)
def take_slots(ids_P, counts_RE, owners_E, rank, runs_3N, first_E, slots_RE, out_P):
    """The slot of each pair of this rank: slots[r, e] is that of expert e on rank r."""
    num_experts = len(owners_E)
    left = np.empty(num_experts, np.int64)  # of the run that an expert's next pair is of
    ranks, runs = owners_E.copy(), first_E.copy()  # whose run it is, and the run after it
    for e in range(num_experts):
        left[e], run = 0, first_E[e]
        while run >= 0:
            left[e] -= runs_3N[1, run]
            run = runs_3N[2, run]
        for r in range(rank, len(counts_RE)):  # all that ranks have, but for those of lower ranks
            left[e] += counts_RE[r, e]
    for pair in range(len(ids_P)):
        e = ids_P[pair]
        if e < 0 or e >= num_experts:  # a thread may have written to ids since they were counted
            out_P[pair] = -1
            continue
        while left[e] <= 0 and runs[e] >= 0:  # below 0: pairs of lower ranks are in later runs, too
            run = runs[e]
            ranks[e], runs[e] = runs_3N[0, run], runs_3N[2, run]
            left[e] += runs_3N[1, run]
        left[e] -= 1
        out_P[pair] = slots_RE[ranks[e], e]


@njit(nogil=True, cache=True)
def _balance_kernel(table, beside):
    """Tell the others how many pairs each expert gets, hear them, and find each pair's slot."""
    words, more = pointer(table, INT64), pointer(beside, INT64)
    size, num_experts = words[at.SIZE], words[at.NUM_EXPERTS]
    ids = carray(pointer(more[of.IDS], INT64), (more[of.NUM_PAIRS],))
    if words[at.PHASE] == at.START and words[at.PART] == 0:
        told = carray(pointer(words[at.TOLD], INT64), (size, num_experts))
        bad = count_pairs(ids, told[0])
        if bad >= 0:
            return verdict(BAD, bad)
        for r in range(1, size):
            for e in range(num_experts):
                told[r, e] = told[0, e]
        pointer(words[at.HEAD], INT64)[say.NUMBER] = words[at.NUMBER]
    found = meet(table)
    if found != DONE:
        return found
    counts = carray(pointer(words[at.HEARD], INT64), (size, num_experts))
    stray = _find_stray(counts)
    if stray >= 0:
        return verdict(STRAY, stray)
    owners = carray(pointer(more[of.OWNERS], INT64), (num_experts,))
    nodes = carray(pointer(more[of.NODES], INT64), (size,))
    slots = carray(pointer(more[of.SLOTS], INT64), (size, num_experts))
    runs = carray(pointer(more[of.RUNS], INT64), (3, num_experts + 2 * size))
    first = carray(pointer(more[of.FIRST], INT64), (num_experts,))
    figures = carray(pointer(more[of.FIGURES], INT64), (of.NUM_FIGURES + size,))
    rank, out = words[at.RANK], carray(pointer(more[of.OUT], INT64), (more[of.NUM_PAIRS],))
    assign(counts, owners, nodes, more[of.SLACK], rank, runs, first, figures)
    take_slots(ids, counts, owners, rank, runs, first, slots, out)
    words[at.PHASE] = at.OVER
    return np.int64(DONE)


def balance_call(table: int, beside: int) -> Call:
    """A balance that reads the table, and what stands beside it, at these addresses."""
    return partial(_balance_kernel.compile((int64, int64)), table, beside)
