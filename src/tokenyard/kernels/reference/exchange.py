"""Layout, rows and sums of the exchange, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.kernels.base import wide_dtype
from tokenyard.types import Layout, Route


def layout(
    topk_idx_TK: Tensor,
    rank_of_expert_E: Tensor,
    num_ranks: int,
    node_of_rank: Sequence[int] | None,
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


def pack(x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor:
    """
    >>> x = torch.tensor([[1, 1], [2, 2]], dtype=torch.uint8)
    >>> pack(x, torch.tensor([1, 0, 1]), x.new_empty(3, 2)).tolist()
    [[2, 2], [1, 1], [2, 2]]
    """
    return out_NB.copy_(x_TB if index_N is None else x_TB[index_N.long()])


def localise(
    topk_idx_NK: Tensor, topk_weights_NK: Tensor | None, local_of_expert_E: Tensor
) -> None:
    """
    >>> idx, weights = torch.tensor([[0, 3], [2, -1]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    >>> localise(idx, weights, torch.tensor([-1, -1, 0, 1]))
    >>> idx.tolist(), weights.tolist()
    ([[-1, 1], [0, -1]], [[0.0, 0.75], [0.5, 0.0]])
    """
    inside = (topk_idx_NK >= 0) & (topk_idx_NK < local_of_expert_E.shape[0])
    local_NK = torch.where(inside, local_of_expert_E[torch.where(inside, topk_idx_NK, 0)], -1)
    topk_idx_NK.copy_(local_NK)
    if topk_weights_NK is not None:
        topk_weights_NK.masked_fill_(local_NK < 0, 0.0)


def reduce(
    rows_by_rank: Sequence[Tensor],
    route: Route,
    node_of_rank: Sequence[int],
    biases_TD: Sequence[Tensor],
    out_TD: Tensor,
) -> Tensor:
    """
    >>> rows = [torch.tensor([[1.0]]), torch.tensor([[10.0], [20.0]])]
    >>> both = globals()["route"](torch.tensor([[True, True], [False, True]]))
    >>> reduce(rows, both, (0, 0), [torch.tensor([[0.5], [0.5]])], torch.empty(2, 1)).tolist()
    [[11.5], [20.5]]
    """
    dtype = out_TD.dtype
    total_TD = torch.zeros_like(out_TD, dtype=wide_dtype(dtype))
    for bias_TD in biases_TD:
        total_TD += bias_TD
    sent = route.send_token.split(list(route.send_counts))
    num_nodes = max(node_of_rank) + 1
    for node in range(num_nodes):
        partial_TD = total_TD if num_nodes == 1 else torch.zeros_like(total_TD)
        for rank, rows_ND in enumerate(rows_by_rank):
            if node_of_rank[rank] == node:
                # A token goes to a rank once, so the rows of one rank never meet in an element.
                partial_TD[sent[rank].long()] += rows_ND.to(total_TD.dtype)
        if num_nodes > 1:
            total_TD += partial_TD.to(dtype)
    return out_TD.copy_(total_TD)
