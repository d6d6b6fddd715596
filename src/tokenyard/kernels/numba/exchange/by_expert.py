"""A dispatch by expert in one compiled call: count, fill a parcel, post it, wait, and take the rows
from the parcels of all ranks.

A parcel holds what a rank has for the others: experts and weights of all its tokens, and their rows
(`parcel_bytes`). Each rank reads the parcels of all ranks, and copies the rows of its experts
straight to their places, by (expert, source rank, token). So ranks meet once. They have read a
parcel when they post their next message: its memory is written again two dispatches later.

What is read of a parcel twice is copied first, since another rank could change it in between.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import int64

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.exchange.dispatch import count_tokens, hear_tokens
from tokenyard.kernels.numba.exchange.protocol import (
    Call,
    box_from,
    box_to,
    column_bytes,
    count_rows,
    find_segment,
    open_ledger,
    passes,
    same_calls,
    signal,
    verdict,
)
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import copy_row, stream_row_to, streams
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import LINE
from tokenyard.wire.exchange_table import (
    DONE,
    GENERAL,
    LATE,
    MAP,
    MORE_MEMORY,
    MORE_ROOM,
    STRAY,
)
from tokenyard.wire.signals import MAIL


@njit(nogil=True, cache=True)
def parcel_bytes(num_tokens, num_topk, row_bytes):
    """Of experts, weights and rows of so many tokens, one column after the other."""
    ids, weights = column_bytes(num_tokens, 8 * num_topk), column_bytes(num_tokens, 4 * num_topk)
    return ids + weights + column_bytes(num_tokens, row_bytes)


@njit(nogil=True, cache=True)
def _fill_parcel(table):
    words = pointer(table, INT64)
    num_tokens, num_topk, row_bytes = words[at.NUM_TOKENS], words[at.NUM_TOPK], words[at.ROW_BYTES]
    to = words[at.BLOCK]
    copy_bytes(to, words[at.TOPK_IDX], num_tokens * 8 * num_topk)
    to += column_bytes(num_tokens, 8 * num_topk)
    copy_bytes(to, words[at.TOPK_WEIGHTS], num_tokens * 4 * num_topk)
    to += column_bytes(num_tokens, 4 * num_topk)
    moved = num_tokens * row_bytes
    copy_row(to, words[at.X], moved, streams(row_bytes, moved))


@njit(nogil=True, cache=True)
def _post_parcel(table):
    """Tell all ranks where the parcel is, and how many tokens go to each of them."""
    words = pointer(table, INT64)
    size, head = words[at.SIZE], pointer(words[at.HEAD], INT64)
    taken_at = words[at.SCRATCH] + 8 * (words[at.NUM_EXPERTS] + 1)
    head[say.NUMBER], head[say.TOKENS] = words[at.NUMBER], words[at.NUM_TOKENS]
    for r in range(size):
        box = box_to(table, r)
        copy_bytes(box, words[at.HEAD], 8 * say.PAYLOAD)
        copy_bytes(box + 8 * say.PAYLOAD, taken_at, 8 * size)
    signal(table, MAIL)


@njit(nogil=True, cache=True)
def _find_parcels(table):
    """Where each rank's experts, weights and rows are: three words a rank of the scratch, from the
    first one on.
    """
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    num_topk, parcels = words[at.NUM_TOPK], pointer(words[at.SCRATCH], INT64)
    tokens = pointer(words[at.LEDGER] + 8 * size * size, INT64)
    for r in range(size):
        parcels[3 * r] = words[at.TOPK_IDX]
        parcels[3 * r + 1], parcels[3 * r + 2] = words[at.TOPK_WEIGHTS], words[at.X]
        if r == rank or tokens[r] == 0:
            continue
        theirs = pointer(box_from(table, r), INT64)
        entry = find_segment(table, r, theirs[say.OFFER + 2])
        if entry == 0:
            return verdict(MAP, r)
        known, begin = pointer(entry, INT64), theirs[say.OFFER + 3]
        if begin < 0 or begin > known[2] - parcel_bytes(tokens[r], num_topk, row_bytes):
            return verdict(STRAY, r)
        ids = known[1] + begin
        weights = ids + column_bytes(tokens[r], 8 * num_topk)
        parcels[3 * r], parcels[3 * r + 1] = ids, weights
        parcels[3 * r + 2] = weights + column_bytes(tokens[r], 4 * num_topk)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _read_routes(table):
    """Copy which pairs of each token that comes are of which own expert, and their weights."""
    words = pointer(table, INT64)
    rank, size, num_topk = words[at.RANK], words[at.SIZE], words[at.NUM_TOPK]
    sent, tokens = (
        pointer(words[at.LEDGER], INT64),
        pointer(words[at.LEDGER] + 8 * size * size, INT64),
    )
    own, num_experts = pointer(words[at.OWN_EXPERTS], INT64), words[at.NUM_EXPERTS]
    parcels, per_expert = pointer(words[at.SCRATCH], INT64), pointer(words[at.PER_EXPERT], INT64)
    src_idx, places = pointer(words[at.SRC_IDX], INT32), pointer(words[at.ROW_OF], INT64)
    factors = pointer(words[at.FACTORS], FLOAT32)
    for e in range(words[at.NUM_LOCAL]):
        per_expert[e] = 0
    row = end = np.int64(0)
    for r in range(size):
        end += sent[r * size + rank]
        ids, weights = pointer(parcels[3 * r], INT64), pointer(parcels[3 * r + 1], FLOAT32)
        for t in range(tokens[r]):
            here = False
            for k in range(num_topk):
                expert = ids[t * num_topk + k]
                if expert >= num_experts or expert < -1:
                    return verdict(STRAY, r)
                local = own[expert] if expert >= 0 else np.int64(-1)
                if local < 0:
                    continue
                if not here:
                    if row == end:
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
def _find_ends(table):
    """Where each expert's rows begin, in the scratch after the parcels, and where they end."""
    words = pointer(table, INT64)
    alignment, num_local = words[at.ALIGNMENT], words[at.NUM_LOCAL]
    per_expert, ends = pointer(words[at.PER_EXPERT], INT64), pointer(words[at.ENDS], INT32)
    following = pointer(words[at.SCRATCH] + 24 * words[at.SIZE], INT64)
    end = np.int64(0)
    for e in range(num_local):
        following[e] = end
        end += (per_expert[e] + alignment - 1) // alignment * alignment
        ends[e] = end
    words[at.END] = end
    return end * words[at.ROW_BYTES] <= words[at.RESULT_BYTES]


@njit(nogil=True, cache=True)
def _take_rows(table):
    """Copy each row that comes to the places of its pairs: read once where it lies."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    sent, num_topk, out = pointer(words[at.LEDGER], INT64), words[at.NUM_TOPK], words[at.RESULT]
    parcels = pointer(words[at.SCRATCH], INT64)
    following = pointer(words[at.SCRATCH] + 24 * size, INT64)
    src_idx, places = pointer(words[at.SRC_IDX], INT32), pointer(words[at.ROW_OF], INT64)
    streaming = streams(row_bytes, words[at.END] * row_bytes)
    together = streaming and row_bytes % LINE == 0 == out % LINE
    targets_at = words[at.TERMS]
    targets, row = pointer(targets_at, INT64), np.int64(0)
    for r in range(size):
        for _ in range(sent[r * size + rank]):
            source = parcels[3 * r + 2] + np.int64(src_idx[row]) * row_bytes
            count = np.int64(0)
            for i in range(row * num_topk, (row + 1) * num_topk):
                expert = places[i]
                if expert < 0:
                    continue
                places[i] = following[expert]
                following[expert] += 1
                targets[count] = out + places[i] * row_bytes
                count += 1
            if together:
                stream_row_to(targets_at, count, source, row_bytes)
            else:
                for c in range(count):
                    copy_row(targets[c], source, row_bytes, streaming)
                    source = targets[c]
            row += 1


@njit(nogil=True, cache=True)
def _end_experts(table):
    """Add to the experts' load; zero the padding after each expert's rows, and count it."""
    words = pointer(table, INT64)
    alignment, row_bytes = words[at.ALIGNMENT], words[at.ROW_BYTES]
    per_expert, ends = pointer(words[at.PER_EXPERT], INT64), pointer(words[at.ENDS], INT32)
    load = pointer(words[at.LOAD], INT64)
    for e in range(words[at.NUM_LOCAL]):
        load[e] += per_expert[e]
    if alignment > 1:
        begin = np.int64(0)
        for e in range(words[at.NUM_LOCAL]):
            used, end = begin + per_expert[e], np.int64(ends[e])
            rest = pointer(words[at.RESULT] + used * row_bytes, UINT8)
            for i in range((end - used) * row_bytes):
                rest[i] = 0
            per_expert[e], begin = end - begin, end


@njit(nogil=True, cache=True)
def _by_expert_kernel(table):
    words = pointer(table, INT64)
    open_ledger(table)
    if words[at.PHASE] == at.START:
        words[at.BEGAN] = now()
        if not count_tokens(table):
            return verdict(GENERAL, 0)
        _fill_parcel(table)
        _post_parcel(table)
        words[at.PHASE] = at.POSTED
    if not passes(table, at.POSTED, MAIL):
        return verdict(LATE, MAIL)
    if words[at.PHASE] == at.HEARD:
        if not same_calls(table):
            return verdict(GENERAL, 0)
        found = hear_tokens(table, 0)
        if found == DONE and words[at.NUM_ROWS] > words[at.SRC_ROOM]:
            return verdict(MORE_ROOM, words[at.NUM_ROWS])
        if found == DONE:
            found = _find_parcels(table)
        if found == DONE:
            found = _read_routes(table)
        if found != DONE:
            return found
        if not _find_ends(table):
            return verdict(MORE_MEMORY, 0)
        _take_rows(table)
        _end_experts(table)
        fence_stores()
        count_rows(table, words[at.ROW_BYTES] + 12 * words[at.NUM_TOPK], False)
        words[at.PHASE] = at.OVER
    return np.int64(DONE)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def exchange_by_expert(table: int) -> Call:
    """A dispatch by expert that reads the table at this address."""
    return partial(_by_expert_kernel.compile((int64,)), table)
