"""Calls of rows in slots: one compiled function each way, in two halves where rows come later.

Every expert has as many slots as all ranks may send it rows, so nobody needs counts: a rank fills
its block and posts a message, which waits for nobody. Whoever receives has heard all messages, and
copies the rows of its experts out of all blocks, straight to their slots. A combine lays the rows
that other ranks sent out in the same way, and each rank reads those of its own tokens.

What is read of a message or a block twice is copied first, since another rank could change it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import expect, njit
from tokenyard.kernels.numba.call.halves import (
    CAME,
    IDS,
    SCALES,
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
from tokenyard.kernels.numba.call.slot_sums import combine_slots_of
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, LIKE, copy_bytes, pointer
from tokenyard.kernels.numba.quantize import to_fp8_groups
from tokenyard.kernels.numba.rows import copy_row, streams, whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.fp8 import GROUP, NO_CAST
from tokenyard.wire.signals import READ
from tokenyard.wire.verdicts import BAD, DONE, LATE, MAP, POSTED, STRAY, TWICE

_MUCH = np.int64(1) << 62  # more bytes than any block has


@njit(nogil=True, cache=True)
def _number_pairs(table):
    """Copy topk_idx, note each pair's place among those of its expert, and count the pairs of each
    rank. -1, or p where pair p is no expert, or -2 - p where it names its token's expert again.
    """
    words = pointer(table, INT64)
    num_topk, num_experts = words[at.NUM_TOPK], words[at.NUM_EXPERTS]
    numel = words[at.NUM_TOKENS] * num_topk
    given, sent = pointer(words[at.SOURCES + IDS], INT64), pointer(words[at.PAIRS_SENT], INT64)
    seen, taken = pointer(words[at.PAIRS], INT64), pointer(words[at.TAKEN], INT64)
    owners = pointer(words[at.RANK_OF_EXPERT], INT32)
    for e in range(num_experts):
        seen[e] = 0
    for r in range(words[at.SIZE]):
        taken[r] = 0
    first = np.int64(0)  # pair of this token
    for i in range(numel):
        if i - first == num_topk:
            first = i
        expert = given[i]
        sent[i], sent[numel + i] = expert, -1
        if expert < -1 or expert >= num_experts:
            return i
        if expert >= 0:
            for j in range(first, i):
                if sent[j] == expert:
                    return -2 - i
            sent[numel + i] = seen[expert]
            seen[expert] += 1
            taken[owners[expert]] += 1
    return -1


@njit(nogil=True, cache=True)
def _fill_block(table, like):
    """Lay out rows, as they are or cast to FP8, with their scales and experts."""
    words = pointer(table, INT64)
    num_tokens, row_bytes = words[at.NUM_TOKENS], words[at.WIDTHS + X]
    x, to, moved = words[at.SOURCES + X], words[at.BLOCK], num_tokens * row_bytes
    scales = to + whole_lines(moved)
    if words[at.CAST] == NO_CAST:
        copy_row(to, x, moved, streams(row_bytes, moved))
    else:
        to_fp8_groups(x, to, scales, moved // GROUP, words[at.CAST], 0, like)
    ids = scales + whole_lines(num_tokens * words[at.WIDTHS + SCALES])
    copy_bytes(ids, words[at.PAIRS_SENT], num_tokens * words[at.WIDTHS + IDS])


@njit(nogil=True, cache=True)
def _take(table, r, tokens, rows, scales, ids):
    """Put one rank's rows after those of the ranks before it, and count them in ENDS. Whether its
    block is one that a rank may have written: its experts' numbers become addresses.
    """
    words = pointer(table, INT64)
    num_topk, num_experts, size = words[at.NUM_TOPK], words[at.NUM_EXPERTS], words[at.SIZE]
    row_bytes, scale_bytes = words[at.WIDTHS + X], words[at.WIDTHS + SCALES]
    num_slots, experts = words[at.NUM_SLOTS], pointer(ids, INT64)
    own, ends = pointer(words[at.OWN_EXPERTS], INT64), pointer(words[at.ENDS], INT32)
    src_info, ranges = pointer(words[at.SRC_INFO], INT32), pointer(words[at.RANGES], INT64)
    streaming, came = streams(row_bytes, tokens * num_topk * row_bytes), ranks_at(table, CAME)
    came[r] = 0
    for t in range(tokens):
        for i in range(t * num_topk, (t + 1) * num_topk):
            expert = experts[i]
            if expert < 0 or expert >= num_experts:
                if expert == -1:
                    continue
                return False
            local = own[expert]
            if local < 0:
                continue
            # So many only if a token names an expert twice, which no correct rank sends.
            if ends[local] >= num_slots:
                return False
            slot = local * num_slots + ends[local]
            to = words[at.RESULT] + slot * row_bytes
            copy_row(to, rows + t * row_bytes, row_bytes, streaming)
            if scale_bytes > 0:
                to = words[at.RESULT_SCALES] + slot * scale_bytes
                copy_bytes(to, scales + t * scale_bytes, scale_bytes)
            src_info[slot] = t
            ranges[local * size + r] += 1
            ends[local] += 1
            came[r] += 1
    return True


@njit(nogil=True, cache=True)
def _take_all(table):
    """Put the rows of all ranks into their slots."""
    words = pointer(table, INT64)
    rank, size, num_local = words[at.RANK], words[at.SIZE], words[at.NUM_LOCAL]
    ends, ranges = pointer(words[at.ENDS], INT32), pointer(words[at.RANGES], INT64)
    for local in range(num_local):
        ends[local] = 0
    for r in range(size):
        for local in range(num_local):
            ranges[local * size + r] = np.int64(ends[local]) << 32
        if leaves_out(table, r):
            ranks_at(table, CAME)[r] = 0
            continue
        theirs, block, room = pointer(box_from(table, r), INT64), words[at.BLOCK], _MUCH
        tokens = theirs[say.TOKENS]
        if tokens < 0 or tokens > words[at.ROOM]:
            return left_out_or(STRAY, table, r)
        if r != rank:
            entry = find_segment(table, r, theirs[say.SEGMENTS + say.SEGMENT_IDENTITY])
            if entry == 0:
                return left_out_or(MAP, table, r)
            block, room = pointer(entry, INT64)[1], pointer(entry, INT64)[2]
        scales = block + whole_lines(tokens * words[at.WIDTHS + X])
        ids = scales + whole_lines(tokens * words[at.WIDTHS + SCALES])
        if ids + tokens * words[at.WIDTHS + IDS] - block > room:
            return left_out_or(STRAY, table, r)
        if not _take(table, r, tokens, block, scales, ids):
            return left_out_or(STRAY, table, r)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _dispatch_kernel(like, table):
    words = pointer(table, INT64)
    if words[at.PHASE] == at.START:
        words[at.BEGAN] = now()
        if not others_read(table, words[at.MASKED]):
            return verdict(LATE, READ)
        fence_stores()  # of flags that this rank has raised, before it writes
        bad = _number_pairs(table)
        if bad >= 0:
            return verdict(BAD, bad)
        if bad < -1:
            return verdict(TWICE, -2 - bad)
        _fill_block(table, like)
        send_message(table)
        if words[at.LATER] != 0:
            return verdict(POSTED, 0)
    found = meet(table)
    if found != DONE:
        return found
    if words[at.PHASE] == at.MET:
        found = _take_all(table)
        if found == DONE:
            found = tell_read_all(table)
        if found != DONE:
            fence_stores()
            return found
        ends, load = pointer(words[at.ENDS], INT32), pointer(words[at.LOAD], INT64)
        for local in range(words[at.NUM_LOCAL]):
            load[local] += ends[local]
            if words[at.TOTALS] != 0:
                pointer(words[at.TOTALS], INT32)[local] += ends[local]
    return end_call(table)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def dispatch_slots(dtype: torch.dtype, table: int) -> Call:
    """A dispatch that reads the table at this address; if it casts, it casts rows of this dtype."""
    expect(combine_slots_of(torch.bfloat16))
    like = LIKE[dtype]
    return partial(_dispatch_kernel.compile((typeof(like), int64)), like, table)
