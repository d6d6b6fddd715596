"""The steps of a dispatch of few rows between nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenyard.kernels.base import RowSteps, Step
from tokenyard.kernels.numba.between_nodes.messages import (
    MESSAGE_BYTES,
    bound,
    heard_from,
    pack_kernel,
    relay_kernel,
    same_calls,
)
from tokenyard.kernels.numba.between_nodes.parcels import (
    fill_parcel,
    mark_bytes,
    take_kernel,
)
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, UINT8, copy_bytes, pointer
from tokenyard.kernels.numba.rows import localise_kernel, whole_lines
from tokenyard.kernels.numba.signals import verdict
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.verdicts import DONE, GENERAL, STRAY


class DispatchSteps(NamedTuple):
    """What a compiled dispatch does around that."""

    tell: Step  # count, and say what to tell each rank; GENERAL if an id is no expert
    rows: RowSteps
    hear: Step  # compare calls, read counts
    localise: Step  # rename the experts of the rows taken: their ids are the second column


@njit(nogil=True, cache=True)
def _count(table):
    """Mark the ranks that get each token. The scratch holds the pairs of each expert, and then the
    tokens that go to each rank. False if an id is no expert.
    """
    words = pointer(table, INT64)
    size, num_experts, num_topk = words[at.SIZE], words[at.NUM_EXPERTS], words[at.NUM_TOPK]
    ids, owners = pointer(words[at.SOURCES + 1], INT64), pointer(words[at.RANK_OF_EXPERT], INT32)
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
def _tell_dispatch_kernel(table):
    words = pointer(table, INT64)
    if not _count(table):
        return verdict(GENERAL, 0)
    experts, most = pointer(words[at.PADDED_EXPERTS], INT64), words[at.MOST_EXPERTS]
    pairs = pointer(words[at.SCRATCH], INT64)
    taken = pointer(words[at.SCRATCH] + 8 * (words[at.NUM_EXPERTS] + 1), INT64)
    for r in range(words[at.SIZE]):
        target = words[at.TOLD] + r * MESSAGE_BYTES + 8 * at.BEFORE
        copy_bytes(target, words[at.HEAD], 8 * say.PAYLOAD)
        payload = pointer(target + 8 * say.PAYLOAD, INT64)
        payload[0] = taken[r]
        for i in range(most):
            payload[1 + i] = pairs[experts[r * most + i]]
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _fill_own_kernel(table):
    words = pointer(table, INT64)
    fill_parcel(table, words[at.HOME], pointer(words[at.STAGED], INT64)[words[at.PLACE]])
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _hear_dispatch_kernel(table):
    words = pointer(table, INT64)
    if not same_calls(table):
        return verdict(GENERAL, 0)
    size, num_local, alignment = words[at.SIZE], words[at.NUM_LOCAL], words[at.ALIGNMENT]
    tally, per_expert = pointer(words[at.TALLY], INT64), pointer(words[at.PER_EXPERT], INT64)
    each, width = mark_bytes(words[at.NUM_RANKS]), np.int64(0)
    for c in range(words[at.NUM_COLUMNS]):
        width += words[at.WIDTHS + c]
    num_tokens = num_rows = np.int64(0)
    for i in range(num_local):
        per_expert[i] = 0
    for r in range(size):
        theirs = pointer(heard_from(table, r), INT64)
        tokens, count = theirs[say.TOKENS], theirs[say.PAYLOAD]
        # A token takes a byte at least, so this bound also keeps the products below small.
        if tokens < 0 or tokens > words[at.ENCLOSED] or count < 0 or count > tokens:
            return verdict(STRAY, r)
        if whole_lines(tokens * each) + tokens * width > words[at.ENCLOSED]:
            return verdict(STRAY, r)
        tally[at.CAME_TOKENS * size + r], tally[at.CAME_ROWS * size + r] = tokens, count
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
def _localise_kernel(table):
    words = pointer(table, INT64)
    ids, weights = words[at.TARGETS + 1], words[at.TARGETS + 2]
    num_pairs, num_experts = words[at.NUM_ROWS] * words[at.NUM_TOPK], words[at.NUM_EXPERTS]
    localise_kernel(ids, weights, words[at.OWN_EXPERTS], num_pairs, num_experts)
    return np.int64(DONE)


def nodes_rows(table: int) -> RowSteps:
    """The steps of any dispatch that read the table at this address."""
    return RowSteps(*bound(table, pack_kernel, _fill_own_kernel, relay_kernel, take_kernel))


def nodes_dispatch(table: int) -> DispatchSteps:
    """The steps of a compiled dispatch that read the table at this address."""
    told, hear, localise = bound(
        table, _tell_dispatch_kernel, _hear_dispatch_kernel, _localise_kernel
    )
    return DispatchSteps(told, nodes_rows(table), hear, localise)
