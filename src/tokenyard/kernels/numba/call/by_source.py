"""A dispatch by (source rank, token), in one compiled call: each row is written where it belongs.

Every rank offers a block, and tells how many of its tokens go to whom. Once it has heard that of
all ranks, it knows where its rows go in each rank's block, and writes them there, column by column.
Where a rank's block is too small, which all ranks see, all offer again.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import int64

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.count import (
    SRC_IDX,
    count_load,
    count_tokens,
    hear_experts,
    hear_tokens,
    list_at,
    tell_counts,
)
from tokenyard.kernels.numba.call.meet import (
    Call,
    box_from,
    count_rows,
    find_segment,
    meet,
    passes,
    settle_memory,
    signal,
)
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import MUCH, localise_kernel, scatter_rows, whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import ROWS
from tokenyard.wire.verdicts import BAD, DONE, LATE, MAP, MOVE, STRAY

_SCRATCH = 3 * at.MOST_COLUMNS + 3  # words: columns, and lists


@njit(nogil=True, cache=True)
def _column_at(table, column, num_rows):
    """Where a column of so many rows begins in a block; behind the last one, its end."""
    words, begin = pointer(table, INT64), np.int64(0)
    for c in range(column):
        begin += whole_lines(num_rows * words[at.WIDTHS + c])
    return begin


@njit(nogil=True, cache=True)
def _read_offers(table):
    """Which ranks have told of too little memory for the rows that come to them."""
    words = pointer(table, INT64)
    rank, size, columns = words[at.RANK], words[at.SIZE], words[at.NUM_COLUMNS]
    rows = pointer(words[at.LEDGER] + 8 * size * (size + 1), INT64)
    lacks = pointer(words[at.LACKS], INT64)
    for r in range(size):
        told = pointer(box_from(table, r), INT64)
        room = told[say.SEGMENTS + say.SEGMENT_SIZE]
        lacks[r] = _column_at(table, columns, rows[r]) > room
        if words[at.HANDLE] < 0 and rows[r] > told[say.LISTS]:
            lacks[r] = 1
    words[at.NUM_ROWS], words[at.END] = rows[rank], _column_at(table, columns, rows[rank])


@njit(nogil=True, cache=True)
def _find_places(table):
    """Where this rank's rows of each column go in each rank's block."""
    words = pointer(table, INT64)
    rank, size, columns = words[at.RANK], words[at.SIZE], words[at.NUM_COLUMNS]
    sent = pointer(words[at.LEDGER], INT64)
    rows = pointer(words[at.LEDGER] + 8 * size * (size + 1), INT64)
    places = pointer(words[at.PLACES], INT64)
    for r in range(size):
        if sent[rank * size + r] == 0:
            continue  # that rank's segment need not even be mapped
        block, first = words[at.BLOCK], np.int64(0)
        for i in range(rank):
            first += sent[i * size + r]
        if r != rank:
            theirs = pointer(box_from(table, r), INT64)
            entry = find_segment(table, r, theirs[say.SEGMENTS + say.SEGMENT_IDENTITY])
            if entry == 0:
                return verdict(MAP, r)
            known = pointer(entry, INT64)
            told = theirs[say.SEGMENTS + say.SEGMENT_SIZE]
            if known[2] != told or _column_at(table, columns, rows[r]) > known[2]:
                return verdict(STRAY, r)
            block = known[1]
        for c in range(columns):
            places[c * size + r] = (
                block + _column_at(table, c, rows[r]) + first * words[at.WIDTHS + c]
            )
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _write_rows(table, begin, end, scratch):
    """Write the rows of these tokens, of all columns, to all ranks that get them. `scratch` is the
    address of SCRATCH + R words.
    """
    words, room = pointer(table, INT64), pointer(scratch, INT64)
    columns = words[at.NUM_COLUMNS]
    for c in range(columns):
        room[3 * c], room[3 * c + 1] = words[at.SOURCES + c], words[at.WIDTHS + c]
        room[3 * c + 2] = words[at.WIDTHS + c]
    lists = 3 * at.MOST_COLUMNS
    for which in range(3):
        room[lists + which] = list_at(table, which)
    scatter_rows(
        scratch,
        words[at.PLACES],
        scratch + 8 * lists,
        columns,
        words[at.SIZE],
        begin,
        end,
        words[at.NUM_COPIES] * words[at.WIDTHS] >= MUCH,
        scratch + 8 * _SCRATCH,
    )


@njit(nogil=True, cache=True)
def _fill(address, num_bytes, value):
    to = pointer(address, UINT8)
    for i in range(num_bytes):
        to[i] = value


@njit(nogil=True, cache=True)
def _end_rows(table):
    """Make of the rows that have arrived what the user gets: experts of this rank, and, if there
    must be more rows than came, zeros and -1. The ledger keeps the token of each row.
    """
    words = pointer(table, INT64)
    rank, size, num_rows = words[at.RANK], words[at.SIZE], words[at.NUM_ROWS]
    sent, ids, came = pointer(words[at.LEDGER], INT64), words[at.IDS], np.int64(0)
    for r in range(size):
        came += sent[r * size + rank]
    tokens = words[at.NUM_COLUMNS] - 1 if words[at.HANDLE] < 0 else np.int64(-1)
    for c in range(words[at.NUM_COLUMNS]):
        width = words[at.WIDTHS + c]
        begin = words[at.BLOCK] + _column_at(table, c, num_rows)
        if came < num_rows:
            value = np.uint8(255) if c in (ids, tokens) else np.uint8(0)  # 255: bytes of -1
            _fill(begin + came * width, (num_rows - came) * width, value)
        if c == ids:
            weights = words[at.BLOCK] + _column_at(table, c + 1, num_rows)
            own, num_experts = words[at.OWN_EXPERTS], words[at.NUM_EXPERTS]
            localise_kernel(begin, weights, own, came * words[at.NUM_TOPK], num_experts)
        if c == tokens:
            copy_bytes(list_at(table, SRC_IDX), begin, 4 * num_rows)


@njit(nogil=True, cache=True)
def _place_rows(table):
    """Hear all ranks, and find the places of this rank's rows."""
    words = pointer(table, INT64)
    if words[at.PHASE] == at.MET:
        if words[at.HANDLE] < 0:
            found = hear_tokens(table, words[at.MOST_EXPERTS])
            if found != DONE:
                return found
            hear_experts(table)
        _read_offers(table)
    found = settle_memory(table)
    return _find_places(table) if found == DONE else found


@njit(nogil=True, cache=True)
def _dispatch_kernel(table):
    words = pointer(table, INT64)
    # Once a call: `meet` sets START again for each part of a long message.
    if words[at.PHASE] == at.START and words[at.PART] == 0:
        words[at.BEGAN] = now()
        if words[at.HANDLE] < 0:
            bad = count_tokens(table)
            if bad >= 0:
                return verdict(BAD, bad)
            tell_counts(table, words[at.MOST_EXPERTS])
        head = pointer(words[at.HEAD], INT64)
        head[say.NUMBER], head[say.HANDLE] = words[at.NUMBER], words[at.HANDLE]
    found = meet(table)
    if found != DONE:
        return found
    if words[at.PHASE] < at.PLACED:
        found = _place_rows(table)
        if found != DONE:
            return found
        words[at.PHASE] = at.PLACED
    if words[at.PHASE] == at.PLACED:
        if words[at.HANDS_OVER] != 0:
            return verdict(MOVE, 0)
        _write_rows(table, 0, words[at.NUM_TOKENS], words[at.TERMS])
        words[at.PHASE] = at.MOVED
    if words[at.PHASE] == at.MOVED:
        signal(table, ROWS)  # which fences the rows that this thread streamed
        words[at.PHASE] = at.SENT
    if not passes(table, at.SENT, ROWS):
        return verdict(LATE, ROWS)
    if words[at.PHASE] == at.ARRIVED:
        _end_rows(table)
        count_rows(table, words[at.NUM_COLUMNS], False)
        if words[at.IDS] >= 0:
            count_load(table)
        words[at.PHASE] = at.OVER
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _write_kernel(table, begin, end):
    scratch = np.empty(_SCRATCH + pointer(table, INT64)[at.SIZE], np.int64)
    _write_rows(table, begin, end, scratch.ctypes.data)
    # The thread that signals cannot fence for this one.
    fence_stores()


# The compiled functions themselves: a dispatcher would ask each argument's type at every call.
def call_by_source(table: int) -> Call:
    """A dispatch that reads the table at this address."""
    return partial(_dispatch_kernel.compile((int64,)), table)


def write_rows(table: int, begin: int, end: int) -> None:
    """Move the rows of some tokens, for a call that has handed over."""
    _write_kernel(table, begin, end)
