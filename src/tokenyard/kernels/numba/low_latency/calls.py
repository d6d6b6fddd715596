"""A whole low-latency call in one compiled function, for ranks that share memory.

A rank's blocks lie in its own memory, as its posts do; others read both where they are. To send is
to write a block and then to raise the number in its post. To receive is to wait for all ranks'
posts, copy rows from their blocks straight into slots, and raise a word that says so: a rank writes
into a block again, two calls later, only when all ranks have read it.

Both halves take the address of one table (`wire.call_table`) and return a verdict
(`wire.verdicts`): none waits for ever, and after a verdict other than DONE a half may be made
again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import expect, njit
from tokenyard.kernels.numba.counters import count_call, count_received, count_sent
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, LIKE, pointer
from tokenyard.kernels.numba.low_latency.posts import (
    ALL_ROWS,
    NO_ROWS,
    OTHERS_ROWS,
    await_reads,
    check_flags,
    check_posts,
    publish,
    stray,
)
from tokenyard.kernels.numba.low_latency.steps import (
    begin_ranges,
    cast_like,
    count_rows,
    fill_from,
    give_back,
    number_pairs,
    pick_pairs,
    stage_rows,
    sum_tokens,
    wide_like,
)
from tokenyard.kernels.numba.signals import raise_signal, verdict
from tokenyard.wire import call_table as at
from tokenyard.wire.counters import NANOSECONDS
from tokenyard.wire.slots import ROWS_BEGIN, TOKENS, SlotShape
from tokenyard.wire.verdicts import BAD, DONE, MORE_ROOM, TWICE

_ANY = np.int64(1) << 62  # more rows than there are

# A call that needs no more than its table, which is bound to it.
Call = Callable[[], int]


@njit(nogil=True, cache=True)
def _begin(table):
    """Note when this half of a call begins, unless it goes on."""
    words = pointer(table, INT64)
    if words[at.BEGAN_FOR] != words[at.NUMBER]:
        words[at.BEGAN_FOR], words[at.BEGAN] = words[at.NUMBER], now()


@njit(nogil=True, cache=True)
def _count_pairs(table, places, sends):
    """Count rows to, or from, the ranks of the experts in TOPK_IDX whose `places` are not -1."""
    words = pointer(table, INT64)
    counters, size = words[at.COUNTERS], words[at.SIZE]
    if counters == 0:
        return
    experts, place = pointer(words[at.TOPK_IDX], INT64), pointer(places, INT64)
    owners = pointer(words[at.RANK_OF_EXPERT], INT32)
    row_bytes = words[at.ROW_BYTES] + words[at.SCALE_BYTES]
    for i in range(words[at.NUM_TOKENS] * words[at.NUM_TOPK]):
        if place[i] >= 0:
            owner = np.int64(owners[experts[i]])
            if sends:
                count_sent(counters, size, owner, 1, row_bytes)
            else:
                count_received(counters, size, owner, 1)


@njit(nogil=True, cache=True)
def _count_ranges(table, sends):
    """Count rows to, or from, each rank as LAYOUT_RANGE has them."""
    words = pointer(table, INT64)
    counters, size = words[at.COUNTERS], words[at.SIZE]
    if counters == 0:
        return
    for r in range(size):
        count = count_rows(table, r)
        if sends:
            count_sent(counters, size, r, count, count * words[at.ROW_BYTES])
        else:
            count_received(counters, size, r, count)


@njit(nogil=True, cache=True)
def _count_end(table, is_received):
    """Half of a call has ended; with the second half the call has."""
    words = pointer(table, INT64)
    counters, words[at.BEGAN_FOR] = words[at.COUNTERS], 0
    if counters == 0:
        return
    if is_received:
        count_call(counters, words[at.BEGAN])
    else:
        pointer(counters, INT64)[NANOSECONDS] += now() - words[at.BEGAN]


@njit(nogil=True, cache=True)
def _dispatch_send_kernel(like, table):
    _begin(table)
    late = await_reads(table)
    if late != DONE:
        return late
    bad = number_pairs(table)
    if bad >= 0:
        return verdict(BAD, bad)
    if bad < -1:
        return verdict(TWICE, -2 - bad)
    stage_rows(table, like)
    publish(table)
    words = pointer(table, INT64)
    _count_pairs(table, words[at.TOPK_IDX], True)
    _count_end(table, False)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _dispatch_receive_kernel(table):
    words = pointer(table, INT64)
    _begin(table)
    found = check_posts(table, words[at.BLOCK_BYTES], NO_ROWS)
    if found != DONE:
        return found
    num_local = words[at.NUM_LOCAL]
    skip, ends = pointer(words[at.MASKED], INT64), pointer(words[at.COUNTS], INT32)
    for local in range(num_local):
        ends[local] = 0
    for r in range(words[at.SIZE]):
        begin_ranges(table, r)
        if skip[r] != 0:
            continue
        peer = pointer(words[at.PEERS] + 8 * at.PEER_WORDS * r, INT64)
        tokens = pointer(peer[at.PEER_POST], INT64)[TOKENS]
        if tokens < 0 or tokens > words[at.NUM_MAX]:
            return stray(table, r)
        if not fill_from(table, r, peer[at.PEER_BLOCK + at.SEGMENT_ADDRESS], tokens):
            return stray(table, r)
    # Now that all is read: a rank that has masked this one may have written over it.
    torn = check_flags(table)
    if torn != DONE:
        return torn
    if words[at.TOTALS] != 0:
        totals = pointer(words[at.TOTALS], INT32)
        for local in range(num_local):
            totals[local] += ends[local]
    raise_signal(words[at.READ], words[at.NUMBER])
    if words[at.LOAD] != 0:
        load = pointer(words[at.LOAD], INT64)
        for local in range(num_local):
            load[local] += ends[local]
    _count_ranges(table, False)
    _count_end(table, True)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _combine_send_kernel(table):
    _begin(table)
    late = await_reads(table)
    if late != DONE:
        return late
    bad = pick_pairs(table)
    if bad >= 0:
        return verdict(BAD, bad)
    words = pointer(table, INT64)
    rank, size, rows = words[at.RANK], words[at.SIZE], words[at.ROWS]
    copies_own = words[at.COPIES_OWN] != 0
    if rows != 0:
        needed = np.int64(0)
        for r in range(size):
            if r != rank or copies_own:
                needed += count_rows(table, r)
        if needed > words[at.ROOM]:
            return verdict(MORE_ROOM, needed)
    row = np.int64(0)
    for r in range(size):
        to = rows if r != rank or copies_own else np.int64(0)
        row = give_back(table, r, to, row, words[at.BLOCK] + r * words[at.TABLE_BYTES])
    publish(table)
    _count_ranges(table, True)
    _count_end(table, False)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _combine_receive_kernel(like, wide, table):
    words = pointer(table, INT64)
    rank, size, y = words[at.RANK], words[at.SIZE], words[at.Y]
    table_bytes = words[at.TABLE_BYTES]
    _begin(table)
    found = check_posts(table, size * table_bytes, OTHERS_ROWS if y != 0 else ALL_ROWS)
    if found != DONE:
        return found
    rows, limits = np.empty(size, np.int64), np.empty(size, np.int64)
    tables, left_out = np.empty(size, np.int64), np.empty(size, np.int64)
    skip = pointer(words[at.MASKED], INT64)  # which may change meanwhile
    for r in range(size):
        peer = pointer(words[at.PEERS] + 8 * at.PEER_WORDS * r, INT64)
        left_out[r] = skip[r]
        tables[r] = peer[at.PEER_BLOCK + at.SEGMENT_ADDRESS] + rank * table_bytes
        if r == rank and y != 0:
            rows[r], limits[r] = y, _ANY
        elif left_out[r] == 0:
            begin = pointer(peer[at.PEER_POST], INT64)[ROWS_BEGIN]
            room = peer[at.PEER_ROWS + at.SEGMENT_SIZE]
            if begin < 0 or begin > room:
                return stray(table, r)
            rows[r] = peer[at.PEER_ROWS + at.SEGMENT_ADDRESS] + begin
            limits[r] = (room - begin) // words[at.ROW_BYTES]
    wrong = sum_tokens(table, rows, limits, tables, left_out, like, wide)
    if wrong >= 0:
        return stray(table, wrong)
    torn = check_flags(table)
    if torn != DONE:
        return torn
    raise_signal(words[at.READ], words[at.NUMBER])
    _count_pairs(table, words[at.PICKED], False)
    _count_end(table, True)
    return np.int64(DONE)


# The compiled functions themselves: a dispatcher would ask each argument's type at every call.
def dispatch_calls(shape: SlotShape, table: int) -> tuple[Call, Call]:
    """Both halves of a dispatch, which read the table at this address."""
    like = cast_like(shape)
    expect(
        (_dispatch_receive_kernel, (int64,)),
        (_combine_send_kernel, (int64,)),
        (_combine_receive_kernel, _receiving(torch.bfloat16)),
    )
    sending = _dispatch_send_kernel.compile((typeof(like), int64))
    receiving = _dispatch_receive_kernel.compile((int64,))
    return partial(sending, like, table), partial(receiving, table)


def _receiving(dtype: torch.dtype) -> tuple[Any, ...]:
    return typeof(LIKE[dtype]), typeof(wide_like(dtype)), int64


def combine_calls(dtype: torch.dtype, table: int) -> tuple[Call, Call]:
    """Both halves of a combine of rows of this dtype, which read the table at this address."""
    like, wide = LIKE[dtype], wide_like(dtype)
    sending = _combine_send_kernel.compile((int64,))
    receiving = _combine_receive_kernel.compile(_receiving(dtype))
    return partial(sending, table), partial(receiving, like, wide, table)
