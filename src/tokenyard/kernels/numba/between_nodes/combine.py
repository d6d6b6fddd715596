"""The steps of a combine of few rows between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.base import Step, SumSteps
from tokenyard.kernels.numba.between_nodes.messages import (
    bound,
    pack_kernel,
    relay_kernel,
    same_calls,
    sum_bytes,
)
from tokenyard.kernels.numba.between_nodes.parcels import mark_bytes
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import INT64, LIKE, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.reduce import NO_NODE, scratch, sum_token
from tokenyard.kernels.numba.rows import whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE, GENERAL


class CombineSteps(NamedTuple):
    """What a compiled combine does around that."""

    sums: SumSteps
    hear: Step  # compare calls


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
    staged, size = pointer(words[at.STAGED], INT64)[words[at.PLACE]], words[at.SIZE]
    header, begin = pointer(staged, INT64), np.int64(0)
    for i in range(at.HEADER):
        header[i] = 0
    header[0], header[1] = words[at.HANDLE], words[at.NUM_COLUMNS]
    counts = pointer(words[at.TALLY] + 8 * at.CAME_ROWS * size, INT64)
    for c in range(words[at.NUM_COLUMNS]):
        source, width = words[at.SOURCES + c], words[at.WIDTHS + c]
        header[at.HEADER_WIDTHS + c], header[at.HEADER_BEGINS + c] = width, begin
        target, done = staged + 8 * at.HEADER + begin, np.int64(0)
        for s in range(size):
            if not _sums_here(table, s):
                copy_bytes(target + done, source + done, counts[s] * width)
            done += counts[s] * width
        begin += whole_lines(done)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _find_kernel(table):
    """Where each local rank's rows begin: [columns, L] addresses in the scratch."""
    words = pointer(table, INT64)
    staged, num_ranks, place = (
        pointer(words[at.STAGED], INT64),
        words[at.NUM_RANKS],
        words[at.PLACE],
    )
    bases, mine = pointer(words[at.SCRATCH], INT64), pointer(staged[place], INT64)
    for i in range(num_ranks):
        theirs = pointer(staged[i], INT64)
        # Handles and widths must be equal; columns may begin elsewhere.
        for w in range(at.HEADER_BEGINS):
            if theirs[w] != mine[w]:
                return verdict(GENERAL, i)
        for c in range(words[at.NUM_COLUMNS]):
            begin = theirs[at.HEADER_BEGINS + c]
            if begin < 0 or begin > words[at.MOST_STAGED]:
                return verdict(GENERAL, i)
            bases[c * num_ranks + i] = staged[i] + 8 * at.HEADER + begin
    for c in range(words[at.NUM_COLUMNS]):
        bases[c * num_ranks + place] = words[at.SOURCES + c]
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _sum_source(like, sums, table, column, source, out):
    """Sum the node's rows of a source's tokens, and round."""
    words = pointer(table, INT64)
    size, num_ranks, width = words[at.SIZE], words[at.NUM_RANKS], words[at.WIDTHS + column]
    tally = pointer(words[at.TALLY], INT64)
    bases = pointer(words[at.SCRATCH] + 8 * column * num_ranks, INT64)
    bits = pointer(words[at.BITS] + tally[at.CAME_BITS * size + source], UINT8)
    each, hidden = mark_bytes(num_ranks), width // np.int64(like.itemsize)
    rows, sources = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    for i in range(num_ranks):
        rows[i] = bases[i] + tally[(at.FACTS + i) * size + source] * width
    rows_at = sources.ctypes.data
    for t in range(tally[at.CAME_TOKENS * size + source]):
        count = np.int64(0)
        for i in range(num_ranks):
            if bits[t * each + i // 8] & np.uint8(0x80 >> (i % 8)) != 0:
                sources[count] = rows[i]
                rows[i] += width
                count += 1
        if count > 0:
            sum_token(out, rows_at, rows_at, count, 1, hidden, False, like, sums)
            out += width


@njit(nogil=True, cache=True)
def _sum_for_kernel(like, sums, table, column):
    words = pointer(table, INT64)
    relays, outgoing = pointer(words[at.RELAYS], INT64), pointer(words[at.OUTGOING], INT64)
    bytes_of_words, counts = pointer(words[at.WORDS], INT64), pointer(words[at.COUNTS], INT64)
    records = pointer(words[at.TALLY] + 8 * at.CAME_RECORDS * words[at.SIZE], INT64)
    num_nodes = words[at.NUM_NODES]
    for rail in range(words[at.NUM_RAILS]):
        target = outgoing[rail]
        for node in range(num_nodes):
            link = rail * num_nodes + node
            source = relays[link]
            if source >= 0:
                before = bytes_of_words[node] + sum_bytes(table, records[source], column)
                _sum_source(like, sums, table, column, source, target + before)
            target += counts[link]
    fence_stores()
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _hear_combine_kernel(table):
    return np.int64(DONE) if same_calls(table) else verdict(GENERAL, 0)


@njit(nogil=True, cache=True)
def _goes_to(table, token, node):
    """Whether some rank of a node gets this rank's token."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    goes = pointer(words[at.MARKS] + token * words[at.SIZE], UINT8)
    found = False
    for i in range(firsts[node], firsts[node + 1]):
        found |= goes[ranks[i]] != 0
    return found


@njit(nogil=True, cache=True)
def _first_sums(table, column, node):
    """Where a node's sums of this column begin in what it has sent."""
    words, num_rows = pointer(table, INT64), np.int64(0)
    if column > 0:
        for t in range(words[at.NUM_TOKENS]):
            num_rows += np.int64(_goes_to(table, t, node))
    return pointer(words[at.RECEIVED], INT64)[node] + sum_bytes(table, num_rows, column)


@njit(nogil=True, cache=True)
def _add_up_kernel(like, sums, table, column):
    words = pointer(table, INT64)
    size, num_ranks, width = words[at.SIZE], words[at.NUM_RANKS], words[at.WIDTHS + column]
    num_nodes, home, num_biases = words[at.NUM_NODES], words[at.HOME], words[at.NUM_BIASES]
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    bases = pointer(words[at.SCRATCH] + 8 * column * num_ranks, INT64)
    tally, goes = pointer(words[at.TALLY], INT64), pointer(words[at.MARKS], UINT8)
    biases = pointer(words[at.BIASES], INT64)
    rows, came = np.empty(num_ranks, np.int64), np.empty(num_nodes, np.int64)
    for i in range(num_ranks):
        rows[i] = bases[i] + tally[(at.FACTS + i) * size + words[at.RANK]] * width
    for node in range(num_nodes):
        came[node] = _first_sums(table, column, node)
    sources = np.empty(num_biases + num_ranks + num_nodes, np.int64)
    homes = np.empty(num_biases + num_ranks + num_nodes, np.int32)
    rows_at, homes_at = sources.ctypes.data, homes.ctypes.data
    hidden = width // np.int64(like.itemsize)
    for t in range(words[at.NUM_TOKENS]):
        count = np.int64(0)
        for b in range(num_biases):
            sources[count], homes[count] = biases[b] + t * width, NO_NODE
            count += 1
        for node in range(num_nodes):
            if node != home:
                if _goes_to(table, t, node):
                    sources[count], homes[count] = came[node], node
                    came[node] += width
                    count += 1
                continue
            for i in range(num_ranks):
                if goes[t * size + ranks[firsts[node] + i]] != 0:
                    sources[count], homes[count] = rows[i], node
                    rows[i] += width
                    count += 1
        out = words[at.TARGETS + column] + t * width
        sum_token(out, rows_at, homes_at, count, num_nodes, hidden, False, like, sums)
    fence_stores()
    return np.int64(DONE)


def nodes_sums(dtypes: Sequence[torch.dtype], table: int) -> SumSteps:
    """The steps of any combine of columns of these dtypes that read the table at this address."""
    stage, find, pack, relay = bound(table, _stage_kernel, _find_kernel, pack_kernel, relay_kernel)
    sum_for, add_up = [], []
    for column, dtype in enumerate(dtypes):
        like = LIKE[dtype]
        sums = scratch(like)
        kind, given = (typeof(like), typeof(sums), int64, int64), (like, sums, table, column)
        sum_for.append(partial(_sum_for_kernel.compile(kind), *given))
        add_up.append(partial(_add_up_kernel.compile(kind), *given))
    return SumSteps(stage, find, pack, sum_for, relay, add_up)


def nodes_combine(dtype: torch.dtype, table: int) -> CombineSteps:
    """The steps of a compiled combine of rows of this dtype."""
    return CombineSteps(nodes_sums([dtype], table), *bound(table, _hear_combine_kernel))
