"""A dispatch in one compiled call: count, post the counts, wait, compare the calls, find the places
of rows, write rows to other ranks, signal, wait, localise.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import int64

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
from tokenyard.kernels.numba.llvm.pointers import (
    FLOAT32,
    INT32,
    INT64,
    copy_bytes,
    pointer,
    trailing_zeros,
)
from tokenyard.kernels.numba.rows import copy_row, stream_row_to, streams, whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import LINE
from tokenyard.wire.signals import MAIL, ROWS
from tokenyard.wire.verdicts import DONE, GENERAL, LATE, MAP, MORE_ROOM, STRAY

_MOST_TOKENS = np.int64(1) << 31


@njit(nogil=True, cache=True)
def count_tokens(table):
    """Which ranks get each token, and how many pairs each expert; False if an id is no expert.

    The scratch holds, after the pairs of each expert, the tokens that go to each rank.
    """
    words = pointer(table, INT64)
    size, num_experts, num_topk = words[at.SIZE], words[at.NUM_EXPERTS], words[at.NUM_TOPK]
    ids, owners = pointer(words[at.TOPK_IDX], INT64), pointer(words[at.RANK_OF_EXPERT], INT32)
    pairs = pointer(words[at.SCRATCH], INT64)
    taken = pointer(words[at.SCRATCH] + 8 * (num_experts + 1), INT64)
    starts, ranks = pointer(words[at.STARTS], INT32), pointer(words[at.COPY_RANKS], INT32)
    slots = pointer(words[at.COPY_SLOTS], INT32)
    for e in range(num_experts + 1):
        pairs[e] = 0
    for r in range(size):
        taken[r] = 0
    one, copy = np.uint64(1), np.int64(0)
    pair = np.int64(0)
    for t in range(words[at.NUM_TOKENS]):
        starts[t] = copy
        mask = np.uint64(0)
        for _ in range(num_topk):
            expert = ids[pair]
            pair += 1
            if expert < 0 or expert >= num_experts:
                if expert == -1:
                    continue
                return False
            pairs[expert] += 1
            mask |= one << np.uint64(owners[expert])
        while mask != 0:
            r = np.int64(trailing_zeros(mask))
            mask &= mask - one
            ranks[copy] = r
            slots[copy] = taken[r]
            taken[r] += 1
            copy += 1
    starts[words[at.NUM_TOKENS]] = copy
    words[at.NUM_COPIES] = copy
    return True


@njit(nogil=True, cache=True)
def _post_counts(table):
    words = pointer(table, INT64)
    size, num_experts, most = words[at.SIZE], words[at.NUM_EXPERTS], words[at.MOST_EXPERTS]
    pairs = pointer(words[at.SCRATCH], INT64)
    taken = pointer(words[at.SCRATCH] + 8 * (num_experts + 1), INT64)
    experts = pointer(words[at.PADDED_EXPERTS], INT64)
    head = pointer(words[at.HEAD], INT64)
    head[say.NUMBER], head[say.TOKENS] = words[at.NUMBER], words[at.NUM_TOKENS]
    for r in range(size):
        box = box_to(table, r)
        copy_bytes(box, words[at.HEAD], 8 * say.PAYLOAD)
        told = pointer(box + 8 * say.PAYLOAD, INT64)
        told[0] = taken[r]
        for i in range(most):
            told[1 + i] = pairs[experts[r * most + i]]
        for i in range(size):
            told[1 + most + i] = taken[i]
    signal(table, MAIL)


@njit(nogil=True, cache=True)
def _block_bytes(table, num_rows):
    """Bytes of a block for so many rows: x, topk_idx, topk_weights, src_idx."""
    words = pointer(table, INT64)
    end = whole_lines(num_rows * words[at.ROW_BYTES])
    end += whole_lines(num_rows * 8 * words[at.NUM_TOPK])
    return end + whole_lines(num_rows * 4 * words[at.NUM_TOPK]) + whole_lines(num_rows * 4)


@njit(nogil=True, cache=True)
def hear_tokens(table, first):
    """Read from all messages how many tokens go from whom to whom: the words of the payload from
    `first` on.
    """
    words = pointer(table, INT64)
    rank, size = words[at.RANK], words[at.SIZE]
    sent, tokens = (
        pointer(words[at.LEDGER], INT64),
        pointer(words[at.LEDGER] + 8 * size * size, INT64),
    )
    num_rows = np.int64(0)
    for r in range(size):
        theirs = pointer(box_from(table, r), INT64)
        tokens[r] = theirs[say.TOKENS]
        if tokens[r] < 0 or tokens[r] > _MOST_TOKENS:
            return verdict(STRAY, r)
        for i in range(size):
            count = theirs[say.PAYLOAD + first + i]
            if count < 0 or count > tokens[r]:
                return verdict(STRAY, r)
            sent[r * size + i] = count
        num_rows += sent[r * size + rank]
    words[at.NUM_ROWS] = num_rows
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _hear_counts(table):
    """Read all ranks' counts: rows from whom to whom, and pairs of this rank's experts."""
    words = pointer(table, INT64)
    rank, size, most = words[at.RANK], words[at.SIZE], words[at.MOST_EXPERTS]
    num_local, alignment = words[at.NUM_LOCAL], words[at.ALIGNMENT]
    found = hear_tokens(table, 1 + most)
    if found != DONE:
        return found
    sent, per_expert = pointer(words[at.LEDGER], INT64), pointer(words[at.PER_EXPERT], INT64)
    for i in range(num_local):
        per_expert[i] = 0
    for r in range(size):
        theirs = pointer(box_from(table, r), INT64)
        for i in range(num_local):
            per_expert[i] += theirs[say.PAYLOAD + 1 + i]
        if theirs[say.PAYLOAD] != sent[r * size + rank]:
            return verdict(STRAY, r)
    if alignment > 1:
        for i in range(num_local):
            per_expert[i] = (per_expert[i] + alignment - 1) // alignment * alignment
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _find_blocks(table):
    """Where this rank's rows go in each rank's block. The scratch holds, after the pairs and the
    tokens of each rank, for each rank: its block, the rows that come to it, the first of them that
    is this rank's.
    """
    words = pointer(table, INT64)
    rank, size = words[at.RANK], words[at.SIZE]
    sent = pointer(words[at.LEDGER], INT64)
    scratch_at = words[at.SCRATCH] + 8 * (words[at.NUM_EXPERTS] + 1)
    blocks, rows = pointer(scratch_at + 8 * size, INT64), pointer(scratch_at + 16 * size, INT64)
    firsts = pointer(scratch_at + 24 * size, INT64)
    for r in range(size):
        rows[r] = firsts[r] = 0
        for i in range(size):
            if i == rank:
                firsts[r] = rows[r]
            rows[r] += sent[i * size + r]
    for r in range(size):
        room = pointer(box_from(table, r), INT64)[say.OFFER + 1]
        if _block_bytes(table, rows[r]) > room:
            return verdict(GENERAL, r)
        blocks[r] = words[at.BLOCK]
        if r != rank and sent[rank * size + r] != 0:
            theirs = pointer(box_from(table, r), INT64)
            entry = find_segment(table, r, theirs[say.OFFER + 2])
            if entry == 0:
                return verdict(MAP, r)
            known = pointer(entry, INT64)
            if known[2] != room:
                return verdict(STRAY, r)
            blocks[r] = known[1]
    words[at.NUM_ROWS], words[at.END] = rows[rank], _block_bytes(table, rows[rank])
    if rows[rank] > words[at.SRC_ROOM]:
        return verdict(MORE_ROOM, rows[rank])
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _write_rows(table):
    words = pointer(table, INT64)
    size, num_topk, row_bytes = words[at.SIZE], words[at.NUM_TOPK], words[at.ROW_BYTES]
    scratch_at = words[at.SCRATCH] + 8 * (words[at.NUM_EXPERTS] + 1)
    blocks, rows = pointer(scratch_at + 8 * size, INT64), pointer(scratch_at + 16 * size, INT64)
    firsts = pointer(scratch_at + 24 * size, INT64)
    starts, ranks = pointer(words[at.STARTS], INT32), pointer(words[at.COPY_RANKS], INT32)
    slots = pointer(words[at.COPY_SLOTS], INT32)
    streaming = streams(row_bytes, words[at.NUM_COPIES] * row_bytes)
    # Blocks begin on lines, so rows of whole lines do: one reading for all ranks.
    together = streaming and row_bytes % LINE == 0
    targets_at = scratch_at + 32 * size
    targets = pointer(targets_at, INT64)
    for t in range(words[at.NUM_TOKENS]):
        x = words[at.X] + t * row_bytes
        topk_idx, weights = (
            words[at.TOPK_IDX] + t * 8 * num_topk,
            words[at.TOPK_WEIGHTS] + t * 4 * num_topk,
        )
        for c in range(starts[t], starts[t + 1]):
            r = np.int64(ranks[c])
            row, target = firsts[r] + np.int64(slots[c]), blocks[r]
            if together:
                targets[c - starts[t]] = target + row * row_bytes
            else:
                copy_row(target + row * row_bytes, x, row_bytes, streaming)
            target += whole_lines(rows[r] * row_bytes)
            copy_bytes(target + row * 8 * num_topk, topk_idx, 8 * num_topk)
            target += whole_lines(rows[r] * 8 * num_topk)
            copy_bytes(target + row * 4 * num_topk, weights, 4 * num_topk)
            target += whole_lines(rows[r] * 4 * num_topk)
            pointer(target, INT32)[row] = t
        if together:
            stream_row_to(targets_at, starts[t + 1] - starts[t], x, row_bytes)


@njit(nogil=True, cache=True)
def _localise(table):
    """Rename experts in the rows that have arrived, and keep the token of each."""
    words = pointer(table, INT64)
    num_rows, num_topk, num_experts = words[at.NUM_ROWS], words[at.NUM_TOPK], words[at.NUM_EXPERTS]
    begin = words[at.BLOCK] + whole_lines(num_rows * words[at.ROW_BYTES])
    ids, own = pointer(begin, INT64), pointer(words[at.OWN_EXPERTS], INT64)
    begin += whole_lines(num_rows * 8 * num_topk)
    weights = pointer(begin, FLOAT32)
    for i in range(num_rows * num_topk):
        expert = ids[i]
        here = own[expert] if 0 <= expert < num_experts else -1
        ids[i] = here
        if here < 0:
            weights[i] = 0.0
    copy_bytes(words[at.SRC_IDX], begin + whole_lines(num_rows * 4 * num_topk), 4 * num_rows)


@njit(nogil=True, cache=True)
def _count_load(table):
    """Add to the load of this rank's experts what all ranks have told."""
    words = pointer(table, INT64)
    load = pointer(words[at.LOAD], INT64)
    if words[at.LOAD] != 0:
        for r in range(words[at.SIZE]):
            told = pointer(box_from(table, r) + 8 * (say.PAYLOAD + 1), INT64)
            for i in range(words[at.NUM_LOCAL]):
                load[i] += told[i]


@njit(nogil=True, cache=True)
def _dispatch_kernel(table):
    words = pointer(table, INT64)
    open_ledger(table)
    if words[at.PHASE] == at.START:
        words[at.BEGAN] = now()
        if words[at.LEAVE_AT] == at.POSTED or not count_tokens(table):
            return verdict(GENERAL, 0)
        _post_counts(table)
        words[at.PHASE] = at.POSTED
    if not passes(table, at.POSTED, MAIL):
        return verdict(LATE, MAIL)
    if words[at.PHASE] == at.HEARD:
        if words[at.LEAVE_AT] == at.HEARD or not same_calls(table):
            return verdict(GENERAL, 0)
        found = _hear_counts(table)
        if found == DONE:
            found = _find_blocks(table)
        if found != DONE:
            return found
        _write_rows(table)
        signal(table, ROWS)
        words[at.PHASE] = at.SENT
    if not passes(table, at.SENT, ROWS):
        return verdict(LATE, ROWS)
    if words[at.PHASE] == at.ARRIVED:
        _localise(table)
        _count_load(table)
        count_rows(table, words[at.ROW_BYTES] + 12 * words[at.NUM_TOPK] + 4, False)
        words[at.PHASE] = at.OVER
    return np.int64(DONE)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def exchange_dispatch(table: int) -> Call:
    """A dispatch that reads the table at this address."""
    return partial(_dispatch_kernel.compile((int64,)), table)
