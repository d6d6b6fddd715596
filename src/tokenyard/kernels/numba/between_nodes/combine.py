"""The steps of a combine of few rows between nodes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.between_nodes.messages import (
    MESSAGE_BYTES,
    Step,
    mark_bytes,
    relay_kernel,
    same_calls,
    write_messages,
)
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import INT64, LIKE, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.reduce import scratch, sum_token
from tokenyard.kernels.numba.rows import whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE, GENERAL


class CombineSteps(NamedTuple):
    stage: Step  # leave the rows that other ranks of the node sum
    pack: Step  # sum for other nodes, and write messages; GENERAL if neighbours staged other rows
    relay: Step
    hear: Step
    add_up: Step  # the sums of this rank's tokens


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
    return np.int64(DONE)


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
    each, marks = mark_bytes(num_ranks), words[at.BITS]
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
    each, hidden = mark_bytes(num_ranks), row_bytes // np.int64(like.itemsize)
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
        return verdict(GENERAL, 0)
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
                write_messages(table, target, node, MESSAGE_BYTES)
                counts[link] = bytes_of_words[node]
            if relays[link] >= 0:
                begin = target + bytes_of_words[node]
                rows[link] = _sum_for(table, relays[link], begin, like, sums) * row_bytes
                counts[link] = bytes_of_words[node] + whole_lines(rows[link])
            target += counts[link]
    write_messages(table, words[at.RELAYED], words[at.HOME], words[at.NUM_PLACES] * MESSAGE_BYTES)
    fence_stores()
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _hear_combine_kernel(table):
    return np.int64(DONE) if same_calls(table) else verdict(GENERAL, 0)


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
    fence_stores()
    return np.int64(DONE)


def nodes_combine(dtype: torch.dtype, table: int) -> CombineSteps:
    """The steps of a combine of rows of this dtype."""
    like = LIKE[dtype]
    sums = scratch(like)
    kind = typeof(like), typeof(sums), int64
    return CombineSteps(
        partial(_stage_kernel.compile((int64,)), table),
        partial(_pack_combine_kernel.compile(kind), like, sums, table),
        partial(relay_kernel.compile((int64,)), table),
        partial(_hear_combine_kernel.compile((int64,)), table),
        partial(_add_up_kernel.compile(kind), like, sums, table),
    )
