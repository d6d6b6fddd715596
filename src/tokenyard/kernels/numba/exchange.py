"""A whole dispatch, or combine, between ranks that share memory, in one compiled call.

It does what the engine and the direct transport do, on the same messages and signals, so that a
rank may make a call this way while another makes it that way: count, post the counts, wait, compare
the calls, find the places of rows, write rows to other ranks, signal, wait, localise; and on the
way back post where rows lie, wait, sum, signal, wait.

A call takes the address of a table (`wire.exchange_table`) and returns a verdict. It never waits
for ever and never raises: whatever is unusual is left to the engine. What another rank wrote is
compared with what it may be before it becomes an address, a place or a count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import load_acquire, yield_core
from tokenyard.kernels.numba.llvm.pointers import (
    FLOAT32,
    INT32,
    INT64,
    LIKE,
    copy_bytes,
    pointer,
    trailing_zeros,
)
from tokenyard.kernels.numba.reduce import scratch, streams_sums, sum_token
from tokenyard.kernels.numba.rows import copy_row, stream_row_to, streams
from tokenyard.kernels.numba.signals import raise_signals, reaches
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import LINE
from tokenyard.wire.exchange_table import DONE, GENERAL, LATE, MAP, MORE_ROOM, STRAY
from tokenyard.wire.signals import MAIL, READ, ROWS

_MOST_TOKENS = np.int64(1) << 31

Call = Callable[[], int]


@njit(nogil=True, cache=True)
def _verdict(what, which):
    return np.int64(what) << 32 | np.int64(which)


@njit(nogil=True, cache=True)
def _signal(table, kind):
    """Raise this rank's next signal of a kind."""
    words = pointer(table, INT64)
    epochs = pointer(words[at.EPOCHS], INT64)
    epochs[kind] += 1
    raise_signals(pointer(words[at.OUT_LINES], INT64)[kind], words[at.SIZE], epochs[kind])


@njit(nogil=True, cache=True)
def _all_signalled(table, kind):
    """Whether the others' signals of a kind come soon."""
    words = pointer(table, INT64)
    epoch = pointer(words[at.EPOCHS], INT64)[kind]
    lines = pointer(pointer(words[at.IN_LINES], INT64)[kind], INT64)
    yields = words[at.YIELDS]
    for r in range(words[at.SIZE]):
        if reaches(lines[r], epoch, words[at.PATIENCE]):
            continue
        came = False
        while yields > 0 and not came:
            yields -= 1
            yield_core()
            came = load_acquire(lines[r]) >= epoch
        if not came:
            return False
    return True


@njit(nogil=True, cache=True)
def _box_to(table, rank):
    """The address of the box of a rank that this rank's next message goes to."""
    words = pointer(table, INT64)
    turn = (pointer(words[at.EPOCHS], INT64)[MAIL] + 1) & 1
    return pointer(pointer(words[at.OUT_BOXES], INT64)[turn], INT64)[rank]


@njit(nogil=True, cache=True)
def _box_from(table, rank):
    """The address of the last message that came from a rank."""
    words = pointer(table, INT64)
    turn = pointer(words[at.EPOCHS], INT64)[MAIL] & 1
    return pointer(words[at.IN_BOXES], INT64)[turn] + rank * words[at.BOX_BYTES]


@njit(nogil=True, cache=True)
def _same_calls(table):
    """Whether all ranks make the call that this one makes, with good input."""
    words = pointer(table, INT64)
    mine = pointer(words[at.HEAD], INT64)
    for r in range(words[at.SIZE]):
        theirs = pointer(_box_from(table, r), INT64)
        for i in range(say.TOKENS):
            if theirs[i] != mine[i]:
                return False
        if theirs[say.WORST] != 0:
            return False
    return True


@njit(nogil=True, cache=True)
def _known(table, rank, identity):
    """The address of what is known of a rank's segment: identity, address, size. 0 if nothing is,
    or if the rank has given back segments that this rank is yet to unmap.
    """
    words = pointer(table, INT64)
    drops = pointer(words[at.DROPS], INT64)[rank]
    if load_acquire(drops) != pointer(words[at.SEEN_DROPS], INT64)[rank]:
        return np.int64(0)
    entry = words[at.KNOWN] + rank * (at.NUM_KNOWN * at.KNOWN_WORDS * 8)
    for _ in range(at.NUM_KNOWN):
        if pointer(entry, INT64)[0] == identity:
            return entry
        entry += at.KNOWN_WORDS * 8
    return np.int64(0)


@njit(nogil=True, cache=True)
def _open_ledger(table):
    """Find the parts of the ledger: after [R, R] and [R] words come lists of int32."""
    words = pointer(table, INT64)
    size = words[at.SIZE]
    words[at.STARTS] = words[at.LEDGER] + 8 * size * (size + 1)
    words[at.COPY_RANKS] = words[at.STARTS] + 4 * (words[at.NUM_TOKENS] + 1)
    words[at.COPY_SLOTS] = words[at.COPY_RANKS] + 4 * words[at.ROOM]
    words[at.SRC_IDX] = words[at.COPY_SLOTS] + 4 * words[at.ROOM]


@njit(nogil=True, cache=True)
def _count(table):
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
        box = _box_to(table, r)
        copy_bytes(box, words[at.HEAD], 8 * say.PAYLOAD)
        told = pointer(box + 8 * say.PAYLOAD, INT64)
        told[0] = taken[r]
        for i in range(most):
            told[1 + i] = pairs[experts[r * most + i]]
        for i in range(size):
            told[1 + most + i] = taken[i]
    _signal(table, MAIL)


@njit(nogil=True, cache=True)
def _size_class(num_bytes):
    """As `runtime.pool.size_class`."""
    if num_bytes <= 1 << 16:
        return np.int64(1 << 16)
    shift = np.int64(0)
    while num_bytes >> shift != 0:
        shift += 1
    step = np.int64(1) << max(np.int64(12), shift - 4)
    return (num_bytes + step - 1) // step * step


@njit(nogil=True, cache=True)
def _column_bytes(num_rows, width):
    return (num_rows * width + LINE - 1) // LINE * LINE


@njit(nogil=True, cache=True)
def _block_bytes(table, num_rows):
    """Bytes of a block for so many rows: x, topk_idx, topk_weights, src_idx."""
    words = pointer(table, INT64)
    end = _column_bytes(num_rows, words[at.ROW_BYTES])
    end += _column_bytes(num_rows, 8 * words[at.NUM_TOPK])
    return end + _column_bytes(num_rows, 4 * words[at.NUM_TOPK]) + _column_bytes(num_rows, 4)


@njit(nogil=True, cache=True)
def _hear_counts(table):
    """Read all ranks' counts: rows from whom to whom, and pairs of this rank's experts."""
    words = pointer(table, INT64)
    rank, size, most = words[at.RANK], words[at.SIZE], words[at.MOST_EXPERTS]
    num_local, alignment = words[at.NUM_LOCAL], words[at.ALIGNMENT]
    sent, tokens = (
        pointer(words[at.LEDGER], INT64),
        pointer(words[at.LEDGER] + 8 * size * size, INT64),
    )
    per_expert = pointer(words[at.PER_EXPERT], INT64)
    for i in range(num_local):
        per_expert[i] = 0
    for r in range(size):
        theirs = pointer(_box_from(table, r), INT64)
        tokens[r] = theirs[say.TOKENS]
        if tokens[r] < 0 or tokens[r] > _MOST_TOKENS:
            return _verdict(STRAY, r)
        for i in range(num_local):
            per_expert[i] += theirs[say.PAYLOAD + 1 + i]
        for i in range(size):
            count = theirs[say.PAYLOAD + 1 + most + i]
            if count < 0 or count > tokens[r]:
                return _verdict(STRAY, r)
            sent[r * size + i] = count
        if theirs[say.PAYLOAD] != sent[r * size + rank]:
            return _verdict(STRAY, r)
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
        needed = _block_bytes(table, rows[r])
        room = pointer(_box_from(table, r), INT64)[say.OFFER + 1]
        if needed > room or room > 2 * _size_class(needed):
            return _verdict(GENERAL, r)
        blocks[r] = words[at.BLOCK]
        if r != rank and sent[rank * size + r] != 0:
            theirs = pointer(_box_from(table, r), INT64)
            entry = pointer(_known(table, r, theirs[say.OFFER + 2]), INT64)
            if _known(table, r, theirs[say.OFFER + 2]) == 0:
                return _verdict(MAP, r)
            if entry[2] != room:
                return _verdict(STRAY, r)
            blocks[r] = entry[1]
    words[at.NUM_ROWS], words[at.END] = rows[rank], _block_bytes(table, rows[rank])
    if rows[rank] > words[at.SRC_ROOM]:
        return _verdict(MORE_ROOM, rows[rank])
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
            target += _column_bytes(rows[r], row_bytes)
            copy_bytes(target + row * 8 * num_topk, topk_idx, 8 * num_topk)
            target += _column_bytes(rows[r], 8 * num_topk)
            copy_bytes(target + row * 4 * num_topk, weights, 4 * num_topk)
            target += _column_bytes(rows[r], 4 * num_topk)
            pointer(target, INT32)[row] = t
        if together:
            stream_row_to(targets_at, starts[t + 1] - starts[t], x, row_bytes)


@njit(nogil=True, cache=True)
def _localise(table):
    """Rename experts in the rows that have arrived, and keep the token of each."""
    words = pointer(table, INT64)
    num_rows, num_topk, num_experts = words[at.NUM_ROWS], words[at.NUM_TOPK], words[at.NUM_EXPERTS]
    begin = words[at.BLOCK] + _column_bytes(num_rows, words[at.ROW_BYTES])
    ids, own = pointer(begin, INT64), pointer(words[at.OWN_EXPERTS], INT64)
    begin += _column_bytes(num_rows, 8 * num_topk)
    weights = pointer(begin, FLOAT32)
    for i in range(num_rows * num_topk):
        expert = ids[i]
        here = own[expert] if 0 <= expert < num_experts else -1
        ids[i] = here
        if here < 0:
            weights[i] = 0.0
    copy_bytes(words[at.SRC_IDX], begin + _column_bytes(num_rows, 4 * num_topk), 4 * num_rows)


@njit(nogil=True, cache=True)
def _dispatch_kernel(table):
    words = pointer(table, INT64)
    _open_ledger(table)
    if words[at.PHASE] == at.START:
        if words[at.LEAVE_AT] == at.POSTED or not _count(table):
            return _verdict(GENERAL, 0)
        _post_counts(table)
        words[at.PHASE] = at.POSTED
    if words[at.PHASE] == at.POSTED:
        if not _all_signalled(table, MAIL):
            return _verdict(LATE, MAIL)
        words[at.PHASE] = at.HEARD
    if words[at.PHASE] == at.HEARD:
        if words[at.LEAVE_AT] == at.HEARD or not _same_calls(table):
            return _verdict(GENERAL, 0)
        found = _hear_counts(table)
        if found == DONE:
            found = _find_blocks(table)
        if found != DONE:
            return found
        _write_rows(table)
        _signal(table, ROWS)
        words[at.PHASE] = at.SENT
    if words[at.PHASE] == at.SENT:
        if not _all_signalled(table, ROWS):
            return _verdict(LATE, ROWS)
        words[at.PHASE] = at.ARRIVED
    if words[at.PHASE] == at.ARRIVED:
        _localise(table)
        words[at.PHASE] = at.OVER
    return np.int64(DONE)


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
        box = _box_to(table, r)
        copy_bytes(box, words[at.HEAD], 8 * say.PAYLOAD)
        pointer(box, INT64)[say.OFFER + 4] = begin + before * row_bytes
        before += sent[r * size + rank]
    _signal(table, MAIL)


@njit(nogil=True, cache=True)
def _find_rows(table):
    """Where the rows of this rank's tokens lie in each rank's memory: `bases` of the scratch."""
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.ROW_BYTES]
    sent, bases = pointer(words[at.LEDGER], INT64), pointer(words[at.SCRATCH], INT64)
    before = np.int64(0)
    for r in range(size):
        theirs = pointer(_box_from(table, r), INT64)
        if theirs[say.OFFER + 1] == say.NO_MEMORY:
            return _verdict(GENERAL, r)
        count = sent[rank * size + r]
        if r < rank:
            before += sent[r * size + rank]
        if r == rank or count == 0:
            continue
        entry = _known(table, r, theirs[say.OFFER + 3])
        if entry == 0:
            return _verdict(MAP, r)
        known, begin = pointer(entry, INT64), theirs[say.OFFER + 4]
        if begin < 0 or begin > known[2] - count * row_bytes:
            return _verdict(STRAY, r)
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
        if pointer(_box_from(table, r), INT64)[say.OFFER] == 0:
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
    _open_ledger(table)
    if words[at.PHASE] == at.START:
        if words[at.LEAVE_AT] == at.POSTED:
            return _verdict(GENERAL, 0)
        _post_offer(table)
        words[at.PHASE] = at.POSTED
    if words[at.PHASE] == at.POSTED:
        if not _all_signalled(table, MAIL):
            return _verdict(LATE, MAIL)
        words[at.PHASE] = at.HEARD
    if words[at.PHASE] == at.HEARD:
        if words[at.LEAVE_AT] == at.HEARD or not _same_calls(table):
            return _verdict(GENERAL, 0)
        found = _find_rows(table)
        if found != DONE:
            return found
        if words[at.COPIES] != 0:
            _copy_for_others(table)
        words[at.PHASE] = at.ARRIVED
        if not _all_ready(table):
            _signal(table, ROWS)
            words[at.PHASE] = at.SENT
    if words[at.PHASE] == at.SENT:
        if not _all_signalled(table, ROWS):
            return _verdict(LATE, ROWS)
        words[at.PHASE] = at.ARRIVED
    if words[at.PHASE] == at.ARRIVED:
        _sum_rows(table, like, sums)
        _signal(table, READ)
        words[at.PHASE] = at.SUMMED
    if words[at.PHASE] == at.SUMMED:
        if not _all_signalled(table, READ):
            return _verdict(LATE, READ)
        words[at.PHASE] = at.OVER
    return np.int64(DONE)


# The compiled functions themselves: a dispatcher would ask each argument's type at every call.
def exchange_dispatch(table: int) -> Call:
    """A dispatch that reads the table at this address."""
    return partial(_dispatch_kernel.compile((int64,)), table)


def exchange_combine(dtype: torch.dtype, table: int) -> Call:
    """A combine of rows of this dtype."""
    like = LIKE[dtype]
    sums = scratch(like)
    kernel = _combine_kernel.compile((typeof(like), typeof(sums), int64))
    return partial(kernel, like, sums, table)
