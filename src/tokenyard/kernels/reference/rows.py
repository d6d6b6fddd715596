"""Rows of bytes by index, and renaming the experts in them, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


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
