"""Grouping (token, k) pairs by expert, in whole blocks.

The kernel that counts also numbers: a pair's number says how many pairs of its expert came before
it. The kernel that puts pairs in their places then only reads tables, which is quicker than to move
every expert's next place along.

Few pairs go straight into their blocks. Many go to stacks first, which are then copied into blocks
one after the other: places in blocks are a multiple of the block apart, so that they share few of
the cache's sets and evict each other. Where threads share the pairs, each counts its own, and the
stacks are divided among the threads in order: no place depends on which thread writes it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, pointer
from tokenyard.runtime import memory
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.types import Aligned, split_range
from tokenyard.wire.columns import LINE

_ENTRY = np.dtype(np.int32)
_SIZE = 4  # bytes of an entry
_GAP = LINE // _SIZE  # entries between stacks, or stacks of equal heights would share sets too

_MANY = 1 << 14  # pairs
_BYTES_A_PAIR = 8  # a pair's worth to in_threads; threads start twice, and must pay for both


@njit(nogil=True, cache=True)
def slot_of(expert):
    """A group's place in tables: 0 for -1, e + 1 for expert e, more than E for a bad id."""
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
def _put_pairs(ids, starts, ranks, begin, end, out):
    for i in range(begin, end):
        slot = slot_of(ids[i])
        if slot > np.uint64(0):
            out[np.int64(starts[slot]) + ranks[i]] = i


@njit(nogil=True, cache=True)
def _fill(entries, begin, end, value):
    for i in range(begin, end):
        entries[i] = value


@njit(nogil=True, cache=True)
def _align_ids(ids, numel, block_size, num_experts, capacity, sorted_ids, expert_ids, total):
    entries, owners = pointer(sorted_ids, INT32), pointer(expert_ids, INT32)
    table, ranks = np.empty(num_experts + 1, np.int32), np.empty(numel, np.int32)
    first_bad = count_ids(ids, table, ranks, 0, numel, num_experts)
    if first_bad >= 0:
        return first_bad
    head = min(-sorted_ids % LINE // _SIZE, capacity)  # vectors that cross lines take longer
    _fill(entries, 0, head, numel)
    _fill(entries, head, capacity, numel)
    end, block = np.int64(0), np.int64(0)
    for e in range(num_experts):
        at = end + table[e + 1]
        table[e + 1] = end  # the count is used up: from here on, where the entries begin
        while end < at:
            owners[block] = e
            block += 1
            end += block_size
    _fill(owners, block, capacity // block_size, -1)
    _put_pairs(ids, table, ranks, 0, numel, entries)
    pointer(total, INT32)[0] = end
    return -1


@njit(nogil=True, cache=True)
def _align_few_kernel(
    topk_ids, is_wide, numel, block_size, num_experts, capacity, sorted_ids, expert_ids, total
):
    """All by one thread in one call, since a call costs more than a token. Wide ids are int64."""
    outputs = sorted_ids, expert_ids, total
    if is_wide:
        ids = pointer(topk_ids, INT64)
        return _align_ids(ids, numel, block_size, num_experts, capacity, *outputs)
    ids_32 = pointer(topk_ids, INT32)
    return _align_ids(ids_32, numel, block_size, num_experts, capacity, *outputs)


@njit(nogil=True, cache=True)
def _count_kernel(topk_ids, is_wide, begin, end, num_experts, table, ranks):
    counts, ranked = pointer(table, INT32), pointer(ranks, INT32)
    if is_wide:
        return count_ids(pointer(topk_ids, INT64), counts, ranked, begin, end, num_experts)
    return count_ids(pointer(topk_ids, INT32), counts, ranked, begin, end, num_experts)


@njit(nogil=True, cache=True)
def _divide_kernel(tables, num_parts, num_experts):
    """Turn counts [parts, E + 2] into where each part's share of each stack begins."""
    table, at = pointer(tables, INT32), np.int64(0)
    for e in range(num_experts):
        slot = e + 1
        for _ in range(num_parts):
            count = table[slot]
            table[slot] = at
            at += count
            slot += num_experts + 2
        at += _GAP
    table[num_experts + 1] = at  # a stack ends a gap before the next, the last one too


@njit(nogil=True, cache=True)
def _stack_kernel(topk_ids, is_wide, begin, end, table, ranks, stacks):
    starts, ranked, out = pointer(table, INT32), pointer(ranks, INT32), pointer(stacks, INT32)
    if is_wide:
        _put_pairs(pointer(topk_ids, INT64), starts, ranked, begin, end, out)
    else:
        _put_pairs(pointer(topk_ids, INT32), starts, ranked, begin, end, out)


@njit(nogil=True, cache=True)
def _lay_kernel(
    table, stacks, numel, block_size, num_experts, capacity, sorted_ids, expert_ids, total
):
    """Copy the stacks into blocks, with the padding between them."""
    starts, stacked = pointer(table, INT32), pointer(stacks, INT32)
    entries, owners = pointer(sorted_ids, INT32), pointer(expert_ids, INT32)
    end, block = np.int64(0), np.int64(0)
    for e in range(num_experts):
        stack = np.int64(starts[e + 1])
        count = np.int64(starts[e + 2]) - _GAP - stack
        for i in range(count):
            entries[end + i] = stacked[stack + i]
        at = end + count
        while end < at:
            owners[block] = e
            block += 1
            end += block_size
        _fill(entries, at, end, numel)
    _fill(entries, end, capacity, numel)
    _fill(owners, block, capacity // block_size, -1)
    pointer(total, INT32)[0] = end


def _align_many(
    topk_ids: int,
    is_wide: bool,
    numel: int,
    block_size: int,
    num_experts: int,
    capacity: int,
    *outputs: int,
) -> int:
    num_parts = num_threads(numel, numel * _BYTES_A_PAIR)
    ranges = split_range(numel, num_parts)
    sizes = num_parts * (num_experts + 2), numel, numel + num_experts * _GAP
    scratch = from_numpy(memory.empty_array(sum(sizes), _ENTRY))
    tables = scratch.data_ptr()
    ranks = tables + sizes[0] * _SIZE
    stacks = ranks + sizes[1] * _SIZE
    table = [tables + part * (num_experts + 2) * _SIZE for part in range(num_parts)]
    bad = [-1] * num_parts

    def count(first: int, last: int) -> None:
        for part in range(first, last):
            bad[part] = _count_kernel(
                topk_ids, is_wide, *ranges[part], num_experts, table[part], ranks
            )

    def stack(first: int, last: int) -> None:
        for part in range(first, last):
            _stack_kernel(topk_ids, is_wide, *ranges[part], table[part], ranks, stacks)

    in_threads(count, num_parts, numel * _BYTES_A_PAIR)
    # The first of all parts: the same whatever the number of threads.
    first_bad = min((place for place in bad if place >= 0), default=-1)
    if first_bad == -1:
        _divide_kernel(tables, num_parts, num_experts)
        in_threads(stack, num_parts, numel * _BYTES_A_PAIR)
        _lay_kernel(tables, stacks, numel, block_size, num_experts, capacity, *outputs)
    return first_bad


def align(
    topk_ids_TK: Tensor, block_size: int, num_experts: int, capacity: int
) -> tuple[Aligned, int]:
    numel = topk_ids_TK.numel()
    sorted_ids = from_numpy(memory.empty_array(capacity, _ENTRY))
    expert_ids = from_numpy(memory.empty_array(capacity // block_size, _ENTRY))
    total = from_numpy(memory.empty_array(1, _ENTRY))
    kernel = _align_few_kernel if numel < _MANY else _align_many
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
