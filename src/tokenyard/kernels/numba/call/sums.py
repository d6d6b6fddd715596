"""A combine in one compiled call: offer rows, meet, sum those of all ranks, and say that they were
read.

A sum has groups of terms: each group is summed and rounded, and then the groups are added. On one
node every row is a group of its own. Between nodes that are told apart, the rows of a node are one;
by expert, the rows of this rank's pairs are one, and what another rank has summed for a token is a
row. A bias is a group that comes first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.count import RANKS, SLOTS, STARTS, list_at
from tokenyard.kernels.numba.call.meet import (
    Call,
    box_from,
    end_read,
    find_segment,
    meet,
    passes,
    signal,
    tell_read,
)
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import (
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    LIKE,
    pointer,
)
from tokenyard.kernels.numba.llvm.sums import sum_groups, sum_plain, sum_scaled
from tokenyard.kernels.numba.reduce import streams_sums
from tokenyard.kernels.numba.rows import copy_row, streams
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import ROWS
from tokenyard.wire.verdicts import DONE, LATE, MAP, MOVE, NO_MEMORY, STRAY


@njit(nogil=True, cache=True)
def _own_rows(table):
    """Where the rows of this rank's own tokens begin and end among those that it got, and how many
    it got.
    """
    words = pointer(table, INT64)
    rank, size = words[at.RANK], words[at.SIZE]
    sent = pointer(words[at.LEDGER], INT64)
    before = total = np.int64(0)
    for r in range(size):
        if r < rank:
            before += sent[r * size + rank]
        total += sent[r * size + rank]
    return before, before + sent[rank * size + rank], total


@njit(nogil=True, cache=True)
def _add_pairs(table, n, sources, factors, count):
    """Terms for the pairs of row `n` after `count` others. Returns how many there are then."""
    words = pointer(table, INT64)
    num_topk, row_bytes = words[at.NUM_TOPK], words[at.WIDTHS]
    places, weights = pointer(words[at.ROW_OF], INT64), pointer(words[at.FACTORS], FLOAT32)
    for i in range(n * num_topk, (n + 1) * num_topk):
        if places[i] >= 0:
            sources[count] = words[at.SOURCES] + places[i] * row_bytes
            factors[count] = weights[i] if words[at.WEIGH] != 0 else 1
            count += 1
    return count


@njit(nogil=True, cache=True)
def _share_rows(table, begin, end, terms, like, wide):
    """Sum the pairs of these of the rows that came: to the block, where other ranks read them."""
    words = pointer(table, INT64)
    most, row_bytes = words[at.NUM_TOPK], words[at.WIDTHS]
    sources, factors = pointer(terms, INT64), pointer(terms + 8 * most, wide)
    hidden = row_bytes // np.int64(like.itemsize)
    streaming = streams_sums(words[at.BLOCK], row_bytes, words[at.NUM_ROWS] * row_bytes)
    for n in range(begin, end):
        count = _add_pairs(table, n, sources, factors, np.int64(0))
        target = words[at.BLOCK] + n * row_bytes
        sum_scaled(target, terms, terms + 8 * most, count, hidden, streaming, like)


@njit(nogil=True, cache=True)
def _share(table, terms, like, wide):
    """Sum the pairs of all rows that another rank reads; those of this rank's tokens too, if nodes
    are told apart.
    """
    before, after, total = _own_rows(table)
    if pointer(table, INT64)[at.NODES] != 0:
        before = after
    _share_rows(table, 0, before, terms, like, wide)
    _share_rows(table, after, total, terms, like, wide)


@njit(nogil=True, cache=True)
def _copy_for_others(table):
    """Copy the rows that others read, and not those that came from this rank, to the block: those
    of columns that do not lie where others can read them.
    """
    words = pointer(table, INT64)
    before, after, total = _own_rows(table)
    for c in range(words[at.NUM_COLUMNS]):
        x, width = words[at.SOURCES + c], words[at.WIDTHS + c]
        if words[at.BEGINS + c] < 0:
            continue  # others read this column where it lies
        to = words[at.BLOCK] + words[at.BEGINS + c]
        streaming = streams(width, (total - after + before) * width)
        copy_row(to, x, before * width, streaming)
        copy_row(to + after * width, x + after * width, (total - after) * width, streaming)


@njit(nogil=True, cache=True)
def _find_rows(table):
    """Where the rows of this rank's tokens lie in each rank's memory."""
    words = pointer(table, INT64)
    rank, size, columns = words[at.RANK], words[at.SIZE], words[at.NUM_COLUMNS]
    sent, places = pointer(words[at.LEDGER], INT64), pointer(words[at.PLACES], INT64)
    own_first, _, _ = _own_rows(table)
    shares = words[at.BY_EXPERT] != 0
    for r in range(size):
        theirs = pointer(box_from(table, r), INT64)
        count, first = sent[rank * size + r], np.int64(0)
        for i in range(rank):
            first += sent[i * size + r]
        for c in range(columns):
            told = say.SEGMENTS + say.SEGMENT_WORDS * c
            width = words[at.WIDTHS + c]
            if theirs[told + say.SEGMENT_FD] == say.NO_MEMORY:
                return verdict(NO_MEMORY, r)
            if r == rank:
                own = words[at.BLOCK] if shares else words[at.SOURCES + c]
                places[c * size + r] = own + own_first * width
                continue
            entry = find_segment(table, r, theirs[told + say.SEGMENT_IDENTITY])
            if entry == 0:
                return verdict(MAP, r)
            known, begin = pointer(entry, INT64), theirs[told + say.SEGMENT_BEGIN]
            if begin < 0 or begin > known[2] or first * width > known[2] - count * width - begin:
                return verdict(STRAY, r)
            places[c * size + r] = known[1] + begin + first * width
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _hear_how(table):
    """Whether every rank's rows could be read when it posted. If some rank reads later, this call
    ends when all have.
    """
    words = pointer(table, INT64)
    words[at.ALL_READY] = 1
    for r in range(words[at.SIZE]):
        how = pointer(box_from(table, r), INT64)[say.HOW]
        if how & say.READY == 0:
            words[at.ALL_READY] = 0
        if how & say.LATER != 0:
            words[at.AWAITS] = 1


@njit(nogil=True, cache=True)
def _sum_rows(table, column, begin, end, terms, like, wide):
    """The sums of these of this rank's tokens, of one column. `terms` is the address of
    `terms_words` words.
    """
    words = pointer(table, INT64)
    rank, size, row_bytes = words[at.RANK], words[at.SIZE], words[at.WIDTHS + column]
    bases, nodes = (
        pointer(words[at.PLACES] + 8 * column * size, INT64),
        pointer(words[at.NODES], INT32),
    )
    starts, ranks = pointer(list_at(table, STARTS), INT32), pointer(list_at(table, RANKS), INT32)
    slots, hidden = pointer(list_at(table, SLOTS), INT32), row_bytes // np.int64(like.itemsize)
    most = np.int64(at.MOST_SUMS) + size + words[at.NUM_TOPK]
    factors_at, ends_at = terms + 8 * most, terms + 16 * most
    sources, factors, ends = (
        pointer(terms, INT64),
        pointer(factors_at, wide),
        pointer(ends_at, INT64),
    )
    tells_nodes, shares = words[at.NODES] != 0, words[at.BY_EXPERT] != 0
    biases = words[at.NUM_BIASES] if column == 0 else np.int64(0)
    own_first, _, _ = _own_rows(table)
    moved = (words[at.NUM_COPIES] + words[at.NUM_TOKENS]) * row_bytes
    streaming = streams_sums(words[at.OUTS + column], row_bytes, moved)
    for t in range(begin, end):
        count, groups = biases, biases
        for b in range(biases):
            sources[b], factors[b], ends[b] = words[at.BIASES + b] + t * row_bytes, 1, b + 1
        node = np.int64(-1)
        for c in range(starts[t], starts[t + 1]):
            r, slot = np.int64(ranks[c]), np.int64(slots[c])
            if shares and r == rank and not tells_nodes:
                count = _add_pairs(table, own_first + slot, sources, factors, count)
            else:
                sources[count], factors[count] = bases[r] + slot * row_bytes, 1
                count += 1
            # Of the same node as the row before: one group with it.
            if tells_nodes and np.int64(nodes[r]) == node:
                groups -= 1
            node = np.int64(nodes[r]) if tells_nodes else node
            ends[groups] = count
            groups += 1
        out = words[at.OUTS + column] + t * row_bytes
        if tells_nodes or shares:
            sum_groups(out, terms, factors_at, ends_at, groups, hidden, streaming, like)
        else:  # each group is a row, which its rounding leaves as it is
            sum_plain(out, terms, count, hidden, streaming, like)


@njit(nogil=True, cache=True)
def _combine_kernel(like, wide, table):
    words = pointer(table, INT64)
    if words[at.PHASE] == at.START:
        words[at.BEGAN], words[at.PART] = now(), 0
        if words[at.HANDS_OVER] == 0 and words[at.BLOCK] != 0:
            if words[at.BY_EXPERT] != 0:
                _share(table, words[at.TERMS], like, wide)
            else:
                _copy_for_others(table)
            fence_stores()
        head = pointer(words[at.HEAD], INT64)
        head[say.NUMBER], head[say.HANDLE] = words[at.NUMBER], words[at.HANDLE]
    found = meet(table)
    if found != DONE:
        return found
    if words[at.PHASE] == at.MET:
        found = _find_rows(table)
        if found != DONE:
            return found
        _hear_how(table)
        words[at.PHASE] = at.PLACED
        if words[at.HANDS_OVER] == 0:
            words[at.PHASE] = at.MOVED
    if words[at.PHASE] == at.PLACED:
        return verdict(MOVE, 0)
    if words[at.PHASE] == at.MOVED:
        words[at.PHASE] = at.ARRIVED
        # Some rank wrote its rows only after its message: all wait for one more signal.
        if words[at.ALL_READY] == 0:
            signal(table, ROWS)
            words[at.PHASE] = at.SENT
    if not passes(table, at.SENT, ROWS):
        return verdict(LATE, ROWS)
    if words[at.PHASE] == at.ARRIVED:
        if words[at.HANDS_OVER] != 0:
            return verdict(MOVE, 1)
        _sum_rows(table, 0, 0, words[at.NUM_TOKENS], words[at.TERMS], like, wide)
        fence_stores()
        words[at.PHASE] = at.SUMMED
    if words[at.PHASE] == at.SUMMED:
        tell_read(table, words[at.NUM_COLUMNS], True)
    return end_read(table)


@njit(nogil=True, cache=True)
def _sum_kernel(like, wide, table, column, begin, end):
    words = pointer(table, INT64)
    terms = np.empty(3 * (at.MOST_SUMS + words[at.SIZE] + words[at.NUM_TOPK]), np.int64)
    if column >= 0:
        _sum_rows(table, column, begin, end, terms.ctypes.data, like, wide)
    else:
        _share_rows(table, begin, end, terms.ctypes.data, like, wide)
    fence_stores()


def likes(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """How rows of this dtype are read, and their sums."""
    return LIKE[dtype], FLOAT64 if dtype == torch.float64 else FLOAT32


def combine_of(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of combines of rows of this dtype, and its signature."""
    like, wide = likes(dtype)
    return _combine_kernel, (typeof(like), typeof(wide), int64)


def sums_of(dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """The kernel of sums of this dtype that Python hands to threads, and its signature."""
    like, wide = likes(dtype)
    return _sum_kernel, (typeof(like), typeof(wide), *(int64,) * 4)


# The compiled function itself: a dispatcher would ask each argument's type at every call.
def call_combine(dtype: torch.dtype, table: int) -> Call:
    """A combine of rows of this dtype that reads the table at this address."""
    kernel, signature = combine_of(dtype)
    return partial(kernel.compile(signature), *likes(dtype), table)


def sum_rows(dtype: torch.dtype, table: int, column: int, begin: int, end: int) -> None:
    """Sum a column for some tokens, for a call that has handed over."""
    _sum_kernel(*likes(dtype), table, column, begin, end)


def share_rows(dtype: torch.dtype, table: int, begin: int, end: int) -> None:
    """Sum the pairs of some of the rows that came, for a call that hands over."""
    _sum_kernel(*likes(dtype), table, -1, begin, end)
