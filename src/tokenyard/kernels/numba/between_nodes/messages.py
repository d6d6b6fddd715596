"""What both calls of few rows between nodes write to other ranks, relay, and read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.exchange.protocol import same_call
from tokenyard.kernels.numba.llvm.pointers import INT64, copy_bytes, pointer
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE

MESSAGE_BYTES = 8 * (at.BEFORE + say.MESSAGE_WORDS)

Step = Callable[[], int]


@njit(nogil=True, cache=True)
def mark_bytes(num_ranks):
    """Bytes of a token's marks in a parcel."""
    return (num_ranks + 7) // 8


@njit(nogil=True, cache=True)
def record_bytes(table):
    """A token in a parcel: x, topk_idx, topk_weights and its number."""
    words = pointer(table, INT64)
    return words[at.ROW_BYTES] + 12 * words[at.NUM_TOPK] + 4


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
def write_messages(table, target, node, stride):
    """Messages to the ranks of a node, one every so many bytes."""
    words = pointer(table, INT64)
    ranks, firsts = pointer(words[at.RANKS], INT64), pointer(words[at.FIRSTS], INT64)
    for i in range(firsts[node], firsts[node + 1]):
        _write_message(table, target + (i - firsts[node]) * stride, ranks[i])


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
        if state != at.ENCLOSES or not same_call(theirs, words[at.HEAD]):
            return False
    return True
