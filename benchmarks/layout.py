"""tokenyard's layout against the same in torch operations, one thread, in one run.

    python benchmarks/layout.py

Results are compared before anything is timed. Medians, and half the distance between quartiles.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tokenyard.testing import layout_of, routing

CASES = [(128, 8, 256, 8), (4096, 8, 256, 32), (8192, 8, 256, 64)]


def in_torch(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts per rank and expert, and marks, for experts spread evenly."""
    chosen = topk_idx[topk_idx >= 0]
    per_expert = torch.bincount(chosen, minlength=num_experts).int()
    rank = torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), num_ranks)
    marks = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool).scatter_(1, rank, True)
    in_rank = marks[:, :num_ranks].contiguous()
    return in_rank.sum(0).int(), per_expert, in_rank


def microseconds(call: Callable[[], object], repeat: int = 31) -> tuple[float, float]:
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def main() -> None:
    torch.set_num_threads(1)
    print("| tokens | top-k | experts | ranks | torch, us | tokenyard, us | times faster |")
    print("|---|---|---|---|---|---|---|")
    for tokens, topk, experts, ranks in CASES:
        topk_idx, _ = routing("uniform", tokens, topk, experts)
        got, want = layout_of(topk_idx, experts, ranks), in_torch(topk_idx, experts, ranks)
        assert torch.equal(got.num_tokens_per_rank, want[0])
        assert torch.equal(got.num_tokens_per_expert, want[1])
        assert torch.equal(got.is_token_in_rank, want[2])
        theirs, their_spread = microseconds(lambda: in_torch(topk_idx, experts, ranks))  # noqa: B023
        ours, our_spread = microseconds(lambda: layout_of(topk_idx, experts, ranks))  # noqa: B023
        print(
            f"| {tokens} | {topk} | {experts} | {ranks} | {theirs:.0f} ± {their_spread:.0f} "
            f"| {ours:.1f} ± {our_spread:.1f} | {theirs / ours:.1f} |"
        )


if __name__ == "__main__":
    main()
