"""A dispatch by expert in one compiled call: count, fill a parcel, post it, wait, and take the rows
from the parcels of all ranks.

A parcel holds what a rank has for the others: experts, weights, rows and scales of all its tokens
(`parcel_bytes`). Each rank reads the parcels of all ranks, and copies the rows of its experts
straight to their places, by (expert, source rank, token). So ranks meet once. They have read a
parcel when they post their next message: its memory is written again two dispatches later. Who
wants to close his Buffer before that looks whether they have told that they have read it.

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
    count_rows,
    find_segment,
    open_ledger,
    passes,
    same_calls,
    signal,
)
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import copy_row, streams, whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import MAIL, READ
from tokenyard.wire.verdicts import DONE, GENERAL, LATE, MAP, MORE_MEMORY, MORE_ROOM, MUCH, STRAY


@njit(nogil=True, cache=True)
def parcel_bytes(num_tokens, num_topk, row_bytes, scale_bytes):
    """Of experts, weights, rows and scales of so many tokens, one column after the other."""
    ids, weights = whole_lines(num_tokens * 8 * num_topk), whole_lines(num_tokens * 4 * num_topk)
    return (
        ids + weights + whole_lines(num_tokens * row_bytes) + whole_lines(num_tokens * scale_bytes)
    )


@njit(nogil=True, cache=True)
def _is_much(table, num_tokens):
    """Whether so many tokens are too many for parcels."""
    words = pointer(table, INT64)
    return num_tokens * words[at.NUM_TOPK] * words[at.ROW_BYTES] >= words[at.MUCH_FROM]


@njit(nogil=True, cache=True)
def _fill_parcel(table):
    words = pointer(table, INT64)
    num_tokens, num_topk, row_bytes = words[at.NUM_TOKENS], words[at.NUM_TOPK], words[at.ROW_BYTES]
    to = words[at.BLOCK]
    copy_bytes(to, words[at.TOPK_IDX], num_tokens * 8 * num_topk)
    to += whole_lines(num_tokens * 8 * num_topk)
    copy_bytes(to, words[at.TOPK_WEIGHTS], num_tokens * 4 * num_topk)
    to += whole_lines(num_tokens * 4 * num_topk)
    moved = num_tokens * row_bytes
    copy_row(to, words[at.X], moved, streams(row_bytes, moved))
    to += whole_lines(num_tokens * row_bytes)
    copy_bytes(to, words[at.SCALES], num_tokens * words[at.SCALE_BYTES])


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
    """Where each rank's experts, weights, rows and scales are: four words a rank of the scratch,
    from the first one on.
    """
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    scale_bytes = words[at.SCALE_BYTES]
    num_topk, parcels = words[at.NUM_TOPK], pointer(words[at.SCRATCH], INT64)
    tokens = pointer(words[at.LEDGER] + 8 * size * size, INT64)
    for r in range(size):
        parcels[4 * r], parcels[4 * r + 1] = words[at.TOPK_IDX], words[at.TOPK_WEIGHTS]
        parcels[4 * r + 2], parcels[4 * r + 3] = words[at.X], words[at.SCALES]
        if r == rank or tokens[r] == 0:
            continue
        theirs = pointer(box_from(table, r), INT64)
        entry = find_segment(table, r, theirs[say.OFFER + 2])
        if entry == 0:
            return verdict(MAP, r)
        known = pointer(entry, INT64)
        if parcel_bytes(tokens[r], num_topk, row_bytes, scale_bytes) > known[2]:
            return verdict(STRAY, r)
        ids = known[1]
        weights = ids + whole_lines(tokens[r] * 8 * num_topk)
        rows = weights + whole_lines(tokens[r] * 4 * num_topk)
        parcels[4 * r], parcels[4 * r + 1], parcels[4 * r + 2] = ids, weights, rows
        parcels[4 * r + 3] = rows + whole_lines(tokens[r] * row_bytes)
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
        ids, weights = pointer(parcels[4 * r], INT64), pointer(parcels[4 * r + 1], FLOAT32)
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
    following = pointer(words[at.SCRATCH] + 32 * words[at.SIZE], INT64)
    end = np.int64(0)
    for e in range(num_local):
        following[e] = end
        end += (per_expert[e] + alignment - 1) // alignment * alignment
        ends[e] = end
    words[at.END] = end


@njit(nogil=True, cache=True)
def _take_rows(table):
    """Copy each row that comes to the places of its pairs."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    sent, num_topk, out = pointer(words[at.LEDGER], INT64), words[at.NUM_TOPK], words[at.RESULT]
    scale_bytes = words[at.SCALE_BYTES]
    parcels = pointer(words[at.SCRATCH], INT64)
    following = pointer(words[at.SCRATCH] + 32 * size, INT64)
    src_idx, places = pointer(words[at.SRC_IDX], INT32), pointer(words[at.ROW_OF], INT64)
    streaming = streams(row_bytes, words[at.END] * row_bytes)
    row = np.int64(0)
    for r in range(size):
        for _ in range(sent[r * size + rank]):
            source = parcels[4 * r + 2] + np.int64(src_idx[row]) * row_bytes
            scales = parcels[4 * r + 3] + np.int64(src_idx[row]) * scale_bytes
            for i in range(row * num_topk, (row + 1) * num_topk):
                expert = places[i]
                if expert < 0:
                    continue
                places[i] = following[expert]
                following[expert] += 1
                copy_row(out + places[i] * row_bytes, source, row_bytes, streaming)
                if scale_bytes != 0:
                    to = words[at.RESULT_SCALES] + places[i] * scale_bytes
                    copy_bytes(to, scales, scale_bytes)
            row += 1


@njit(nogil=True, cache=True)
def _zero(address, num_bytes):
    to = pointer(address, UINT8)
    for i in range(num_bytes):
        to[i] = 0


@njit(nogil=True, cache=True)
def _end_experts(table):
    """Add to the experts' load; zero the padding after each expert's rows, and count it."""
    words = pointer(table, INT64)
    alignment, row_bytes = words[at.ALIGNMENT], words[at.ROW_BYTES]
    scale_bytes = words[at.SCALE_BYTES]
    per_expert, ends = pointer(words[at.PER_EXPERT], INT64), pointer(words[at.ENDS], INT32)
    load = pointer(words[at.LOAD], INT64)
    for e in range(words[at.NUM_LOCAL]):
        load[e] += per_expert[e]
    if alignment > 1:
        begin = np.int64(0)
        for e in range(words[at.NUM_LOCAL]):
            used, end = begin + per_expert[e], np.int64(ends[e])
            _zero(words[at.RESULT] + used * row_bytes, (end - used) * row_bytes)
            _zero(words[at.RESULT_SCALES] + used * scale_bytes, (end - used) * scale_bytes)
            per_expert[e], begin = end - begin, end


@njit(nogil=True, cache=True)
def _hear_parcels(table):
    """Read from all messages and parcels what comes, and how many rows that makes."""
    words = pointer(table, INT64)
    found = hear_tokens(table, 0)
    if found != DONE:
        return found
    tokens = pointer(words[at.LEDGER] + 8 * words[at.SIZE] * words[at.SIZE], INT64)
    num_tokens = np.int64(0)
    for r in range(words[at.SIZE]):
        num_tokens += tokens[r]
    if _is_much(table, num_tokens):
        return verdict(MUCH, 0)
    if words[at.NUM_ROWS] > words[at.SRC_ROOM]:
        return verdict(MORE_ROOM, words[at.NUM_ROWS])
    found = _find_parcels(table)
    if found == DONE:
        found = _read_routes(table)
    if found == DONE:
        _find_ends(table)
    return found


@njit(nogil=True, cache=True)
def _by_expert_kernel(table):
    words = pointer(table, INT64)
    open_ledger(table)
    if words[at.PHASE] == at.START:
        words[at.BEGAN] = now()
        if not count_tokens(table):
            return verdict(GENERAL, 0)
        if not _is_much(table, words[at.NUM_TOKENS]):  # else nobody reads the parcel
            _fill_parcel(table)
        _post_parcel(table)
        words[at.PHASE] = at.POSTED
    if not passes(table, at.POSTED, MAIL):
        return verdict(LATE, MAIL)
    if words[at.PHASE] == at.HEARD:
        if not same_calls(table):
            return verdict(GENERAL, 0)
        found = _hear_parcels(table)
        if found != DONE:
            return found
        words[at.PHASE] = at.ARRIVED
    if words[at.PHASE] == at.ARRIVED:
        if words[at.END] * words[at.ROW_BYTES] > words[at.RESULT_BYTES]:
            return verdict(MORE_MEMORY, 0)
        _take_rows(table)
        _end_experts(table)
        fence_stores()
        width = words[at.ROW_BYTES] + words[at.SCALE_BYTES] + 12 * words[at.NUM_TOPK]
        count_rows(table, width, False)
        signal(table, READ)  # for those who wait before they leave
        words[at.PHASE] = at.SUMMED
    if words[at.FIRST] != 0 and not passes(table, at.SUMMED, READ):
        return verdict(LATE, READ)
    return np.int64(DONE)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def exchange_by_expert(table: int) -> Call:
    """A dispatch by expert that reads the table at this address."""
    return partial(_by_expert_kernel.compile((int64,)), table)
