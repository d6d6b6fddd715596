"""The steps of a call of few rows between nodes, compiled.

They do what the engine and `transports.hierarchical.enclosed` do, on the same messages and parcels,
so that a rank may make a call this way while another makes it that way. Between the steps Python
exchanges messages with other nodes and with the ranks of its own.

A step takes the address of a table (`wire.nodes_table`) and never waits. What another rank wrote is
compared with what it may be before it becomes an address, a place or a count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import (
    FLOAT32,
    INT32,
    INT64,
    LIKE,
    UINT8,
    copy_bytes,
    pointer,
)
from tokenyard.kernels.numba.parcels import first_record
from tokenyard.kernels.numba.reduce import scratch, sum_token
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.columns import LINE

_MESSAGE = 8 * (at.BEFORE + say.MESSAGE_WORDS)  # bytes

Step = Callable[[], int]


class DispatchSteps(NamedTuple):
    pack: Step  # count, and write messages to other nodes; GENERAL if an id is no expert
    fill_own: Step  # leave this rank's rows for its own node in its staging
    relay: Step  # lay out what partners sent for the ranks of the node
    hear: Step  # compare calls, read counts
    take: Step  # take this rank's rows


class CombineSteps(NamedTuple):
    stage: Step  # leave the rows that other ranks of the node sum
    pack: Step  # sum for other nodes, and write messages; GENERAL if neighbours staged other rows
    relay: Step
    hear: Step
    add_up: Step  # the sums of this rank's tokens


@njit(nogil=True, cache=True)
def _verdict(what, which):
    return np.int64(what) << 32 | np.int64(which)


@njit(nogil=True, cache=True)
def _whole_lines(num_bytes):
    return (num_bytes + LINE - 1) // LINE * LINE


@njit(nogil=True, cache=True)
def _mark_bytes(num_ranks):
    """Bytes of a token's marks in a parcel."""
    return (num_ranks + 7) // 8


@njit(nogil=True, cache=True)
def _record_bytes(table):
    """A token in a parcel: x, topk_idx, topk_weights and its number."""
    words = pointer(table, INT64)
    return words[at.ROW_BYTES] + 12 * words[at.NUM_TOPK] + 4


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
def _write_message(table, target, rank):
    """The message of this rank to another, which encloses its rows."""
    words, told = pointer(table, INT64), pointer(target, INT64)
    told[at.STATE] = at.ENCLOSES
    told[at.WANTS_ENCLOSED_AT], told[at.WANTS_STAGED_AT] = words[at.WANTS], words[at.WANTS_STAGED]
    copy_bytes(target + 8 * at.BEFORE, words[at.HEAD], 8 * say.PAYLOAD)
    num_experts, most = words[at.NUM_EXPERTS], words[at.MOST_EXPERTS]
    if num_experts > 0:
        pairs = pointer(words[at.SCRATCH], INT64)
        taken = pointer(words[at.SCRATCH] + 8 * (num_experts + 1), INT64)
        experts = pointer(words[at.PADDED_EXPERTS], INT64)
        payload = at.BEFORE + say.PAYLOAD
        told[payload] = taken[rank]
        for i in range(most):
            told[payload + 1 + i] = pairs[experts[rank * most + i]]


@njit(nogil=True, cache=True)
def _write_messages(table, target, node, stride):
    """Messages to the ranks of a node, one every so many bytes."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    for i in range(firsts[node], firsts[node + 1]):
        _write_message(table, target + (i - firsts[node]) * stride, ranks[i])


@njit(nogil=True, cache=True)
def _fill(table, node, parcel):
    """Write a parcel (see `parcels`) for a node. Returns how many records it has."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    goes, bits = pointer(words[at.MARKS], UINT8), pointer(parcel, UINT8)
    first, count = firsts[node], firsts[node + 1] - firsts[node]
    num_topk, row_bytes = words[at.NUM_TOPK], words[at.ROW_BYTES]
    each, num_records = _mark_bytes(count), np.int64(0)
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
        return _verdict(at.GENERAL, 0)
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
        _write_messages(table, target, node, _MESSAGE)
        rows[node] = _fill(table, node, target + bytes_of_words[node]) * _record_bytes(table)
        each = _mark_bytes(firsts[node + 1] - firsts[node])
        counts[node] = bytes_of_words[node] + _whole_lines(
            first_record(words[at.NUM_TOKENS], each) + rows[node]
        )
        target += counts[node]
    _write_messages(table, words[at.RELAYED], words[at.HOME], words[at.NUM_PLACES] * _MESSAGE)
    return np.int64(at.DONE)


@njit(nogil=True, cache=True)
def _fill_own_kernel(table):
    words = pointer(table, INT64)
    staged = pointer(words[at.STAGED], INT64)[words[at.PLACE]]
    return _fill(table, words[at.HOME], staged)


@njit(nogil=True, cache=True)
def _relay_kernel(table):
    words = pointer(table, INT64)
    parts, places = pointer(words[at.PARTS], INT64), words[at.NUM_PLACES]
    for p in range(words[at.NUM_PARTNERS]):
        for i in range(words[at.NUM_RANKS]):
            target = words[at.RELAYED] + (i * places + 1 + p) * _MESSAGE
            copy_bytes(target, parts[p] + i * _MESSAGE, _MESSAGE)
    return np.int64(at.DONE)


@njit(nogil=True, cache=True)
def _heard_from(table, rank):
    """The address of what a rank told this one, after the words before each message."""
    words = pointer(table, INT64)
    return words[at.HEARD] + pointer(words[at.SLOTS], INT64)[rank] * _MESSAGE + 8 * at.BEFORE


@njit(nogil=True, cache=True)
def _same_calls(table):
    """Whether all ranks make the call that this one makes, with good input, and enclose theirs."""
    words = pointer(table, INT64)
    mine = pointer(words[at.HEAD], INT64)
    for r in range(words[at.SIZE]):
        theirs = pointer(_heard_from(table, r), INT64)
        state = pointer(_heard_from(table, r) - 8 * at.BEFORE, INT64)[at.STATE]
        if state != at.ENCLOSES or theirs[say.WORST] != 0:
            return False
        for i in range(say.TOKENS):
            if theirs[i] != mine[i]:
                return False
    return True


@njit(nogil=True, cache=True)
def _hear_dispatch_kernel(table):
    words = pointer(table, INT64)
    if not _same_calls(table):
        return _verdict(at.GENERAL, 0)
    size, num_local, alignment = words[at.SIZE], words[at.NUM_LOCAL], words[at.ALIGNMENT]
    tally, per_expert = pointer(words[at.TALLY], INT64), pointer(words[at.PER_EXPERT], INT64)
    width, each = _record_bytes(table), _mark_bytes(words[at.NUM_RANKS])
    num_tokens = num_rows = np.int64(0)
    for i in range(num_local):
        per_expert[i] = 0
    for r in range(size):
        theirs = pointer(_heard_from(table, r), INT64)
        tokens, count = theirs[say.TOKENS], theirs[say.PAYLOAD]
        if tokens < 0 or tokens > words[at.ENCLOSED] or count < 0 or count > tokens:
            return _verdict(at.STRAY, r)
        if first_record(tokens, each) + tokens * width > words[at.ENCLOSED]:
            return _verdict(at.STRAY, r)
        tally[r], tally[size + r] = tokens, count
        num_tokens += tokens
        num_rows += count
        for i in range(num_local):
            per_expert[i] += theirs[say.PAYLOAD + 1 + i]
    if num_tokens * width >= at.SMALL:
        return _verdict(at.GENERAL, 0)
    if alignment > 1:
        for i in range(num_local):
            per_expert[i] = (per_expert[i] + alignment - 1) // alignment * alignment
    words[at.NUM_ROWS] = num_rows
    return np.int64(at.DONE)


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
    width, each = _record_bytes(table), _mark_bytes(words[at.NUM_RANKS])
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
                    return _verdict(at.STRAY, s)
                _take_record(table, row, record)
                row += 1
            if found != 0:
                record += width
                num_records += 1
        if row != end:
            return _verdict(at.STRAY, s)
        tally[2 * size + s] = num_records
    return np.int64(at.DONE)


@njit(nogil=True, cache=True)
def _sums_here(table, source):
    """Whether this rank sums the rows of a source's tokens: its own, or those that it relays."""
    words = pointer(table, INT64)
    relays = pointer(words[at.RELAYS], INT64)
    for link in range(words[at.NUM_RAILS] * words[at.NUM_NODES]):
        if relays[link] == source:
            return True
    return source == words[at.RANK]


@njit(nogil=True, cache=True)
def _stage_kernel(table):
    words = pointer(table, INT64)
    staged = pointer(words[at.STAGED], INT64)[words[at.PLACE]]
    header = pointer(staged, INT64)
    for i in range(at.HEADER):
        header[i] = 0
    header[0], header[1], header[2] = words[at.HANDLE], 1, words[at.ROW_BYTES]
    counts = pointer(words[at.TALLY] + 8 * words[at.SIZE], INT64)
    begin = np.int64(0)
    for s in range(words[at.SIZE]):
        num_bytes = counts[s] * words[at.ROW_BYTES]
        if not _sums_here(table, s):
            copy_bytes(staged + 8 * at.HEADER + begin, words[at.X] + begin, num_bytes)
        begin += num_bytes
    return np.int64(at.DONE)


@njit(nogil=True, cache=True)
def _find_rows(table):
    """Where each source's rows begin in what each local rank has got: [R, L] in the scratch, after
    [L] addresses of the local ranks' rows, and before [R], where each source's marks begin.

    False if a local rank has staged the rows of another call.
    """
    words = pointer(table, INT64)
    size, num_ranks, place = words[at.SIZE], words[at.NUM_RANKS], words[at.PLACE]
    staged, tally = pointer(words[at.STAGED], INT64), pointer(words[at.TALLY], INT64)
    bases = pointer(words[at.SCRATCH], INT64)
    starts = pointer(words[at.SCRATCH] + 8 * num_ranks, INT64)
    marks_at = pointer(words[at.SCRATCH] + 8 * num_ranks * (1 + size), INT64)
    mine = pointer(staged[place], INT64)
    for i in range(num_ranks):
        theirs = pointer(staged[i], INT64)
        for w in range(at.HEADER):
            if theirs[w] != mine[w]:
                return False
        bases[i] = staged[i] + 8 * at.HEADER
        starts[i] = 0
    bases[place] = words[at.X]
    each, marks = _mark_bytes(num_ranks), words[at.BITS]
    for s in range(size):
        marks_at[s] = marks
        bits = pointer(marks, UINT8)
        after = pointer(words[at.SCRATCH] + 8 * num_ranks * (2 + s), INT64)
        if s + 1 == size:
            break
        for i in range(num_ranks):
            count, mask = starts[s * num_ranks + i], np.uint8(0x80 >> (i % 8))
            for t in range(tally[s]):
                count += np.int64(bits[t * each + i // 8] & mask != 0)
            after[i] = count
        marks += tally[s] * each
    return True


@njit(nogil=True, cache=True)
def _sum_for(table, source, out, like, sums):
    """Sum the node's rows of a source's tokens, and round. Returns how many there are."""
    words = pointer(table, INT64)
    size, num_ranks, row_bytes = words[at.SIZE], words[at.NUM_RANKS], words[at.ROW_BYTES]
    bases = pointer(words[at.SCRATCH], INT64)
    starts = pointer(words[at.SCRATCH] + 8 * num_ranks * (1 + source), INT64)
    bits = pointer(pointer(words[at.SCRATCH] + 8 * num_ranks * (1 + size), INT64)[source], UINT8)
    each, hidden = _mark_bytes(num_ranks), row_bytes // np.int64(like.itemsize)
    used, sources = np.zeros(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    num_rows, rows_at = np.int64(0), sources.ctypes.data
    for t in range(pointer(words[at.TALLY], INT64)[source]):
        count = np.int64(0)
        for i in range(num_ranks):
            if bits[t * each + i // 8] & np.uint8(0x80 >> (i % 8)) != 0:
                sources[count] = bases[i] + (starts[i] + used[i]) * row_bytes
                used[i] += 1
                count += 1
        if count > 0:
            target = out + num_rows * row_bytes
            sum_token(target, rows_at, rows_at, count, 1, hidden, False, like, sums)
            num_rows += 1
    return num_rows


@njit(nogil=True, cache=True)
def _pack_combine_kernel(like, sums, table):
    words = pointer(table, INT64)
    if not _find_rows(table):
        return _verdict(at.GENERAL, 0)
    head, bytes_of_words = pointer(words[at.HEAD], INT64), pointer(words[at.WORDS], INT64)
    counts, rows = pointer(words[at.COUNTS], INT64), pointer(words[at.ROWS], INT64)
    relays, outgoing = pointer(words[at.RELAYS], INT64), pointer(words[at.OUTGOING], INT64)
    num_nodes, row_bytes = words[at.NUM_NODES], words[at.ROW_BYTES]
    head[say.NUMBER], head[say.HANDLE] = words[at.NUMBER], words[at.HANDLE]
    for rail in range(words[at.NUM_RAILS]):
        target = outgoing[rail]
        for node in range(num_nodes):
            link = rail * num_nodes + node
            counts[link] = rows[link] = 0
            if node == words[at.HOME]:
                continue
            if rail == 0:
                _write_messages(table, target, node, _MESSAGE)
                counts[link] = bytes_of_words[node]
            if relays[link] >= 0:
                begin = target + bytes_of_words[node]
                rows[link] = _sum_for(table, relays[link], begin, like, sums) * row_bytes
                counts[link] = bytes_of_words[node] + _whole_lines(rows[link])
            target += counts[link]
    _write_messages(table, words[at.RELAYED], words[at.HOME], words[at.NUM_PLACES] * _MESSAGE)
    return np.int64(at.DONE)


@njit(nogil=True, cache=True)
def _hear_combine_kernel(table):
    return np.int64(at.DONE) if _same_calls(table) else _verdict(at.GENERAL, 0)


@njit(nogil=True, cache=True)
def _add_up_kernel(like, sums, table):
    words = pointer(table, INT64)
    size, num_ranks, row_bytes = words[at.SIZE], words[at.NUM_RANKS], words[at.ROW_BYTES]
    num_nodes, home = words[at.NUM_NODES], words[at.HOME]
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    bases, goes = pointer(words[at.SCRATCH], INT64), pointer(words[at.MARKS], UINT8)
    starts = pointer(words[at.SCRATCH] + 8 * num_ranks * (1 + words[at.RANK]), INT64)
    received = pointer(words[at.RECEIVED], INT64)
    used, came = np.zeros(num_ranks, np.int64), np.zeros(num_nodes, np.int64)
    sources = np.empty(num_ranks + num_nodes, np.int64)
    homes = np.empty(num_ranks + num_nodes, np.int32)
    rows_at, homes_at = sources.ctypes.data, homes.ctypes.data
    hidden = row_bytes // np.int64(like.itemsize)
    for t in range(words[at.NUM_TOKENS]):
        count, row = np.int64(0), t * size
        for node in range(num_nodes):
            found = False
            for i in range(firsts[node + 1] - firsts[node]):
                if goes[row + ranks[firsts[node] + i]] == 0:
                    continue
                found = True
                if node == home:
                    sources[count] = bases[i] + (starts[i] + used[i]) * row_bytes
                    homes[count] = node
                    used[i] += 1
                    count += 1
            if found and node != home:
                sources[count] = received[node] + came[node] * row_bytes
                homes[count] = node
                came[node] += 1
                count += 1
        out = words[at.OUT_X] + t * row_bytes
        sum_token(out, rows_at, homes_at, count, num_nodes, hidden, False, like, sums)
    return np.int64(at.DONE)


# The compiled functions themselves: a dispatcher would ask each argument's type at every call.
def nodes_dispatch(table: int) -> DispatchSteps:
    """The steps of a dispatch that read the table at this address."""
    kernels = (
        _pack_dispatch_kernel,
        _fill_own_kernel,
        _relay_kernel,
        _hear_dispatch_kernel,
        _take_kernel,
    )
    return DispatchSteps(*[partial(kernel.compile((int64,)), table) for kernel in kernels])


def nodes_combine(dtype: torch.dtype, table: int) -> CombineSteps:
    """The steps of a combine of rows of this dtype."""
    like = LIKE[dtype]
    sums = scratch(like)
    kind = typeof(like), typeof(sums), int64
    return CombineSteps(
        partial(_stage_kernel.compile((int64,)), table),
        partial(_pack_combine_kernel.compile(kind), like, sums, table),
        partial(_relay_kernel.compile((int64,)), table),
        partial(_hear_combine_kernel.compile((int64,)), table),
        partial(_add_up_kernel.compile(kind), like, sums, table),
    )
