"""A combine in one compiled call: post where rows lie, wait, sum, signal, wait."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.exchange.protocol import (
    Call,
    box_from,
    box_to,
    count_rows,
    find_segment,
    open_ledger,
    passes,
    same_calls,
    signal,
)
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, LIKE, copy_bytes, pointer
from tokenyard.kernels.numba.llvm.sums import sum_scaled
from tokenyard.kernels.numba.reduce import scratch, streams_sums, sum_token
from tokenyard.kernels.numba.rows import copy_row, streams
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import MAIL, READ, ROWS
from tokenyard.wire.verdicts import DONE, GENERAL, LATE, MAP, STRAY


@njit(nogil=True, cache=True)
def _sum_shares(table, like, sums):
    """Sum, for each token that came, the rows of its pairs at Y: to the block, which is X then."""
    words = pointer(table, INT64)
    num_topk, row_bytes, out = words[at.NUM_TOPK], words[at.ROW_BYTES], words[at.BLOCK]
    places, weights = pointer(words[at.ROW_OF], INT64), pointer(words[at.FACTORS], FLOAT32)
    sources_at, scales_at = words[at.TERMS], words[at.TERMS] + 8 * num_topk
    sources, scales = pointer(sources_at, INT64), pointer(scales_at, sums)
    hidden, num_rows = row_bytes // np.int64(like.itemsize), words[at.NUM_ROWS]
    streaming = streams_sums(out, row_bytes, num_rows * row_bytes)
    for n in range(num_rows):
        count = np.int64(0)
        for i in range(n * num_topk, (n + 1) * num_topk):
            if places[i] >= 0:
                sources[count] = words[at.Y] + places[i] * row_bytes
                scales[count] = weights[i] if words[at.WEIGH] != 0 else 1
                count += 1
        target = out + n * row_bytes
        sum_scaled(target, sources_at, scales_at, count, hidden, streaming, like)
    words[at.X] = out


@njit(nogil=True, cache=True)
def _post_offer(table):
    """Say where each rank's rows lie. The message has what names the segment already."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    sent, head = pointer(words[at.LEDGER], INT64), pointer(words[at.HEAD], INT64)
    head[say.NUMBER], head[say.HANDLE] = words[at.NUMBER], words[at.HANDLE]
    begin = head[say.OFFER + 4]
    before = np.int64(0)
    for r in range(size):
        box = box_to(table, r)
        copy_bytes(box, words[at.HEAD], 8 * say.PAYLOAD)
        pointer(box, INT64)[say.OFFER + 4] = begin + before * row_bytes
        before += sent[r * size + rank]
    signal(table, MAIL)


@njit(nogil=True, cache=True)
def _find_rows(table):
    """Where the rows of this rank's tokens lie in each rank's memory: `bases` of the scratch."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    sent, bases = pointer(words[at.LEDGER], INT64), pointer(words[at.SCRATCH], INT64)
    before = np.int64(0)
    for r in range(size):
        theirs = pointer(box_from(table, r), INT64)
        if theirs[say.OFFER + 1] == say.NO_MEMORY:
            return verdict(GENERAL, r)
        count = sent[rank * size + r]
        if r < rank:
            before += sent[r * size + rank]
        if r == rank or count == 0:
            continue
        entry = find_segment(table, r, theirs[say.OFFER + 3])
        if entry == 0:
            return verdict(MAP, r)
        known, begin = pointer(entry, INT64), theirs[say.OFFER + 4]
        if begin < 0 or begin > known[2] - count * row_bytes:
            return verdict(STRAY, r)
        bases[r] = known[1] + begin
    bases[rank] = words[at.X] + before * row_bytes
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _copy_for_others(table):
    """Copy the rows that others read, and not those that came from this rank, to the block."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    sent = pointer(words[at.LEDGER], INT64)
    before = total = np.int64(0)
    for r in range(size):
        if r < rank:
            before += sent[r * size + rank]
        total += sent[r * size + rank]
    after = before + sent[rank * size + rank]
    streaming = streams(row_bytes, (total - after + before) * row_bytes)
    copy_row(words[at.BLOCK], words[at.X], before * row_bytes, streaming)
    begin = after * row_bytes
    copy_row(words[at.BLOCK] + begin, words[at.X] + begin, (total - after) * row_bytes, streaming)


@njit(nogil=True, cache=True)
def _all_ready(table):
    """Whether every rank's rows could be read when it posted."""
    for r in range(pointer(table, INT64)[at.SIZE]):
        if pointer(box_from(table, r), INT64)[say.OFFER] == 0:
            return False
    return True


@njit(nogil=True, cache=True)
def _sum_rows(table, like, sums):
    words = pointer(table, INT64)
    size, num_tokens, row_bytes = words[at.SIZE], words[at.NUM_TOKENS], words[at.ROW_BYTES]
    bases, sources_at = pointer(words[at.SCRATCH], INT64), words[at.SCRATCH] + 8 * size
    sources = pointer(sources_at, INT64)
    starts, ranks = pointer(words[at.STARTS], INT32), pointer(words[at.COPY_RANKS], INT32)
    slots, hidden = pointer(words[at.COPY_SLOTS], INT32), row_bytes // np.int64(like.itemsize)
    moved = (starts[num_tokens] + num_tokens) * row_bytes
    streaming = streams_sums(words[at.OUT], row_bytes, moved)
    for t in range(num_tokens):
        count = np.int64(0)
        for c in range(starts[t], starts[t + 1]):
            sources[count] = bases[ranks[c]] + np.int64(slots[c]) * row_bytes
            count += 1
        out = words[at.OUT] + t * row_bytes
        sum_token(out, sources_at, sources_at, count, 1, hidden, streaming, like, sums)


@njit(nogil=True, cache=True)
def _combine_kernel(like, sums, table):
    words = pointer(table, INT64)
    open_ledger(table)
    if words[at.PHASE] == at.START:
        words[at.BEGAN] = now()
        if words[at.LEAVE_AT] == at.POSTED:
            return verdict(GENERAL, 0)
        if words[at.Y] != 0:
            _sum_shares(table, like, sums)
        _post_offer(table)
        words[at.PHASE] = at.POSTED
    if not passes(table, at.POSTED, MAIL):
        return verdict(LATE, MAIL)
    if words[at.PHASE] == at.HEARD:
        if words[at.LEAVE_AT] == at.HEARD or not same_calls(table):
            return verdict(GENERAL, 0)
        found = _find_rows(table)
        if found != DONE:
            return found
        if words[at.COPIES] != 0:
            _copy_for_others(table)
        words[at.PHASE] = at.ARRIVED
        if not _all_ready(table):
            signal(table, ROWS)
            words[at.PHASE] = at.SENT
    if not passes(table, at.SENT, ROWS):
        return verdict(LATE, ROWS)
    if words[at.PHASE] == at.ARRIVED:
        _sum_rows(table, like, sums)
        signal(table, READ)
        words[at.PHASE] = at.SUMMED
    if not passes(table, at.SUMMED, READ):
        return verdict(LATE, READ)
    count_rows(table, words[at.ROW_BYTES], True)
    return np.int64(DONE)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def exchange_combine(dtype: torch.dtype, table: int) -> Call:
    """A combine of rows of this dtype."""
    like = LIKE[dtype]
    sums = scratch(like)
    kernel = _combine_kernel.compile((typeof(like), typeof(sums), int64))
    return partial(kernel, like, sums, table)
