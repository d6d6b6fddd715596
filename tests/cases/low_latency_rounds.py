"""Low-latency rounds whose every row and sum a rank can predict: for tests of order and faults."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

import tokenyard


class Rounds:
    """Dispatch and combine of tokens that know who they are, on one rank."""

    def __init__(self, buffer: tokenyard.Buffer, num_experts: int = 6, num_max: int = 4) -> None:
        self.buffer, self.rank, self.size = buffer, buffer.rank, buffer.group_size
        self.num_experts, self.num_max = num_experts, num_max

    def tokens(self, rank: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """Small integers, so that every sum is exact, in any order."""
        choose = random.Random(f"{rank} {turn}")
        num_tokens = choose.randint(0, self.num_max)
        idx = [choose.sample(range(self.num_experts), 2) for _ in range(num_tokens)]
        x = torch.tensor([[float(1 + t + 5 * rank + turn % 50)] * 16 for t in range(num_tokens)])
        weights = torch.tensor([[choose.choice([0.5, 1.0, 2.0]) for _ in range(2)] for _ in idx])
        return x.view(-1, 16), torch.tensor(idx).view(-1, 2).long(), weights.view(-1, 2)

    def dispatch(self, turn: int, **options: Any) -> Any:
        x, idx, _ = self.tokens(self.rank, turn)
        return self.buffer.low_latency_dispatch(
            x, idx, self.num_max, self.num_experts, use_fp8=False, **options
        )

    def combine(self, got: Any, turn: int, **options: Any) -> Any:
        """Expert e multiplies by e + 1."""
        _, idx, weights = self.tokens(self.rank, turn)
        each = self.num_experts // self.size
        gain = torch.arange(each)[:, None, None] + each * self.rank + 1.0
        y = got.recv_x * gain
        return self.buffer.low_latency_combine(y, idx, weights, got.handle, **options)

    def expected(self, turn: int, masked: Collection[int] = ()) -> Tensor:
        x, idx, weights = self.tokens(self.rank, turn)
        gain = torch.arange(self.num_experts) + 1.0
        for rank in masked:
            each = self.num_experts // self.size
            gain[rank * each : (rank + 1) * each] = 0
        return x * (gain[idx] * weights).sum(1, keepdim=True)

    def check(self, turn: int) -> None:
        got = self.dispatch(turn)
        self.check_received(got, turn)
        combined = self.combine(got, turn).combined_x
        assert torch.equal(combined, self.expected(turn)), f"turn {turn} on rank {self.rank}"

    def check_received(self, got: Any, turn: int, masked: Collection[int] = ()) -> None:
        given = [self.tokens(rank, turn) for rank in range(self.size)]
        each = self.num_experts // self.size
        for local in range(each):
            rows = [
                x[(idx == each * self.rank + local).any(1)]
                for rank, (x, idx, _) in enumerate(given)
                if rank not in masked
            ]
            want = torch.cat(rows)
            assert got.recv_count[local] == len(want), f"turn {turn} on rank {self.rank}"
            assert torch.equal(got.recv_x[local, : len(want)], want), f"turn {turn}"
