"""Rows of a token by top-k lane, which is the order in which DeepEP V2 adds them up.

A *lane* is a place among a token's top-k choices. What a rank sends back for a token is added at
the last lane that has an expert of that rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lanes(NamedTuple):
    """Where each lane's expert is, and which of a rank's lanes is its last."""

    rank_TK: Tensor  # int64, -1 where there is no expert
    is_last_TK: Tensor  # bool, True at one lane for each (token, rank)

    def home_rows(self, chosen_TK: Tensor) -> Tensor:
        """[T, K] int64: the places of these lanes among rows by (rank, token, lane), -1 elsewhere.

        >>> lanes = find_lanes(torch.tensor([[2, 0, 1], [-1, 1, 2]]), torch.tensor([0, 0, 1]))
        >>> lanes.home_rows(lanes.is_last_TK).tolist()  # token 0 is rank 0's row 0, rank 1's row 0
        [[2, -1, 0], [-1, 1, 3]]
        """
        ranks = torch.where(chosen_TK, self.rank_TK, torch.iinfo(torch.int64).max).flatten()
        order = torch.argsort(ranks, stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return torch.where(chosen_TK, places.view(chosen_TK.shape), -1)


def find_lanes(topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> Lanes:
    """
    >>> find_lanes(torch.tensor([[2, 0, 1], [-1, 1, 2]]), torch.tensor([0, 0, 1])).rank_TK.tolist()
    [[1, 0, 0], [-1, 0, 1]]
    """
    table = torch.cat([rank_of_expert_E.long(), rank_of_expert_E.new_full((1,), -1).long()])
    rank_TK = table[topk_idx_TK]  # -1 finds the last entry
    return Lanes(rank_TK, last_of_group(rank_TK))


def last_of_group(group_TK: Tensor) -> Tensor:
    """[T, K] bool: whether no later lane of the token is of the same group; False where it is -1.

    >>> last_of_group(torch.tensor([[0, 1, 0, -1]])).tolist()
    [[False, True, True, False]]
    """
    num_topk = group_TK.shape[1]
    is_last = group_TK >= 0
    for ahead in range(1, num_topk):
        is_last[:, :-ahead] &= group_TK[:, :-ahead] != group_TK[:, ahead:]
    return is_last
