"""What calls of few rows between nodes write to other ranks, relay, and read."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import int64

from tokenyard.kernels.base import Step
from tokenyard.kernels.numba.between_nodes.parcels import fill_parcel
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.meet import same_call
from tokenyard.kernels.numba.llvm.pointers import INT64, copy_bytes, pointer
from tokenyard.kernels.numba.rows import whole_lines
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE

MESSAGE_BYTES = 8 * at.WIDTH


def bound(table: int, *kernels: Any) -> list[Step]:
    """Kernels that read the table at this address. The compiled functions themselves: a dispatcher
    would ask each argument's type at every call.
    """
    return [partial(kernel.compile((int64,)), table) for kernel in kernels]


@njit(nogil=True, cache=True)
def _write_messages(table, target, node, stride):
    """Messages to the ranks of a node, one every so many bytes."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    for i in range(firsts[node], firsts[node + 1]):
        told = words[at.TOLD] + ranks[i] * MESSAGE_BYTES
        before = pointer(told, INT64)
        before[at.STATE] = words[at.COMES]
        before[at.WANTS_ENCLOSED_AT] = words[at.WANTS]
        before[at.WANTS_STAGED_AT] = words[at.WANTS_STAGED]
        copy_bytes(target, told, MESSAGE_BYTES)
        target += stride


@njit(nogil=True, cache=True)
def sum_bytes(table, num_rows, num_columns):
    """Bytes of the first columns of so many sums, each to the end of its line."""
    words, num_bytes = pointer(table, INT64), np.int64(0)
    for c in range(num_columns):
        num_bytes += whole_lines(num_rows * words[at.WIDTHS + c])
    return num_bytes


@njit(nogil=True, cache=True)
def pack_kernel(table):
    """Write the messages to other nodes: words on this rank's own rail, which comes first, and
    behind them a parcel, or on each rail room for sums, if this rank encloses any.
    """
    words = pointer(table, INT64)
    bytes_of_words, outgoing = pointer(words[at.WORDS], INT64), pointer(words[at.OUTGOING], INT64)
    counts, rows = pointer(words[at.COUNTS], INT64), pointer(words[at.ROWS], INT64)
    relays, num_nodes = pointer(words[at.RELAYS], INT64), words[at.NUM_NODES]
    encloses, is_back = words[at.COMES] == at.ENCLOSES, words[at.IS_BACK] != 0
    width = np.int64(0)
    for c in range(words[at.NUM_COLUMNS]):
        width += words[at.WIDTHS + c]
    for rail in range(words[at.NUM_RAILS]):
        target = outgoing[rail]
        for node in range(num_nodes):
            link = rail * num_nodes + node
            counts[link] = rows[link] = 0
            if node == words[at.HOME]:
                continue
            begin = target + bytes_of_words[node]
            if rail == 0:
                _write_messages(table, target, node, MESSAGE_BYTES)
                counts[link] = bytes_of_words[node]
                if encloses and not is_back:
                    end, num_records = fill_parcel(table, node, begin)
                    rows[link] = num_records * width
                    counts[link] += whole_lines(end - begin)
            if encloses and is_back and relays[link] >= 0:
                tally = pointer(words[at.TALLY] + 8 * at.CAME_RECORDS * words[at.SIZE], INT64)
                num_rows = tally[relays[link]]
                rows[link] = num_rows * width
                counts[link] = bytes_of_words[node] + sum_bytes(
                    table, num_rows, words[at.NUM_COLUMNS]
                )
            target += counts[link]
    _write_messages(table, words[at.RELAYED], words[at.HOME], words[at.NUM_PLACES] * MESSAGE_BYTES)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def relay_kernel(table):
    words = pointer(table, INT64)
    parts, places = pointer(words[at.PARTS], INT64), words[at.NUM_PLACES]
    for p in range(words[at.NUM_PARTNERS]):
        for i in range(words[at.NUM_RANKS]):
            target = words[at.RELAYED] + (i * places + 1 + p) * MESSAGE_BYTES
            copy_bytes(target, parts[p] + i * MESSAGE_BYTES, MESSAGE_BYTES)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def heard_from(table, rank):
    """The address of what a rank told this one, after the words before each message."""
    words = pointer(table, INT64)
    return words[at.HEARD] + pointer(words[at.SLOTS], INT64)[rank] * MESSAGE_BYTES + 8 * at.BEFORE


@njit(nogil=True, cache=True)
def same_calls(table):
    """Whether all ranks make the call that this one makes, with good input, and enclose theirs."""
    words = pointer(table, INT64)
    for r in range(words[at.SIZE]):
        theirs = heard_from(table, r)
        state = pointer(theirs - 8 * at.BEFORE, INT64)[at.STATE]
        has_worst = pointer(theirs, INT64)[say.WORST] != 0
        if state != at.ENCLOSES or has_worst or not same_call(theirs, words[at.HEAD]):
            return False
    return True
