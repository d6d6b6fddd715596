"""Parcels: few rows of several columns, on their way to the ranks of one node.

A parcel holds, for each token of its source, a bit for each rank of the node that gets it, from the
start of a byte; then, from a new cache line, a record for each token that some rank of the node
gets: its row of every column, one after the other. So the reader of a parcel finds the rows of any
rank of the node in it, and needs no other word but the number of tokens.
"""

from __future__ import annotations

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE, STRAY


@njit(nogil=True, cache=True)
def mark_bytes(num_ranks):
    """Bytes of a token's marks in a parcel."""
    return (num_ranks + 7) // 8


@njit(nogil=True, cache=True)
def fill_parcel(table, node, parcel):
    """Write a parcel for a node. Returns where it ends, and how many records it has."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    goes, bits = pointer(words[at.MARKS], UINT8), pointer(parcel, UINT8)
    first, count = firsts[node], firsts[node + 1] - firsts[node]
    each, num_records = mark_bytes(count), np.int64(0)
    target = parcel + whole_lines(words[at.NUM_TOKENS] * each)
    for t in range(words[at.NUM_TOKENS]):
        row, found = t * words[at.SIZE], np.uint8(0)
        for b in range(each):
            byte = np.uint8(0)
            for i in range(8 * b, min(8 * b + 8, count)):
                if goes[row + ranks[first + i]] != 0:
                    # The highest bit first, as numpy.packbits has it: Python reads marks too.
                    byte |= np.uint8(0x80 >> (i - 8 * b))
            bits[t * each + b] = byte
            found |= byte
        if found != 0:
            num_records += 1
            for c in range(words[at.NUM_COLUMNS]):
                source, width = words[at.SOURCES + c], words[at.WIDTHS + c]
                copy_bytes(target, source + t * words[at.STRIDES + c], width)
                target += width
    return target, num_records


@njit(nogil=True, cache=True)
def _take_from(table, source, kept, row):
    """Take this rank's rows from a parcel, from this row of the results on, by the marks in `kept`.
    Returns the row after them: one that cannot be if the parcel has not as many as its source told.
    """
    words = pointer(table, INT64)
    size, place, num_ranks = words[at.SIZE], words[at.PLACE], words[at.NUM_RANKS]
    tally, bits = pointer(words[at.TALLY], INT64), pointer(kept, UINT8)
    tokens, end = tally[at.CAME_TOKENS * size + source], row + tally[at.CAME_ROWS * size + source]
    each, num_records = mark_bytes(num_ranks), np.int64(0)
    record = pointer(words[at.PARCELS], INT64)[source] + whole_lines(tokens * each)
    for t in range(tokens):
        found, takes = False, False
        for i in range(num_ranks):
            if bits[t * each + i // 8] & np.uint8(0x80 >> (i % 8)) != 0:
                found = True
                takes |= i == place
                if source + 1 < size:
                    tally[(at.FACTS + i) * size + source + 1] += 1
        # More rows than the source told: the results have no room for them.
        if takes and row == end:
            return np.int64(-1)
        if found:
            for c in range(words[at.NUM_COLUMNS]):
                width = words[at.WIDTHS + c]
                if takes:
                    copy_bytes(words[at.TARGETS + c] + row * width, record, width)
                record += width
            row += np.int64(takes)
            num_records += 1
    tally[at.CAME_RECORDS * size + source] = num_records
    return row if row == end else np.int64(-1)


@njit(nogil=True, cache=True)
def take_kernel(table):
    """Take this rank's rows from the parcels of all ranks, by (source rank, token), and write down
    what is known of each source. STRAY if one has more rows, or fewer, than it told.
    """
    words = pointer(table, INT64)
    size, num_ranks = words[at.SIZE], words[at.NUM_RANKS]
    tally, parcels = pointer(words[at.TALLY], INT64), pointer(words[at.PARCELS], INT64)
    row, begin = np.int64(0), np.int64(0)
    for s in range(size):
        num_bytes = tally[at.CAME_TOKENS * size + s] * mark_bytes(num_ranks)
        # A copy: the combine reads the marks too, and no other rank can change them here.
        copy_bytes(words[at.BITS] + begin, parcels[s], num_bytes)
        tally[at.CAME_BITS * size + s] = begin
        for i in range(num_ranks):
            starts = (at.FACTS + i) * size + s
            if s == 0:
                tally[starts] = 0
            if s + 1 < size:
                tally[starts + 1] = tally[starts]
        row = _take_from(table, s, words[at.BITS] + begin, row)
        if row < 0:
            return verdict(STRAY, s)
        begin += num_bytes
    return np.int64(DONE)
