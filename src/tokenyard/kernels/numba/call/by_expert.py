"""A dispatch by expert, in one compiled call: each rank takes its experts' rows from all parcels.

A parcel holds what a rank has for the others: experts, weights, rows and scales of all its tokens,
one column after the other. Each rank copies the rows of its experts straight to their places, by
(expert, source rank, token). So ranks meet once, and nobody has to know where its rows lie with
others. A rank has read all parcels when it posts its next message (`engine.turns`).

What is read of a parcel twice is copied first, since another rank could change it in between.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import int64

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.count import (
    SRC_IDX,
    count_tokens,
    hear_tokens,
    list_at,
    tell_counts,
)
from tokenyard.kernels.numba.call.meet import (
    Call,
    box_from,
    end_read,
    find_segment,
    meet,
    settle_memory,
    tell_read,
)
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import copy_row, stream_row_to, streams, whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import LINE
from tokenyard.wire.verdicts import BAD, DONE, MAP, MOVE, NO_MEMORY, STRAY

# The columns of a parcel. Where there are no scales, their rows have no bytes.
X, SCALES, IDS, WEIGHTS, NUM_COLUMNS = range(5)


@njit(nogil=True, cache=True)
def _fill_parcel(table):
    """Copy this rank's columns to the block, but rows that Python has copied."""
    words = pointer(table, INT64)
    num_tokens, to = words[at.NUM_TOKENS], words[at.BLOCK]
    for c in range(NUM_COLUMNS):
        width = words[at.WIDTHS + c]
        if c != X or words[at.HANDS_OVER] == 0:
            moved = num_tokens * width
            copy_row(to, words[at.SOURCES + c], moved, streams(width, moved))
        to += whole_lines(num_tokens * width)


@njit(nogil=True, cache=True)
def _find_parcels(table):
    """Where each column of each rank's tokens is: this rank's own where it was given them."""
    words = pointer(table, INT64)
    rank, size, places = words[at.RANK], words[at.SIZE], pointer(words[at.PLACES], INT64)
    tokens = pointer(words[at.LEDGER] + 8 * size * size, INT64)
    for c in range(NUM_COLUMNS):
        places[c * size + rank] = words[at.SOURCES + c]
    for r in range(size):
        theirs = pointer(box_from(table, r), INT64)
        if theirs[say.SEGMENTS] == say.NO_MEMORY:
            return verdict(NO_MEMORY, r)
        if r == rank:
            continue
        entry = find_segment(table, r, theirs[say.SEGMENTS + say.SEGMENT_IDENTITY])
        if entry == 0:
            return verdict(MAP, r)
        begin, end = pointer(entry, INT64)[1], np.int64(0)
        for c in range(NUM_COLUMNS):
            places[c * size + r] = begin + end
            end += whole_lines(tokens[r] * words[at.WIDTHS + c])
        # The whole parcel must lie in what is mapped: nothing behind it may be read.
        if end > pointer(entry, INT64)[2]:
            return verdict(STRAY, r)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _read_routes(table):
    """Copy which pairs of each token that comes are of which own expert, and their weights."""
    words = pointer(table, INT64)
    rank, size, num_topk = words[at.RANK], words[at.SIZE], words[at.NUM_TOPK]
    sent, columns = pointer(words[at.LEDGER], INT64), pointer(words[at.PLACES], INT64)
    tokens = pointer(words[at.LEDGER] + 8 * size * size, INT64)
    own, num_experts = pointer(words[at.OWN_EXPERTS], INT64), words[at.NUM_EXPERTS]
    per_expert, src_idx = (
        pointer(words[at.PER_EXPERT], INT64),
        pointer(list_at(table, SRC_IDX), INT32),
    )
    places, factors = pointer(words[at.ROW_OF], INT64), pointer(words[at.FACTORS], FLOAT32)
    for e in range(words[at.NUM_LOCAL]):
        per_expert[e] = 0
    row = end = np.int64(0)
    for r in range(size):
        end += sent[r * size + rank]
        left = pointer(words[at.HEARD] + 8 * (r * words[at.TOLD_WORDS] + size), INT64)[rank]
        ids = pointer(columns[IDS * size + r], INT64)
        weights = pointer(columns[WEIGHTS * size + r], FLOAT32)
        for t in range(tokens[r]):
            here = False
            for k in range(num_topk):
                expert = ids[t * num_topk + k]
                if expert >= num_experts or expert < -1:
                    return verdict(STRAY, r)
                local = own[expert] if expert >= 0 else np.int64(-1)
                if local < 0:
                    continue
                if left == 0:  # more pairs than the rank told, and than there is memory for
                    return verdict(STRAY, r)
                left -= 1
                if not here:
                    if row == end:  # more tokens than the rank told, and than there is room for
                        return verdict(STRAY, r)
                    here = True
                    src_idx[row] = t
                    for i in range(row * num_topk, (row + 1) * num_topk):
                        places[i] = -1
                        factors[i] = 0
                places[row * num_topk + k] = local
                factors[row * num_topk + k] = weights[t * num_topk + k]
                per_expert[local] += 1
            row += here
        if row != end:
            return verdict(STRAY, r)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _place_pairs(table):
    """Where each expert's rows end, and the row of each pair."""
    words = pointer(table, INT64)
    alignment, num_pairs = words[at.ALIGNMENT], words[at.NUM_ROWS] * words[at.NUM_TOPK]
    per_expert, ends = pointer(words[at.PER_EXPERT], INT64), pointer(words[at.ENDS], INT32)
    following, places = pointer(words[at.PAIRS], INT64), pointer(words[at.ROW_OF], INT64)
    end = np.int64(0)
    for e in range(words[at.NUM_LOCAL]):
        following[e] = end
        end += (per_expert[e] + alignment - 1) // alignment * alignment
        ends[e] = end
    words[at.END] = end
    for i in range(num_pairs):
        expert = places[i]
        if expert >= 0:
            places[i] = following[expert]
            following[expert] += 1


@njit(nogil=True, cache=True)
def _take_rows(table, begin, end, targets_at):
    """Copy these of the rows that come to the places of their pairs. `targets_at` has room for the
    addresses of a token's.
    """
    words = pointer(table, INT64)
    rank, size, num_topk = words[at.RANK], words[at.SIZE], words[at.NUM_TOPK]
    sent, columns = pointer(words[at.LEDGER], INT64), pointer(words[at.PLACES], INT64)
    src_idx, places = pointer(list_at(table, SRC_IDX), INT32), pointer(words[at.ROW_OF], INT64)
    targets, width, out = pointer(targets_at, INT64), words[at.WIDTHS + X], words[at.RESULT]
    scale_bytes, row, last = words[at.WIDTHS + SCALES], np.int64(0), np.int64(0)
    streaming = streams(width, words[at.END] * width)
    for r in range(size):
        last += sent[r * size + rank]
        for row in range(max(begin, last - sent[r * size + rank]), min(end, last)):
            token = np.int64(src_idx[row])
            # The low bits of the width and of all targets: 0 if all of them are on lines.
            source, count, bits = columns[X * size + r] + token * width, 0, width
            for i in range(row * num_topk, (row + 1) * num_topk):
                if places[i] >= 0:
                    targets[count] = out + places[i] * width
                    bits |= targets[count]
                    count += 1
                    if scale_bytes != 0:
                        to = words[at.RESULT_SCALES] + places[i] * scale_bytes
                        scales = columns[SCALES * size + r] + token * scale_bytes
                        copy_bytes(to, scales, scale_bytes)
            if streaming and bits % LINE == 0:
                stream_row_to(targets_at, count, source, width)
            else:
                for i in range(count):
                    copy_row(targets[i], source, width, streaming)


@njit(nogil=True, cache=True)
def _zero(address, num_bytes):
    to = pointer(address, UINT8)
    for i in range(num_bytes):
        to[i] = 0


@njit(nogil=True, cache=True)
def _end_experts(table):
    """Add to the experts' load; zero the padding after each expert's rows, and count it."""
    words = pointer(table, INT64)
    alignment, width = words[at.ALIGNMENT], words[at.WIDTHS + X]
    scale_bytes, load = words[at.WIDTHS + SCALES], pointer(words[at.LOAD], INT64)
    per_expert, ends = pointer(words[at.PER_EXPERT], INT64), pointer(words[at.ENDS], INT32)
    begin = np.int64(0)
    for e in range(words[at.NUM_LOCAL]):
        load[e] += per_expert[e]
        if alignment > 1:
            used, end = begin + per_expert[e], np.int64(ends[e])
            _zero(words[at.RESULT] + used * width, (end - used) * width)
            _zero(words[at.RESULT_SCALES] + used * scale_bytes, (end - used) * scale_bytes)
            per_expert[e], begin = end - begin, end


@njit(nogil=True, cache=True)
def _tell_pairs(table):
    """Tell all ranks, behind how many tokens go to each rank, how many pairs do."""
    words = pointer(table, INT64)
    size, pairs = words[at.SIZE], pointer(words[at.PAIRS], INT64)
    owners, first = pointer(words[at.RANK_OF_EXPERT], INT32), words[at.TOLD] + 8 * size
    told = pointer(first, INT64)
    for r in range(size):
        told[r] = 0
    for e in range(words[at.NUM_EXPERTS]):
        told[owners[e]] += pairs[e]
    for r in range(1, size):
        copy_bytes(first + 8 * r * words[at.TOLD_WORDS], first, 8 * size)


@njit(nogil=True, cache=True)
def _read_rooms(table):
    """Which ranks have told of too little memory for the rows that come to them: DONE, or STRAY."""
    words = pointer(table, INT64)
    rank, size, width = words[at.RANK], words[at.SIZE], words[at.TOLD_WORDS]
    tokens = pointer(words[at.LEDGER] + 8 * size * size, INT64)
    rows = pointer(words[at.LEDGER] + 8 * size * (size + 1), INT64)
    lacks = pointer(words[at.LACKS], INT64)
    for r in range(size):
        most = words[at.MOST_EXPERTS] * (words[at.ALIGNMENT] - 1)
        for source in range(size):
            pairs = pointer(words[at.HEARD] + 8 * (source * width + size), INT64)[r]
            if pairs < 0 or pairs > tokens[source] * words[at.NUM_TOPK]:
                return verdict(STRAY, source)
            most += pairs
        told = pointer(box_from(table, r), INT64)
        lacks[r] = most > told[say.ROOM] or rows[r] > told[say.LISTS]
        if r == rank:
            words[at.END] = most
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _hear_parcels(table):
    """Read from all messages and parcels what comes, and where it goes."""
    words = pointer(table, INT64)
    found = np.int64(DONE)
    if words[at.PHASE] == at.MET:
        found = hear_tokens(table, 0)
        if found == DONE:
            found = _read_rooms(table)
    if found == DONE:
        found = settle_memory(table)
    if found == DONE:
        found = _find_parcels(table)
    if found == DONE:
        found = _read_routes(table)
    if found == DONE:
        _place_pairs(table)
    return found


@njit(nogil=True, cache=True)
def _dispatch_kernel(table):
    words = pointer(table, INT64)
    if words[at.PHASE] == at.START and words[at.PART] == 0:
        words[at.BEGAN] = now()
        bad = count_tokens(table)
        if bad >= 0:
            return verdict(BAD, bad)
        tell_counts(table, 0)
        _tell_pairs(table)
        if words[at.BLOCK] != 0:
            # Before the message: others may read the parcel as soon as they hear it.
            _fill_parcel(table)
            fence_stores()
    found = meet(table)
    if found != DONE:
        return found
    if words[at.PHASE] < at.PLACED:
        found = _hear_parcels(table)
        if found != DONE:
            return found
        words[at.PHASE] = at.PLACED
    if words[at.PHASE] == at.PLACED:
        if words[at.HANDS_OVER] != 0:
            return verdict(MOVE, 0)
        _take_rows(table, 0, words[at.NUM_ROWS], words[at.TERMS])
        words[at.PHASE] = at.MOVED
    if words[at.PHASE] == at.MOVED:
        _end_experts(table)
        fence_stores()
        tell_read(table, NUM_COLUMNS, False)
    return end_read(table)


@njit(nogil=True, cache=True)
def _take_kernel(table, begin, end):
    targets = np.empty(pointer(table, INT64)[at.NUM_TOPK], np.int64)
    _take_rows(table, begin, end, targets.ctypes.data)
    fence_stores()


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def call_by_expert(table: int) -> Call:
    """A dispatch by expert that reads the table at this address."""
    return partial(_dispatch_kernel.compile((int64,)), table)


def take_rows(table: int, begin: int, end: int) -> None:
    """Move some of the rows that come, for a call that has handed over."""
    _take_kernel(table, begin, end)
