"""Who gets each token, and the lists of rows that follow from it, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.kernels.base import NodeOfRank
from tokenyard.types import Layout, Route


def layout(
    topk_idx_TK: Tensor, rank_of_expert_E: Tensor, num_ranks: int, node_of_rank: NodeOfRank | None
) -> tuple[Layout, int]:
    """
    >>> topk_idx = torch.tensor([[0, 1], [1, 3], [-1, 2]])
    >>> got, first_bad = layout(topk_idx, torch.tensor([0, 0, 1, 1]), 2, None)
    >>> got.is_token_in_rank.int().tolist(), first_bad
    ([[1, 0], [1, 1], [0, 1]], -1)
    >>> layout(torch.tensor([[0, 4]]), torch.tensor([0, 0, 1, 1]), 2, None)[1]
    1
    """
    num_experts = rank_of_expert_E.shape[0]
    routed = (topk_idx_TK >= 0) & (topk_idx_TK < num_experts)
    bad = ((topk_idx_TK != -1) & ~routed).flatten().nonzero()
    # Unrouted pairs count for a rank R and an expert E that are cut off again.
    expert_TK = torch.where(routed, topk_idx_TK, 0)
    rank_TK = torch.where(routed, rank_of_expert_E.long()[expert_TK], num_ranks)
    in_rank_TR = _marks(rank_TK, num_ranks)
    per_node = None
    if node_of_rank is not None:
        num_nodes = max(node_of_rank) + 1
        nodes = torch.tensor([*node_of_rank, num_nodes], device=topk_idx_TK.device)
        per_node = _marks(nodes[rank_TK], num_nodes).sum(0).int()
    per_expert = torch.bincount(topk_idx_TK[routed], minlength=num_experts).int()
    return (
        Layout(
            num_tokens_per_rank=in_rank_TR.sum(0).int(),
            num_tokens_per_node=per_node,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank_TR,
        ),
        int(bad[0, 0]) if len(bad) else -1,
    )


def _marks(index_TK: Tensor, size: int) -> Tensor:
    marks = torch.zeros(index_TK.shape[0], size + 1, dtype=torch.bool, device=index_TK.device)
    return marks.scatter_(1, index_TK, True)[:, :size].contiguous()


def route(is_token_in_rank_TR: Tensor) -> Route:
    """
    >>> got = route(torch.tensor([[True, False, True], [False, False, True]]))
    >>> got.send_token.tolist(), got.send_counts
    ([0, 0, 1], (1, 0, 2))
    >>> got.copy_start.tolist(), got.copy_rank.tolist(), got.copy_slot.tolist()
    ([0, 2, 3], [0, 2, 2], [0, 0, 1])
    """
    token_N, rank_N = is_token_in_rank_TR.nonzero(as_tuple=True)
    slot_TR = is_token_in_rank_TR.cumsum(0, dtype=torch.int32) - 1
    copies_T = is_token_in_rank_TR.sum(1)
    return Route(
        send_token=is_token_in_rank_TR.t().nonzero()[:, 1].int(),
        send_counts=tuple(is_token_in_rank_TR.sum(0).tolist()),
        copy_start=torch.cat([copies_T.new_zeros(1), copies_T.cumsum(0)]).int(),
        copy_rank=rank_N.int(),
        copy_slot=slot_TR[token_N, rank_N],
    )
