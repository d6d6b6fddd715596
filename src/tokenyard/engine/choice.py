"""Which copy of an expert a token goes to: logical experts in topk_idx become physical ones.

Done once, where a call begins; from there on a call knows physical experts only. `spec.choose` says
what the choice is: copies on this rank's node first; of n copies, token t of rank r takes the one
in place (r + t) mod n. It depends on nothing else, so that a call that is made again gives the same
bits, and a combine finds the copies that its dispatch took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.replicas import Replicas

_MOST_CHOICES = 1 << 15  # that a rank keeps in a table: 256 KiB


class Choice:
    """The choice of one rank."""

    def __init__(
        self,
        replicas: Replicas,
        rank: int,
        node_of_rank: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_experts, self._rank = replicas.num_experts, rank
        home = node_of_rank[rank]
        slots: list[int] = []
        first, count = [], []
        for copies in replicas.copies:
            near = [one for one in copies if node_of_rank[replicas.rank_of_slot[one]] == home]
            first.append(len(slots))
            slots += near or copies
            count.append(len(slots) - first[-1])
        # The last entries are for -1, which finds them as Python does.
        self._slots = torch.tensor([*slots, -1], device=device)
        self._first = torch.tensor([*first, len(slots)], device=device)
        self._count = torch.tensor([*count, 1], device=device)
        self._turns_T1 = torch.empty(0, 1, dtype=torch.int64, device=device)
        self._table, self._period = self._tabulate(math.lcm(*count))

    def _tabulate(self, period: int) -> tuple[Tensor | None, int]:
        """The choices of `period` turns, after which they repeat, in lines of -1 and all experts.
        None if that is too much: then every call computes them.
        """
        width = self.num_experts + 1
        if period * width > _MOST_CHOICES:
            return None, 0
        turns = torch.arange(period, device=self._slots.device)[:, None]
        experts = torch.arange(-1, self.num_experts, device=self._slots.device)
        return self._compute(turns, experts.expand(period, width)).flatten(), period

    def __call__(self, topk_idx_TK: Tensor) -> Tensor:
        """[T, K] int64. Raises ValueError if there is no such expert."""
        if topk_idx_TK.numel() == 0:
            return topk_idx_TK
        low, high = torch.aminmax(topk_idx_TK)
        if low.item() < -1 or high.item() >= self.num_experts:
            outside = (topk_idx_TK < -1) | (topk_idx_TK >= self.num_experts)
            first = int(outside.flatten().nonzero()[0])
            raise validate.bad_expert(topk_idx_TK, first, self.num_experts)
        turns_T1 = self._turns(topk_idx_TK.shape[0])
        if self._table is not None:
            return self._table.take(topk_idx_TK + turns_T1)
        return self._compute(turns_T1, topk_idx_TK)

    def _compute(self, turns_T1: Tensor, topk_idx_TK: Tensor) -> Tensor:
        turn_TK = turns_T1 % self._count[topk_idx_TK]
        return self._slots[turn_TK.add_(self._first[topk_idx_TK])]

    def or_none(self, topk_idx_TK: Tensor) -> Tensor | None:
        """Choose copies as `__call__` does; None if an id is no expert."""
        try:
            return self(topk_idx_TK)
        except ValueError:
            return None

    def before_checks(self, topk_idx: Any) -> Any:
        """Choose copies for input that is not checked yet: anything but a [T, K] int64 tensor on
        this choice's device comes back unchanged, so that the later check refuses it.
        """
        if not (
            isinstance(topk_idx, Tensor)
            and topk_idx.dtype is torch.int64
            and topk_idx.ndim == 2
            and topk_idx.layout is torch.strided
            and topk_idx.device == self._slots.device
        ):
            return topk_idx
        return self(topk_idx)

    def _turns(self, num_tokens: int) -> Tensor:
        """[T, 1]: r + t, or where expert 0 of that turn is in the table; made anew only if there
        were not as many tokens.
        """
        if num_tokens != self._turns_T1.shape[0]:
            begin, device = self._rank, self._slots.device
            turns = torch.arange(begin, begin + num_tokens, device=device)
            if self._table is not None:
                turns = turns % self._period * (self.num_experts + 1) + 1
            self._turns_T1 = turns[:, None]
        return self._turns_T1
