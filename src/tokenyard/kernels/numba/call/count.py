"""Who gets each token of this rank, what ranks tell each other of that, and what they hear.

What is known is written into the ledger of the call (`engine.ledger.WrittenLedger`): rows from each
rank to each, tokens and rows of each rank, and the lists of `types.Route` by token.
"""

from __future__ import annotations

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.meet import box_from
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, UINT8, pointer, trailing_zeros
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.verdicts import DONE, SHORT, STRAY

_MOST_TOKENS = np.int64(1) << 31  # the lists of a ledger are int32
STARTS, RANKS, SLOTS, SRC_IDX = range(4)  # the lists of a ledger


@njit(nogil=True, cache=True)
def list_at(table, which):
    """The address of a list of the ledger, by the names above."""
    words = pointer(table, INT64)
    size, num_tokens, room = words[at.SIZE], words[at.NUM_TOKENS], words[at.ROOM]
    begin = words[at.LEDGER] + 8 * size * (size + 2)
    if which != STARTS:
        begin += 4 * (num_tokens + 1 + (which - 1) * room)
    return begin


@njit(nogil=True, cache=True)
def _list_copy(ranks, slots, taken, copy, r):
    """List a copy for rank r, in that rank's next slot. The number of the next copy."""
    ranks[copy] = r
    slots[copy] = taken[r]
    taken[r] += 1
    return copy + 1


@njit(nogil=True, cache=True)
def _count_ids(table):
    """-1, or the first pair that is no expert."""
    words = pointer(table, INT64)
    num_experts, num_topk = words[at.NUM_EXPERTS], words[at.NUM_TOPK]
    ids = pointer(words[at.SOURCES + words[at.IDS]], INT64)
    owners = pointer(words[at.RANK_OF_EXPERT], INT32)
    pairs, taken = pointer(words[at.PAIRS], INT64), pointer(words[at.TAKEN], INT64)
    starts, ranks = pointer(list_at(table, STARTS), INT32), pointer(list_at(table, RANKS), INT32)
    slots = pointer(list_at(table, SLOTS), INT32)
    for e in range(num_experts):
        pairs[e] = 0
    one, copy, pair = np.uint64(1), np.int64(0), np.int64(0)
    for t in range(words[at.NUM_TOKENS]):
        starts[t] = copy
        mask = np.uint64(0)  # a bit a rank: with more than 64 ranks there are MARKS
        for _ in range(num_topk):
            expert = ids[pair]
            if expert < -1 or expert >= num_experts:
                return pair
            if expert >= 0:
                pairs[expert] += 1
                mask |= one << np.uint64(owners[expert])
            pair += 1
        while mask != 0:
            r = np.int64(trailing_zeros(mask))
            mask &= mask - one
            copy = _list_copy(ranks, slots, taken, copy, r)
    starts[words[at.NUM_TOKENS]] = copy
    words[at.NUM_COPIES] = copy
    return -1


@njit(nogil=True, cache=True)
def count_tokens(table):
    """List who gets each token, and count the pairs of each expert, unless MARKS says who gets
    which: then PAIRS has been counted. -1, or the first pair that is no expert.
    """
    words = pointer(table, INT64)
    size, marks = words[at.SIZE], pointer(words[at.MARKS], UINT8)
    taken = pointer(words[at.TAKEN], INT64)
    for r in range(size):
        taken[r] = 0
    if words[at.MARKS] == 0:
        return _count_ids(table)
    starts, ranks = pointer(list_at(table, STARTS), INT32), pointer(list_at(table, RANKS), INT32)
    slots = pointer(list_at(table, SLOTS), INT32)
    copy = np.int64(0)
    for t in range(words[at.NUM_TOKENS]):
        starts[t] = copy
        for r in range(size):
            if marks[t * size + r] != 0:
                copy = _list_copy(ranks, slots, taken, copy, r)
    starts[words[at.NUM_TOKENS]] = copy
    words[at.NUM_COPIES] = copy
    return -1


@njit(nogil=True, cache=True)
def tell_counts(table, most):
    """What each rank is told: the pairs of each of its experts, `most` at the most, and how many
    tokens go to each rank.
    """
    words = pointer(table, INT64)
    size = words[at.SIZE]
    pairs, taken = pointer(words[at.PAIRS], INT64), pointer(words[at.TAKEN], INT64)
    experts, head = pointer(words[at.PADDED_EXPERTS], INT64), pointer(words[at.HEAD], INT64)
    pairs[words[at.NUM_EXPERTS]] = 0  # of ranks that have fewer experts than others
    head[say.NUMBER], head[say.TOKENS] = words[at.NUMBER], words[at.NUM_TOKENS]
    head[say.WORST] = words[at.WORST]
    for r in range(size):
        told = pointer(words[at.TOLD] + 8 * r * words[at.TOLD_WORDS], INT64)
        for i in range(most):
            told[i] = pairs[experts[r * most + i]]
        for i in range(size):
            told[most + i] = taken[i]


@njit(nogil=True, cache=True)
def hear_tokens(table, most):
    """Read how many tokens go from whom to whom, which all were told behind `most` other words."""
    words = pointer(table, INT64)
    size, width = words[at.SIZE], words[at.TOLD_WORDS]
    sent = pointer(words[at.LEDGER], INT64)
    tokens = pointer(words[at.LEDGER] + 8 * size * size, INT64)
    rows = pointer(words[at.LEDGER] + 8 * size * (size + 1), INT64)
    for r in range(size):
        rows[r] = 0
    for r in range(size):
        heard = pointer(words[at.HEARD] + 8 * (r * width + most), INT64)
        tokens[r] = pointer(box_from(table, r), INT64)[say.TOKENS]
        if tokens[r] < 0 or tokens[r] > _MOST_TOKENS:
            return verdict(STRAY, r)
        for i in range(size):
            sent[r * size + i] = heard[i]
            # Counts become places, and a wrong one would lead out of a block.
            if heard[i] < 0 or heard[i] > tokens[r]:
                return verdict(STRAY, r)
            rows[i] += heard[i]
    # Already here: after SHORT the error says how many rows come.
    words[at.NUM_ROWS] = rows[words[at.RANK]]
    for r in range(size):
        worst = pointer(box_from(table, r), INT64)[say.WORST]
        if worst != 0:
            if worst < rows[r]:
                return verdict(SHORT, r)
            rows[r] = worst
    words[at.NUM_ROWS] = rows[words[at.RANK]]
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def hear_experts(table):
    """Read how many pairs come to each of this rank's experts."""
    words = pointer(table, INT64)
    width, alignment = words[at.TOLD_WORDS], words[at.ALIGNMENT]
    per_expert = pointer(words[at.PER_EXPERT], INT64)
    for i in range(words[at.NUM_LOCAL]):
        count = np.int64(0)
        for r in range(words[at.SIZE]):
            count += pointer(words[at.HEARD] + 8 * r * width, INT64)[i]
        per_expert[i] = (count + alignment - 1) // alignment * alignment


@njit(nogil=True, cache=True)
def count_load(table):
    """Add to the load of this rank's experts what all ranks have told."""
    words = pointer(table, INT64)
    load = pointer(words[at.LOAD], INT64)
    for r in range(words[at.SIZE]):
        heard = pointer(words[at.HEARD] + 8 * r * words[at.TOLD_WORDS], INT64)
        for i in range(words[at.NUM_LOCAL]):
            load[i] += heard[i]
