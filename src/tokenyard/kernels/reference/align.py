"""Grouping (token, k) pairs by expert, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.types import Aligned


def align(
    topk_ids_TK: Tensor, block_size: int, num_experts: int, capacity: int
) -> tuple[Aligned, int]:
    """
    >>> got, first_bad = align(torch.tensor([[2, 0], [2, -1], [2, 0]]), 2, 3, capacity=10)
    >>> got.sorted_token_ids.tolist(), first_bad
    ([1, 5, 0, 2, 4, 6, 6, 6, 6, 6], -1)
    >>> got.expert_ids.tolist(), got.num_tokens_post_pad.tolist()
    ([0, 2, 2, -1, -1], [6])
    """
    ids, device = topk_ids_TK.flatten().long(), topk_ids_TK.device
    counts_E, order, rank, first_bad = by_expert(ids, num_experts)
    blocks_E = (counts_E + block_size - 1) // block_size
    first_E = (blocks_E.cumsum(0) - blocks_E) * block_size  # where an expert's entries begin
    sorted_ids = torch.full((capacity,), ids.numel(), dtype=torch.int32, device=device)
    sorted_ids[first_E[ids[order]] + rank] = order.int()

    experts = torch.arange(num_experts, dtype=torch.int32, device=device)
    owners = experts.repeat_interleave(blocks_E)
    expert_ids = torch.full((capacity // block_size,), -1, dtype=torch.int32, device=device)
    expert_ids[: owners.numel()] = owners
    total = (blocks_E.sum(0, keepdim=True) * block_size).int()
    return Aligned(sorted_ids, expert_ids, total), first_bad


def by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """How many pairs each expert has; those pairs by expert; the rank of each in its group.

    And the place of the first id outside -1..E-1, or -1.

    >>> counts, order, rank, first_bad = by_expert(torch.tensor([2, 0, 2, -1, 2, 0]), 3)
    >>> counts.tolist(), order.tolist(), rank.tolist(), first_bad
    ([2, 0, 3], [1, 5, 0, 2, 4], [0, 1, 0, 1, 2], -1)
    """
    routed = (ids >= 0) & (ids < num_experts)
    bad = ((ids != -1) & ~routed).nonzero()
    counts_E = torch.bincount(ids[routed], minlength=num_experts)
    # The sort is stable, so an expert's pairs ascend; those of no expert come last.
    order = torch.where(routed, ids, num_experts).argsort(stable=True)[: int(counts_E.sum())]
    before_E = counts_E.cumsum(0) - counts_E
    rank = torch.arange(order.numel(), device=ids.device) - before_E[ids[order]]
    return counts_E, order, rank, int(bad[0, 0]) if len(bad) else -1
