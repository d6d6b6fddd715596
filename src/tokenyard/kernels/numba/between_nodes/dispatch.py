"""The steps of a dispatch of few rows between nodes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import int64

from tokenyard.kernels.numba.between_nodes.messages import (
    MESSAGE_BYTES,
    Step,
    heard_from,
    mark_bytes,
    record_bytes,
    relay_kernel,
    same_calls,
    write_messages,
)
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import FLOAT32, INT32, INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.parcels import first_record
from tokenyard.kernels.numba.rows import whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE, GENERAL, STRAY


class DispatchSteps(NamedTuple):
    pack: Step  # count, and write messages to other nodes; GENERAL if an id is no expert
    fill_own: Step  # leave this rank's rows for its own node in its staging
    relay: Step  # lay out what partners sent for the ranks of the node
    hear: Step  # compare calls, read counts
    take: Step  # take this rank's rows


@njit(nogil=True, cache=True)
def _count(table):
    """Mark the ranks that get each token. The scratch holds the pairs of each expert, and then the
    tokens that go to each rank. False if an id is no expert.
    """
    words = pointer(table, INT64)
    size, num_experts, num_topk = words[at.SIZE], words[at.NUM_EXPERTS], words[at.NUM_TOPK]
    ids, owners = pointer(words[at.TOPK_IDX], INT64), pointer(words[at.RANK_OF_EXPERT], INT32)
    pairs, marks = pointer(words[at.SCRATCH], INT64), pointer(words[at.MARKS], UINT8)
    taken = pointer(words[at.SCRATCH] + 8 * (num_experts + 1), INT64)
    for e in range(num_experts + 1):
        pairs[e] = 0
    for r in range(size):
        taken[r] = 0
    pair = np.int64(0)
    for t in range(words[at.NUM_TOKENS]):
        row = t * size
        for r in range(size):
            marks[row + r] = 0
        for _ in range(num_topk):
            expert = ids[pair]
            pair += 1
            if expert < 0 or expert >= num_experts:
                if expert == -1:
                    continue
                return False
            pairs[expert] += 1
            rank = np.int64(owners[expert])
            taken[rank] += 1 - np.int64(marks[row + rank])
            marks[row + rank] = 1
    return True


@njit(nogil=True, cache=True)
def _fill(table, node, parcel):
    """Write a parcel (see `parcels`) for a node. Returns how many records it has."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    goes, bits = pointer(words[at.MARKS], UINT8), pointer(parcel, UINT8)
    first, count = firsts[node], firsts[node + 1] - firsts[node]
    num_topk, row_bytes = words[at.NUM_TOPK], words[at.ROW_BYTES]
    each, num_records = mark_bytes(count), np.int64(0)
    target = parcel + first_record(words[at.NUM_TOKENS], each)
    for t in range(words[at.NUM_TOKENS]):
        row, found = t * words[at.SIZE], np.uint8(0)
        for b in range(each):
            byte = np.uint8(0)
            for i in range(8 * b, min(8 * b + 8, count)):
                if goes[row + ranks[first + i]] != 0:
                    byte |= np.uint8(0x80 >> (i - 8 * b))
            bits[t * each + b] = byte
            found |= byte
        if found != 0:
            num_records += 1
            copy_bytes(target, words[at.X] + t * row_bytes, row_bytes)
            target += row_bytes
            copy_bytes(target, words[at.TOPK_IDX] + t * 8 * num_topk, 8 * num_topk)
            target += 8 * num_topk
            copy_bytes(target, words[at.TOPK_WEIGHTS] + t * 4 * num_topk, 4 * num_topk)
            target += 4 * num_topk
            bytes_of_t = pointer(target, UINT8)
            for i in range(4):
                bytes_of_t[i] = np.uint8((t >> (8 * i)) & 255)
            target += 4
    return num_records


@njit(nogil=True, cache=True)
def _pack_dispatch_kernel(table):
    words = pointer(table, INT64)
    if not _count(table):
        return verdict(GENERAL, 0)
    head, bytes_of_words = pointer(words[at.HEAD], INT64), pointer(words[at.WORDS], INT64)
    counts, rows = pointer(words[at.COUNTS], INT64), pointer(words[at.ROWS], INT64)
    firsts = pointer(words[at.FIRSTS], INT64)
    head[say.NUMBER], head[say.TOKENS] = words[at.NUMBER], words[at.NUM_TOKENS]
    for i in range(words[at.NUM_RAILS] * words[at.NUM_NODES]):
        counts[i] = rows[i] = 0
    target = pointer(words[at.OUTGOING], INT64)[0]
    for node in range(words[at.NUM_NODES]):
        if node == words[at.HOME]:
            continue
        write_messages(table, target, node, MESSAGE_BYTES)
        rows[node] = _fill(table, node, target + bytes_of_words[node]) * record_bytes(table)
        each = mark_bytes(firsts[node + 1] - firsts[node])
        counts[node] = bytes_of_words[node] + whole_lines(
            first_record(words[at.NUM_TOKENS], each) + rows[node]
        )
        target += counts[node]
    write_messages(table, words[at.RELAYED], words[at.HOME], words[at.NUM_PLACES] * MESSAGE_BYTES)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _fill_own_kernel(table):
    words = pointer(table, INT64)
    staged = pointer(words[at.STAGED], INT64)[words[at.PLACE]]
    return _fill(table, words[at.HOME], staged)


@njit(nogil=True, cache=True)
def _hear_dispatch_kernel(table):
    words = pointer(table, INT64)
    if not same_calls(table):
        return verdict(GENERAL, 0)
    size, num_local, alignment = words[at.SIZE], words[at.NUM_LOCAL], words[at.ALIGNMENT]
    tally, per_expert = pointer(words[at.TALLY], INT64), pointer(words[at.PER_EXPERT], INT64)
    width, each = record_bytes(table), mark_bytes(words[at.NUM_RANKS])
    num_tokens = num_rows = np.int64(0)
    for i in range(num_local):
        per_expert[i] = 0
    for r in range(size):
        theirs = pointer(heard_from(table, r), INT64)
        tokens, count = theirs[say.TOKENS], theirs[say.PAYLOAD]
        if tokens < 0 or tokens > words[at.ENCLOSED] or count < 0 or count > tokens:
            return verdict(STRAY, r)
        if first_record(tokens, each) + tokens * width > words[at.ENCLOSED]:
            return verdict(STRAY, r)
        tally[r], tally[size + r] = tokens, count
        num_tokens += tokens
        num_rows += count
        for i in range(num_local):
            per_expert[i] += theirs[say.PAYLOAD + 1 + i]
    if num_tokens * width >= at.SMALL:
        return verdict(GENERAL, 0)
    if alignment > 1:
        for i in range(num_local):
            per_expert[i] = (per_expert[i] + alignment - 1) // alignment * alignment
    words[at.NUM_ROWS] = num_rows
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _take_record(table, row, record):
    """Write one row of the results, with the experts renamed."""
    words = pointer(table, INT64)
    num_topk, row_bytes, num_experts = (
        words[at.NUM_TOPK],
        words[at.ROW_BYTES],
        words[at.NUM_EXPERTS],
    )
    copy_bytes(words[at.OUT_X] + row * row_bytes, record, row_bytes)
    record += row_bytes
    ids_at = words[at.OUT_IDX] + row * 8 * num_topk
    copy_bytes(ids_at, record, 8 * num_topk)
    record += 8 * num_topk
    weights_at = words[at.OUT_WEIGHTS] + row * 4 * num_topk
    copy_bytes(weights_at, record, 4 * num_topk)
    copy_bytes(words[at.OUT_TOKENS] + row * 4, record + 4 * num_topk, 4)
    ids, weights = pointer(ids_at, INT64), pointer(weights_at, FLOAT32)
    own = pointer(words[at.OWN_EXPERTS], INT64)
    for k in range(num_topk):
        expert = ids[k]
        here = own[expert] if 0 <= expert < num_experts else -1
        ids[k] = here
        if here < 0:
            weights[k] = 0.0


@njit(nogil=True, cache=True)
def _take_kernel(table):
    words = pointer(table, INT64)
    size, place = words[at.SIZE], words[at.PLACE]
    tally, parcels = pointer(words[at.TALLY], INT64), pointer(words[at.PARCELS], INT64)
    width, each = record_bytes(table), mark_bytes(words[at.NUM_RANKS])
    mask, kept = np.uint8(0x80 >> (place % 8)), words[at.BITS]
    row = np.int64(0)
    for s in range(size):
        tokens, end, num_records = tally[s], row + tally[size + s], np.int64(0)
        copy_bytes(kept, parcels[s], tokens * each)
        bits, record = pointer(kept, UINT8), parcels[s] + first_record(tokens, each)
        kept += tokens * each
        for t in range(tokens):
            found = np.uint8(0)
            for b in range(each):
                found |= bits[t * each + b]
            if bits[t * each + place // 8] & mask != 0:
                if row == end:
                    return verdict(STRAY, s)
                _take_record(table, row, record)
                row += 1
            if found != 0:
                record += width
                num_records += 1
        if row != end:
            return verdict(STRAY, s)
        tally[2 * size + s] = num_records
    return np.int64(DONE)


# The compiled functions themselves: a dispatcher would ask each argument's type at every call.
def nodes_dispatch(table: int) -> DispatchSteps:
    """The steps of a dispatch that read the table at this address."""
    kernels = (
        _pack_dispatch_kernel,
        _fill_own_kernel,
        relay_kernel,
        _hear_dispatch_kernel,
        _take_kernel,
    )
    return DispatchSteps(*[partial(kernel.compile((int64,)), table) for kernel in kernels])
