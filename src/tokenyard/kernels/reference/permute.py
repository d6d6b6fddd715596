"""Rows to their local experts and back, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.kernels.base import wide_dtype
from tokenyard.kernels.reference.align import by_expert
from tokenyard.types import Places


def place(topk_idx_NK: Tensor, num_experts: int, expert_alignment: int) -> tuple[Places, int]:
    """
    >>> got, first_bad = place(torch.tensor([[1, -1], [0, 1], [-1, 1]]), 2, expert_alignment=2)
    >>> got.row_of.tolist(), got.offsets.tolist(), got.num_rows, first_bad
    ([[2, -1], [0, 3], [-1, 4]], [2, 6], 6, -1)
    """
    ids = topk_idx_NK.flatten().long()
    counts_L, order, rank, first_bad = by_expert(ids, num_experts)
    padded_L = (counts_L + expert_alignment - 1) // expert_alignment * expert_alignment
    ends_L = padded_L.cumsum(0)
    row_of = torch.full_like(ids, -1)
    row_of[order] = (ends_L - padded_L)[ids[order]] + rank
    places = Places(row_of.view(topk_idx_NK.shape), ends_L.int(), int(padded_L.sum()))
    return places, first_bad


def spread(x_NB: Tensor, row_of_NK: Tensor, out_MB: Tensor) -> Tensor:
    """
    >>> x = torch.tensor([[7, 7], [8, 8]], dtype=torch.uint8)
    >>> spread(x, torch.tensor([[3, -1], [0, 2]]), torch.empty(4, 2, dtype=torch.uint8)).tolist()
    [[8, 8], [0, 0], [8, 8], [7, 7]]
    """
    row, k = (row_of_NK >= 0).nonzero(as_tuple=True)
    out_MB.zero_()
    out_MB[row_of_NK[row, k]] = x_NB[row]
    return out_MB


def unpermute(y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor | None, out_ND: Tensor) -> int:
    """
    >>> y, out = torch.tensor([[1.0], [2.0], [4.0]]), torch.empty(2, 1)
    >>> unpermute(y, torch.tensor([[2, 0], [-1, 1]]), None, out), out.tolist()
    (-1, [[5.0], [2.0]])
    """
    first_bad = find_outside(row_of_NK, y_MD.shape[0])
    if first_bad >= 0:
        return first_bad
    total_ND = torch.zeros_like(out_ND, dtype=wide_dtype(out_ND.dtype))
    for k, place_N in enumerate(row_of_NK.unbind(1)):
        (row,) = (place_N >= 0).nonzero(as_tuple=True)
        term = y_MD[place_N[row]].to(total_ND.dtype)
        if weights_NK is not None:
            term = weights_NK[row, k, None] * term
        total_ND[row] += term
    out_ND.copy_(total_ND)
    return -1


def find_outside(row_of_NK: Tensor, num_rows: int) -> int:
    outside = ((row_of_NK < -1) | (row_of_NK >= num_rows)).flatten().nonzero()
    return int(outside[0, 0]) if len(outside) else -1
