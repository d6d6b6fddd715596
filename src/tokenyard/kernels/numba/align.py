"""Grouping (token, k) pairs by expert: count them, open the groups, put each pair in its place.

Counting also ranks: a pair's rank is how many of its expert came before it. The last pass then only
reads its tables, and is quicker than one that moves every expert's next place along. Where threads
share the pairs, each counts its own, and the groups are opened for all of them in order: a pair's
place does not depend on who puts it there.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor, from_numpy

from tokenyard import memory
from tokenyard.kernels.numba.atomics import LINE
from tokenyard.kernels.numba.intrinsics import pointer
from tokenyard.kernels.numba.threads import in_channels, num_channels
from tokenyard.types import Aligned, channel_ranges

_ENTRY = np.dtype(np.int32)
_SIZE = 4  # bytes of an entry
_INT32 = np.empty(0, np.int32)
_INT64 = np.empty(0, np.int64)

# Threads start twice, to count and to put pairs in their places, and pay only where there are many.
_BYTES_A_PAIR = 8
_FEW = 1 << 20


@njit(nogil=True, cache=True)
def slot_of(expert):
    """A group's place in the tables of counts: 0 for -1, e + 1 for e, more than E for a bad id."""
    return np.uint64(np.int64(expert)) + np.uint64(1)


@njit(nogil=True, cache=True)
def count_ids(ids, counts, ranks, begin, end, num_experts):
    """Count the pairs begin..end-1 of each expert, and rank them: ids [2, 0, 2] -> ranks [0, 0, 1].

    Those of -1 are counted too, in a group of their own: a branch that is taken at random costs
    more. Returns the place of the first id outside -1..E-1, or -1.
    """
    for slot in range(num_experts + 1):
        counts[slot] = 0
    for i in range(begin, end):
        slot = slot_of(ids[i])
        if slot > np.uint64(num_experts):
            return i
        count = counts[slot]
        ranks[i] = count
        counts[slot] = count + np.int32(1)
    return -1


@njit(nogil=True, cache=True)
def _put_pairs(ids, starts, ranks, begin, end, entries):
    for i in range(begin, end):
        slot = slot_of(ids[i])
        if slot > np.uint64(0):
            entries[np.int64(starts[slot]) + ranks[i]] = i


@njit(nogil=True, cache=True)
def _fill(entries, begin, end, value):
    for i in range(begin, end):
        entries[i] = value


@njit(nogil=True, cache=True)
def _count_kernel(topk_ids, is_wide, begin, end, num_experts, counts, ranks):
    """Wide ids are int64, others int32."""
    into, ranked = pointer(counts, _INT32), pointer(ranks, _INT32)
    if is_wide:
        return count_ids(pointer(topk_ids, _INT64), into, ranked, begin, end, num_experts)
    return count_ids(pointer(topk_ids, _INT32), into, ranked, begin, end, num_experts)


@njit(nogil=True, cache=True)
def _open_kernel(
    counts, num_parts, numel, block_size, num_experts, capacity, sorted_ids, expert_ids, total
):
    """Write all but the pairs, and turn the counts [parts, E + 1] into where their pairs begin."""
    counted = pointer(counts, _INT32)
    entries, owners = pointer(sorted_ids, _INT32), pointer(expert_ids, _INT32)
    # Many short runs of padding take longer than filling everything, which few pairs allow.
    is_sparse = 2 * numel < capacity
    if is_sparse:
        head = min(-sorted_ids % LINE // _SIZE, capacity)  # vectors that cross lines take longer
        _fill(entries, 0, head, numel)
        _fill(entries, head, capacity, numel)
    end, block = np.int64(0), np.int64(0)
    for e in range(num_experts):
        at, slot = end, e + 1
        for _ in range(num_parts):
            count = counted[slot]
            counted[slot] = at
            at += count
            slot += num_experts + 1
        while end < at:
            owners[block] = e
            block += 1
            end += block_size
        if not is_sparse:
            _fill(entries, at, end, numel)
    if not is_sparse:
        _fill(entries, end, capacity, numel)
    _fill(owners, block, capacity // block_size, -1)
    pointer(total, _INT32)[0] = end


@njit(nogil=True, cache=True)
def _put_kernel(topk_ids, is_wide, begin, end, starts, ranks, sorted_ids):
    first, ranked = pointer(starts, _INT32), pointer(ranks, _INT32)
    entries = pointer(sorted_ids, _INT32)
    if is_wide:
        _put_pairs(pointer(topk_ids, _INT64), first, ranked, begin, end, entries)
    else:
        _put_pairs(pointer(topk_ids, _INT32), first, ranked, begin, end, entries)


@njit(nogil=True, cache=True)
def _align_kernel(
    topk_ids, is_wide, numel, block_size, num_experts, capacity, sorted_ids, expert_ids, total
):
    """All three steps by one thread, in one call: a call costs more than a token."""
    scratch = np.empty(num_experts + 1 + numel, np.int32)
    counts, ranks = scratch.ctypes.data, scratch.ctypes.data + (num_experts + 1) * _SIZE
    first_bad = _count_kernel(topk_ids, is_wide, 0, numel, num_experts, counts, ranks)
    if first_bad == -1:
        _open_kernel(
            counts, 1, numel, block_size, num_experts, capacity, sorted_ids, expert_ids, total
        )
        _put_kernel(topk_ids, is_wide, 0, numel, counts, ranks, sorted_ids)
    return first_bad


def _align_in_parts(
    topk_ids: int,
    is_wide: bool,
    numel: int,
    block_size: int,
    num_experts: int,
    capacity: int,
    sorted_ids: int,
    expert_ids: int,
    total: int,
) -> int:
    """The same by several threads, if there are."""
    num_parts = num_channels(numel, numel * _BYTES_A_PAIR)
    parts = channel_ranges(numel, num_parts)
    num_slots = num_experts + 1
    scratch = from_numpy(memory.empty_array(num_parts * num_slots + numel, _ENTRY))
    counts = scratch.data_ptr()
    ranks = counts + num_parts * num_slots * _SIZE
    bad = [-1] * num_parts

    def count(first: int, last: int) -> None:
        for part in range(first, last):
            mine = counts + part * num_slots * _SIZE
            bad[part] = _count_kernel(topk_ids, is_wide, *parts[part], num_experts, mine, ranks)

    def put(first: int, last: int) -> None:
        for part in range(first, last):
            mine = counts + part * num_slots * _SIZE
            _put_kernel(topk_ids, is_wide, *parts[part], mine, ranks, sorted_ids)

    in_channels(count, num_parts, numel * _BYTES_A_PAIR)
    first_bad = min((place for place in bad if place >= 0), default=-1)
    if first_bad == -1:
        _open_kernel(
            counts,
            num_parts,
            numel,
            block_size,
            num_experts,
            capacity,
            sorted_ids,
            expert_ids,
            total,
        )
        in_channels(put, num_parts, numel * _BYTES_A_PAIR)
    return first_bad


def align(
    topk_ids_TK: Tensor, block_size: int, num_experts: int, capacity: int
) -> tuple[Aligned, int]:
    numel = topk_ids_TK.numel()
    sorted_ids = from_numpy(memory.empty_array(capacity, _ENTRY))
    expert_ids = from_numpy(memory.empty_array(capacity // block_size, _ENTRY))
    total = from_numpy(memory.empty_array(1, _ENTRY))
    kernel = _align_kernel if numel < _FEW else _align_in_parts
    first_bad = kernel(
        topk_ids_TK.data_ptr(),
        topk_ids_TK.dtype is torch.int64,
        numel,
        block_size,
        num_experts,
        capacity,
        sorted_ids.data_ptr(),
        expert_ids.data_ptr(),
        total.data_ptr(),
    )
    return Aligned(sorted_ids, expert_ids, total), first_bad
