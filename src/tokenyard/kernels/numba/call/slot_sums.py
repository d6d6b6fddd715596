"""A combine of rows in slots, in one compiled call of two halves (`slots`).

The experts' rank lays out the rows that other ranks sent, or lets them be read where they lie, and
tells each rank where those of each expert begin. A token's rank sums weight times row, in top-k
order, and rounds once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.halves import (
    CAME,
    FIRSTS,
    IDS,
    ROOMS,
    ROWS,
    WEIGHTS,
    X,
    end_call,
    others_read,
    ranks_at,
    send_message,
    tell_read_all,
)
from tokenyard.kernels.numba.call.meet import (
    Call,
    box_from,
    find_segment,
    leaves_out,
    left_out_or,
    meet,
)
from tokenyard.kernels.numba.call.sums import likes
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, pointer
from tokenyard.kernels.numba.llvm.sums import sum_scaled
from tokenyard.kernels.numba.rows import copy_row, streams
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import READ
from tokenyard.wire.verdicts import BAD, DONE, LATE, LOW, MAP, MORE_ROOM, POSTED, STRAY

_ANY = np.int64(1) << 62  # more rows than there are


@njit(nogil=True, cache=True)
def _give_back(table, r, to, row):
    """Copy one rank's rows to `to`, from `row` on, and note for it where each expert's begin.
    Returns the row after the last. Where `to` is 0 they are read where they lie.
    """
    words = pointer(table, INT64)
    size, num_slots, row_bytes = words[at.SIZE], words[at.NUM_SLOTS], words[at.WIDTHS]
    ranges = pointer(words[at.RANGES], INT64)
    first = pointer(words[at.BLOCK] + r * words[at.FIRSTS_BYTES], INT64)
    streaming = streams(row_bytes, pointer(words[at.TAKEN], INT64)[r] * row_bytes)
    for local in range(words[at.NUM_LOCAL]):
        given = ranges[local * size + r]
        place, count = local * num_slots + (given >> 32), given & LOW
        first[local] = place if to == 0 else row
        if to != 0 and count > 0:
            source = words[at.SOURCES + X] + place * row_bytes
            copy_row(to + row * row_bytes, source, count * row_bytes, streaming)
            row += count
    return row


@njit(nogil=True, cache=True)
def _lay_out(table):
    """Lay rows out for the ranks whose tokens they are: DONE, or MORE_ROOM. This rank reads its own
    where they lie, unless it receives later.
    """
    words = pointer(table, INT64)
    rank, size, to = words[at.RANK], words[at.SIZE], words[at.ROWS_AT]
    taken, needed = pointer(words[at.TAKEN], INT64), np.int64(0)
    ranges = pointer(words[at.RANGES], INT64)
    for r in range(size):
        taken[r] = 0
        for local in range(words[at.NUM_LOCAL]):
            taken[r] += ranges[local * size + r] & LOW
        if r != rank or words[at.LATER] != 0:
            needed += taken[r]
    if to != 0 and needed > words[at.ROOM]:
        return verdict(MORE_ROOM, needed)
    row = np.int64(0)
    for r in range(size):
        row = _give_back(table, r, to if r != rank or words[at.LATER] != 0 else np.int64(0), row)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _pick_pairs(table):
    """Find each pair among those of its token that were sent; the first that was not, or -1."""
    words = pointer(table, INT64)
    num_tokens, num_topk = words[at.NUM_TOKENS], words[at.NUM_TOPK]
    given, sent = pointer(words[at.SOURCES + IDS], INT64), pointer(words[at.PAIRS_SENT], INT64)
    picked = pointer(words[at.ROW_OF], INT64)
    for t in range(num_tokens):
        for i in range(t * num_topk, (t + 1) * num_topk):
            expert = given[i]
            picked[i] = -1
            if expert == -1:
                continue
            if sent[i] == expert:  # as a rule it is what dispatch was given
                picked[i] = i
                continue
            for j in range(t * num_topk, (t + 1) * num_topk):
                if sent[j] == expert:
                    picked[i] = j
            if picked[i] < 0:
                return i
    return -1


@njit(nogil=True, cache=True)
def _find_rows(table):
    """Where each rank's rows lie, how many may be read there, and where it says which are whose."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.WIDTHS]
    rows, rooms = ranks_at(table, ROWS), ranks_at(table, ROOMS)
    firsts = ranks_at(table, FIRSTS)
    for r in range(size):
        ranks_at(table, CAME)[r] = 0
        rooms[r] = 0
        if leaves_out(table, r):
            continue
        if r == rank:
            firsts[r], rooms[r] = words[at.BLOCK] + r * words[at.FIRSTS_BYTES], _ANY
            rows[r] = words[at.ROWS_AT]
            if words[at.LATER] == 0 or rows[r] == 0:
                rows[r] = words[at.SOURCES + X]
            continue
        theirs = pointer(box_from(table, r), INT64)
        second = say.SEGMENTS + say.SEGMENT_WORDS
        begin = theirs[second + say.SEGMENT_BEGIN]
        entry = find_segment(table, r, theirs[say.SEGMENTS + say.SEGMENT_IDENTITY])
        entry_of_rows = find_segment(table, r, theirs[second + say.SEGMENT_IDENTITY])
        if entry == 0 or entry_of_rows == 0:
            return left_out_or(MAP, table, r)
        known, known_rows = pointer(entry, INT64), pointer(entry_of_rows, INT64)
        if known[2] < size * words[at.FIRSTS_BYTES] or begin < 0 or begin > known_rows[2]:
            return left_out_or(STRAY, table, r)
        firsts[r] = known[1] + rank * words[at.FIRSTS_BYTES]
        rows[r], rooms[r] = known_rows[1] + begin, (known_rows[2] - begin) // row_bytes
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _sum_all(table, like, wide):
    """The weighted sum of each token's rows: DONE, or a verdict about a rank."""
    words = pointer(table, INT64)
    num_topk, row_bytes = words[at.NUM_TOPK], words[at.WIDTHS]
    hidden, numel = row_bytes // np.int64(like.itemsize), words[at.NUM_TOKENS] * num_topk
    owner_of = pointer(words[at.RANK_OF_EXPERT], INT32)
    local_of = pointer(words[at.LOCAL_OF_EXPERT], INT32)
    weights = pointer(words[at.SOURCES + WEIGHTS], FLOAT32)
    sent = pointer(words[at.PAIRS_SENT], INT64)
    picked, came = pointer(words[at.ROW_OF], INT64), ranks_at(table, CAME)
    rows, rooms = ranks_at(table, ROWS), ranks_at(table, ROOMS)
    firsts = ranks_at(table, FIRSTS)
    sources, factors_at = pointer(words[at.TERMS], INT64), words[at.TERMS] + 8 * num_topk
    factors = pointer(factors_at, wide)
    for t in range(words[at.NUM_TOKENS]):
        count = 0
        for i in range(t * num_topk, (t + 1) * num_topk):
            if picked[i] < 0:
                continue
            expert, place = sent[picked[i]], sent[numel + picked[i]]
            owner = np.int64(owner_of[expert])
            if leaves_out(table, owner):
                continue
            first = pointer(firsts[owner], INT64)[local_of[expert]]
            # Not first + place: with a wrong word that sum could overflow.
            if first < 0 or first >= rooms[owner] - place:
                return left_out_or(STRAY, table, owner)
            sources[count] = rows[owner] + (first + place) * row_bytes
            factors[count] = weights[i]
            came[owner] += 1
            count += 1
        out = words[at.OUTS] + t * row_bytes
        sum_scaled(out, words[at.TERMS], factors_at, count, hidden, 0, like)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _combine_kernel(like, wide, table):
    words = pointer(table, INT64)
    if words[at.PHASE] == at.START:
        words[at.BEGAN] = now()
        if not others_read(table, words[at.MASKED]):
            return verdict(LATE, READ)
        fence_stores()  # of flags that this rank has raised, before it writes
        bad = _pick_pairs(table)
        if bad >= 0:
            return verdict(BAD, bad)
        found = _lay_out(table)
        fence_stores()
        if found != DONE:
            return found
        send_message(table)
        if words[at.LATER] != 0:
            return verdict(POSTED, 0)
    found = meet(table)
    if found != DONE:
        return found
    if words[at.PHASE] == at.MET:
        found = _find_rows(table)
        if found == DONE:
            found = _sum_all(table, like, wide)
        if found == DONE:
            found = tell_read_all(table)
        if found != DONE:
            fence_stores()
            return found
    return end_call(table)


def combine_slots_of(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of combines of rows of this dtype, and its signature."""
    like, wide = likes(dtype)
    return _combine_kernel, (typeof(like), typeof(wide), int64)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def combine_slots(dtype: torch.dtype, table: int) -> Call:
    """A combine of rows of this dtype that reads the table at this address."""
    kernel, signature = combine_slots_of(dtype)
    return partial(kernel.compile(signature), *likes(dtype), table)
