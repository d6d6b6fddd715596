"""Who gets each token, and the lists of rows that follow from it.

Counting goes block by block: each program counts a block of tokens, a scan over the blocks says
where each begins, and a second pass puts things in their places. So every list has the order that
`spec` wants, whichever program comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.base import NodeOfRank
from tokenyard.kernels.triton.launch import (
    NONE,
    blocks,
    first_bad,
    kept_numbers,
    launch,
    power_of_two,
    read_first_bad,
)
from tokenyard.runtime import memory
from tokenyard.types import DeviceCounts, Layout, Route

_TOKENS = 64  # of a program
_TILE = 2048  # marks of a program, where it has a row of them for each token


@triton.jit
def _layout_kernel(
    topk_idx,
    group_of_expert,
    marks,
    per_group,
    per_expert,
    first_bad,
    num_tokens,
    num_topk,
    num_experts,
    num_groups,
    WITH_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Tokens of a block against groups of a block: ranks, or nodes.

    `marks` and what there is once for all groups are left out unless WITH_EXPERTS.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    live = tokens < num_tokens
    hit = tl.zeros([TOKENS, GROUPS], tl.int32)
    for k in range(num_topk):
        place = tokens * num_topk + k
        expert = tl.load(topk_idx + place, mask=live, other=-1)
        routed = (expert >= 0) & (expert < num_experts)
        safe = tl.where(routed, expert, 0)
        group = tl.load(group_of_expert + safe, mask=routed, other=-1).to(tl.int32)
        hit = hit | (group[:, None] == groups[None, :]).to(tl.int32)
        # Once a block of tokens. Relaxed: the end of the kernel orders what was added.
        if WITH_EXPERTS and tl.program_id(1) == 0:
            tl.atomic_add(per_expert + safe, 1, mask=routed, sem="relaxed")
            bad = live & (expert != -1) & (routed == 0)
            # An atomic wants as many addresses as values: hence safe * 0.
            tl.atomic_min(first_bad + safe * 0, place, mask=bad, sem="relaxed")
    inside = groups < num_groups
    tl.atomic_add(per_group + groups, tl.sum(hit, 0), mask=inside, sem="relaxed")
    if WITH_EXPERTS:
        where = tokens[:, None] * num_groups + groups[None, :]
        tl.store(marks + where, hit.to(tl.int8), mask=live[:, None] & inside[None, :])


def layout(
    topk_idx_TK: Tensor, rank_of_expert_E: Tensor, num_ranks: int, node_of_rank: NodeOfRank | None
) -> tuple[Layout, int]:
    """Waits for the device once: whether an index is bad."""
    found, bad = _layout(topk_idx_TK, rank_of_expert_E, num_ranks, node_of_rank)
    return found, read_first_bad(bad)


def _layout(
    topk_idx_TK: Tensor, rank_of_expert_E: Tensor, num_ranks: int, node_of_rank: NodeOfRank | None
) -> tuple[Layout, Tensor]:
    """The layout, and where the first bad index is, without waiting for the device."""
    (num_tokens, num_topk), device = topk_idx_TK.shape, topk_idx_TK.device
    num_experts = rank_of_expert_E.shape[0]
    marks = memory.empty(num_tokens, num_ranks, dtype=torch.bool, device=device)
    counts = torch.zeros(num_ranks + num_experts, dtype=torch.int32, device=device)
    per_rank, per_expert = counts[:num_ranks], counts[num_ranks:]
    bad = first_bad(device)

    def mark(table: Tensor, per_group: Tensor, with_experts: bool) -> None:
        num_groups = per_group.shape[0]
        groups = min(64, power_of_two(num_groups))
        launch(
            _layout_kernel,
            (blocks(num_tokens, _TOKENS), blocks(num_groups, groups)),
            topk_idx_TK,
            table,
            marks.view(torch.int8),
            per_group,
            per_expert,
            bad,
            num_tokens,
            num_topk,
            num_experts,
            num_groups,
            WITH_EXPERTS=with_experts,
            TOKENS=_TOKENS,
            GROUPS=groups,
        )

    mark(rank_of_expert_E, per_rank, True)
    per_node = None
    if node_of_rank is not None:
        nodes = kept_numbers(tuple(node_of_rank), device)
        per_node = torch.zeros(max(node_of_rank) + 1, dtype=torch.int32, device=device)
        mark(nodes[rank_of_expert_E.long()], per_node, False)
    return Layout(per_rank, per_node, per_expert, marks), bad


@triton.jit
def _tally_marks_kernel(
    marks, tally, num_tokens, num_ranks, TOKENS: tl.constexpr, RANKS: tl.constexpr
):
    """tally[block, rank]: how many tokens of the block go to the rank."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANKS)
    inside = (tokens < num_tokens)[:, None] & (ranks < num_ranks)[None, :]
    where = tokens[:, None] * num_ranks + ranks[None, :]
    sent = tl.load(marks + where, mask=inside, other=0).to(tl.int32)
    row = tally + tl.program_id(0).to(tl.int64) * num_ranks
    tl.store(row + ranks, tl.sum(sent, 0), mask=ranks < num_ranks)


@triton.jit
def _scan_kernel(tally, totals, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Turn each column of a table into the sums of what is above; `totals` gets the whole sums.

    [[1, 4], [2, 5], [3, 6]] -> [[0, 0], [1, 4], [3, 9]] and [6, 15]
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    above = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        where = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        mask = (rows < num_rows)[:, None] & inside[None, :]
        counts = tl.load(tally + where, mask=mask, other=0)
        tl.store(tally + where, above[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        above = above + tl.sum(counts, 0)
    tl.store(totals + columns, above, mask=inside)


def scan(tally: Tensor) -> Tensor:
    """Scan each column of a table in place. Returns the totals of the columns."""
    num_rows, num_columns = tally.shape
    totals = memory.empty(num_columns, dtype=torch.int32, device=tally.device)
    columns = min(64, power_of_two(num_columns))
    launch(
        _scan_kernel,
        (blocks(num_columns, columns),),
        tally,
        totals,
        num_rows,
        num_columns,
        ROWS=min(32, power_of_two(num_rows)),
        COLUMNS=columns,
    )
    return totals


@triton.jit
def _route_kernel(
    marks,
    tally,
    rank_start,
    send_token,
    copy_start,
    copy_rank,
    copy_slot,
    num_tokens,
    num_ranks,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANKS)
    live, there = tokens < num_tokens, ranks < num_ranks
    where = tokens[:, None] * num_ranks + ranks[None, :]
    sent = tl.load(marks + where, mask=live[:, None] & there[None, :], other=0).to(tl.int32)
    before = tl.load(tally + block * num_ranks + ranks, mask=there, other=0)
    start = tl.load(rank_start + ranks, mask=there, other=0)
    slot = before[None, :] + tl.cumsum(sent, 0) - sent
    copies = tl.sum(sent, 1)
    first = tl.sum(before, 0) + tl.cumsum(copies, 0) - copies
    copy = first[:, None] + tl.cumsum(sent, 1) - sent
    goes = sent != 0
    tl.store(send_token + (start[None, :] + slot), tokens.to(tl.int32)[:, None], mask=goes)
    tl.store(copy_rank + copy, ranks[None, :], mask=goes)
    tl.store(copy_slot + copy, slot, mask=goes)
    tl.store(copy_start + tokens, first, mask=live)
    # The list has one entry more: the end of the last token's copies.
    tl.store(copy_start + tokens + 1, first + copies, mask=tokens == num_tokens - 1)


def route(is_token_in_rank_TR: Tensor) -> Route:
    """Waits for the device once, for the counts."""
    marks = is_token_in_rank_TR.view(torch.int8)
    tally, totals = _tally(marks)
    counts = tuple(totals.tolist())
    return _route(marks, tally, totals, sum(counts))._replace(send_counts=counts)


def count(
    topk_idx_TK: Tensor, rank_of_expert_E: Tensor, num_ranks: int, node_of_rank: NodeOfRank | None
) -> DeviceCounts:
    """`layout` and `route` at once, without waiting for the device."""
    found, bad = _layout(topk_idx_TK, rank_of_expert_E, num_ranks, node_of_rank)
    marks = found.is_token_in_rank.view(torch.int8)
    tally, totals = _tally(marks)
    num_tokens, num_topk = topk_idx_TK.shape
    # Room for the most rows that there can be: only the device knows how many there are.
    listed = _route(marks, tally, totals, num_tokens * min(num_topk, num_ranks))
    bad = torch.where(bad == NONE, -1, bad)
    numbers = torch.cat([bad, totals.long(), found.num_tokens_per_expert.long()])
    return DeviceCounts(found, listed, numbers)


def _tally(marks: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of the blocks before go to each rank, and how many of all blocks."""
    grid, tile = _tiles(*marks.shape)
    tally = memory.empty(grid[0], marks.shape[1], dtype=torch.int32, device=marks.device)
    launch(_tally_marks_kernel, grid, marks, tally, *marks.shape, **tile)
    return tally, scan(tally)


def _tiles(num_tokens: int, num_ranks: int) -> tuple[tuple[int], dict[str, int]]:
    ranks = power_of_two(num_ranks)
    tile = {"TOKENS": max(1, min(_TOKENS, _TILE // ranks)), "RANKS": ranks}
    return (blocks(num_tokens, tile["TOKENS"]),), tile


def _route(marks: Tensor, tally: Tensor, totals: Tensor, room: int) -> Route:
    """The lists, with room for so many rows. `send_counts` is left to those who know them."""
    (num_tokens, num_ranks), device = marks.shape, marks.device
    grid, tile = _tiles(num_tokens, num_ranks)
    rows = memory.empty(3, room, dtype=torch.int32, device=device)
    send_token, copy_rank, copy_slot = rows.unbind(0)
    copy_start = memory.empty(num_tokens + 1, dtype=torch.int32, device=device)
    if num_tokens == 0:
        copy_start.zero_()  # an empty grid starts no kernel
    launch(
        _route_kernel,
        grid,
        marks,
        tally,
        totals.cumsum(0, dtype=torch.int32) - totals,
        send_token,
        copy_start,
        copy_rank,
        copy_slot,
        num_tokens,
        num_ranks,
        **tile,
    )
    return Route(send_token, (), copy_start, copy_rank, copy_slot)
