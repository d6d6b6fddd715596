"""Who gets each token, and the lists of rows that follow from it.

`layout` counts tokens by rank, node and expert; where a token's ranks fit the bits of one word, a
quicker kernel does so. `route` lists the rows, by rank and by token; `list_by_lane` reorders the
latter.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, from_numpy

from tokenyard.kernels.base import NodeOfRank
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.pointers import INT32, UINT8, UINT64, pointer, trailing_zeros
from tokenyard.runtime import memory
from tokenyard.types import Layout, Route

_COUNT, _MARK = np.dtype(np.int32), np.dtype(np.bool_)

_UNROUTED = np.uint64(0xFFFFFFFFFFFFFFFF)  # -1
_ONES = np.uint64(0x0101010101010101)
_DIAGONAL = np.uint64(0x8040201008040201)
_CARRY = np.uint64(0x00406070787C7E7F)


@njit(nogil=True, cache=True)
def _layout_words_kernel(
    topk_idx, table, per_rank, per_expert, in_rank, num_tokens, num_topk, num_experts, num_ranks
):
    """For R = 8, 16, ... 64: a token's ranks are the bits of one word, written eight bytes at a
    time.

    A byte b becomes eight bytes of its bits: b * ONES copies it to all eight, DIAGONAL leaves bit i
    in byte i, and adding CARRY moves that bit to the top of its byte. The same eight bytes, added
    up over at most 255 tokens, are the counts of eight ranks.
    """
    # As unsigned numbers bad ids below 0 are large, too: one comparison finds all.
    ids = pointer(topk_idx, UINT64)
    ranks = pointer(table, INT32)
    rank_counts, expert_counts = pointer(per_rank, INT32), pointer(per_expert, INT32)
    marks = pointer(in_rank, UINT64)
    for r in range(num_ranks):
        rank_counts[r] = 0
    for e in range(num_experts):
        expert_counts[e] = 0
    num_words = num_ranks // 8
    sums = np.zeros(num_words, np.uint64)
    counted = sums.view(np.uint8)
    one, end = np.uint64(1), np.uint64(num_experts)
    pair, word = np.uint64(0), np.uint64(0)
    room = 255
    for t in range(num_tokens):
        mask = np.uint64(0)
        for _ in range(num_topk):
            expert = ids[pair]
            pair += one
            if expert >= end:
                if expert == _UNROUTED:
                    continue
                return np.int64(pair) - 1
            expert_counts[expert] += np.int32(1)
            mask |= one << np.uint64(ranks[expert])
        for w in range(num_words):
            byte = (mask >> np.uint64(8 * w)) & np.uint64(255)
            spread = (((byte * _ONES) & _DIAGONAL) + _CARRY) >> np.uint64(7)
            marks[word] = spread & _ONES
            sums[w] += spread & _ONES
            word += one
        room -= 1
        if room == 0 or t == num_tokens - 1:
            for r in range(num_ranks):
                rank_counts[r] += np.int32(counted[r])
                counted[r] = 0
            room = 255
    return -1


@njit(nogil=True, cache=True)
def _layout_kernel(
    topk_idx,
    table,
    nodes,
    per_rank,
    per_node,
    per_expert,
    in_rank,
    num_tokens,
    num_topk,
    num_experts,
    num_ranks,
    num_nodes,
):
    """For any R, and for nodes: per_node is 0 where there is one."""
    ids = pointer(topk_idx, UINT64)
    ranks, node_of = pointer(table, INT32), pointer(nodes, INT32)
    rank_counts, expert_counts = pointer(per_rank, INT32), pointer(per_expert, INT32)
    node_counts = pointer(per_node, INT32)
    marks = pointer(in_rank, UINT8)
    for r in range(num_ranks):
        rank_counts[r] = 0
    for e in range(num_experts):
        expert_counts[e] = 0
    for n in range(num_nodes):
        node_counts[n] = 0
    seen = np.zeros(num_nodes, np.int64)  # the last token that reached the node, plus 1
    pair = np.uint64(0)
    for t in range(num_tokens):
        row = np.int64(t) * num_ranks
        for r in range(num_ranks):
            marks[row + r] = 0
        for _ in range(num_topk):
            expert = ids[pair]
            pair += np.uint64(1)
            if expert >= np.uint64(num_experts):
                if expert == _UNROUTED:
                    continue
                return np.int64(pair) - 1
            expert_counts[expert] += np.int32(1)
            rank = np.int64(ranks[expert])
            rank_counts[rank] += np.int32(1) - np.int32(marks[row + rank])
            marks[row + rank] = 1
            if num_nodes > 0:
                node = np.int64(node_of[rank])
                if seen[node] != t + 1:
                    seen[node] = t + 1
                    node_counts[node] += np.int32(1)
    return -1


def layout(
    topk_idx_TK: Tensor, rank_of_expert_E: Tensor, num_ranks: int, node_of_rank: NodeOfRank | None
) -> tuple[Layout, int]:
    num_tokens, num_topk = topk_idx_TK.shape
    num_experts = rank_of_expert_E.numel()  # quicker than len() and shape
    per_rank = from_numpy(memory.empty_array(num_ranks, _COUNT))
    per_expert = from_numpy(memory.empty_array(num_experts, _COUNT))
    in_rank = from_numpy(memory.empty_array((num_tokens, num_ranks), _MARK))
    per_node = None
    idx, owners = topk_idx_TK.data_ptr(), rank_of_expert_E.data_ptr()
    ranks, experts, marks = per_rank.data_ptr(), per_expert.data_ptr(), in_rank.data_ptr()
    if node_of_rank is None and num_ranks <= 64 and num_ranks % 8 == 0:
        first_bad = _layout_words_kernel(
            idx, owners, ranks, experts, marks, num_tokens, num_topk, num_experts, num_ranks
        )
    else:
        nodes = np.asarray(node_of_rank or [0], np.int32)
        num_nodes = 0 if node_of_rank is None else max(node_of_rank) + 1
        if num_nodes:
            per_node = from_numpy(memory.empty_array(num_nodes, _COUNT))
        first_bad = _layout_kernel(
            idx,
            owners,
            nodes.ctypes.data,
            ranks,
            0 if per_node is None else per_node.data_ptr(),
            experts,
            marks,
            num_tokens,
            num_topk,
            num_experts,
            num_ranks,
            num_nodes,
        )
    return Layout(per_rank, per_node, per_expert, in_rank), first_bad


@njit(nogil=True, cache=True)
def _count_kernel(in_rank, num_tokens, counts):
    """counts[r] = the tokens marked for rank r; returns their sum."""
    num_ranks = counts.shape[0]
    marks = pointer(in_rank, UINT8)
    for t in range(num_tokens):
        row = np.int64(t) * num_ranks
        for r in range(num_ranks):
            counts[r] += marks[row + r] & np.uint8(1)
    return counts.sum()


@njit(nogil=True, cache=True)
def _route_kernel(in_rank, num_tokens, counts, send_token, copy_start, copy_rank, copy_slot):
    num_ranks = counts.shape[0]
    marks = pointer(in_rank, UINT8)
    sent, starts = pointer(send_token, INT32), pointer(copy_start, INT32)
    ranks, slots = pointer(copy_rank, INT32), pointer(copy_slot, INT32)
    first = np.zeros(num_ranks, np.int64)  # where each rank's rows begin
    for r in range(1, num_ranks):
        first[r] = first[r - 1] + counts[r - 1]
    taken = np.zeros(num_ranks, np.int64)
    copy = np.int64(0)
    num_words = num_ranks // 8
    for t in range(num_tokens):
        starts[t] = copy
        row = np.int64(t) * num_ranks
        words = pointer(in_rank + row, UINT64)
        for w in range(num_words + 1):
            # Eight marks at a time; then the ranks after the last whole word, one by one.
            bits = np.uint64(0)
            if w < num_words:
                bits = words[w] & _ONES
            else:
                for r in range(num_words * 8, num_ranks):
                    bits |= np.uint64(marks[row + r] & np.uint8(1)) << np.uint64(8 * (r % 8))
            while bits != 0:
                r = w * 8 + np.int64(trailing_zeros(bits) >> np.uint64(3))
                bits &= bits - np.uint64(1)
                sent[first[r] + taken[r]] = t
                ranks[copy] = r
                slots[copy] = taken[r]
                taken[r] += 1
                copy += 1
    starts[num_tokens] = copy


def route(is_token_in_rank_TR: Tensor) -> Route:
    num_tokens, num_ranks = is_token_in_rank_TR.shape
    counts = np.zeros(num_ranks, np.int64)
    num_rows = _count_kernel(is_token_in_rank_TR.data_ptr(), num_tokens, counts)
    found = Route(
        send_token=from_numpy(memory.empty_array(num_rows, _COUNT)),
        send_counts=tuple(counts.tolist()),
        copy_start=from_numpy(memory.empty_array(num_tokens + 1, _COUNT)),
        copy_rank=from_numpy(memory.empty_array(num_rows, _COUNT)),
        copy_slot=from_numpy(memory.empty_array(num_rows, _COUNT)),
    )
    _route_kernel(
        is_token_in_rank_TR.data_ptr(),
        num_tokens,
        counts,
        found.send_token.data_ptr(),
        found.copy_start.data_ptr(),
        found.copy_rank.data_ptr(),
        found.copy_slot.data_ptr(),
    )
    return found


@njit(nogil=True, cache=True)
def _list_by_lane_kernel(
    topk_idx, table, num_tokens, num_topk, num_experts, copy_start, copy_rank, copy_slot
):
    ids, owners = pointer(topk_idx, UINT64), pointer(table, INT32)
    starts, ranks = pointer(copy_start, INT32), pointer(copy_rank, INT32)
    slots = pointer(copy_slot, INT32)
    for t in range(num_tokens):
        first, end = np.int64(starts[t]), np.int64(starts[t + 1])
        # Lanes from the last on: a rank's copy goes before those that are in place already.
        for i in range((t + 1) * num_topk - 1, t * num_topk - 1, -1):
            if ids[i] >= np.uint64(num_experts):
                continue
            rank = owners[ids[i]]
            c = end - 1
            while c >= first and ranks[c] != rank:
                c -= 1
            if c < first:
                continue
            end -= 1
            slot = slots[c]
            for later in range(c, end):
                ranks[later], slots[later] = ranks[later + 1], slots[later + 1]
            ranks[end], slots[end] = rank, slot


def list_by_lane(route: Route, topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> None:
    """In place: list each token's copies by the last lane of topk_idx that each rank has."""
    _list_by_lane_kernel(
        topk_idx_TK.data_ptr(),
        rank_of_expert_E.data_ptr(),
        *topk_idx_TK.shape,
        rank_of_expert_E.shape[0],
        route.copy_start.data_ptr(),
        route.copy_rank.data_ptr(),
        route.copy_slot.data_ptr(),
    )
