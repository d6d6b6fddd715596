"""moe_align_block_size against the same in torch operations, one thread, in one run.

    python benchmarks/align.py

Results are compared before anything is timed. Medians, and half the distance between quartiles.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import tokenyard
from tokenyard.testing import routing

CASES = [(1, 64), (64, 64), (4096, 128), (65536, 128)]  # tokens, block size
TOPK, EXPERTS = 8, 256


def in_torch(topk_ids: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """What is in use of the three results, where no id is -1."""
    ids, order = topk_ids.flatten().sort(stable=True)
    counts = torch.bincount(ids, minlength=EXPERTS)
    blocks = (counts + block_size - 1) // block_size
    ends = (blocks * block_size).cumsum(0)
    shift = ends - blocks * block_size - (counts.cumsum(0) - counts)
    entries = torch.full((int(ends[-1]),), ids.numel(), dtype=torch.int32)
    entries[torch.arange(ids.numel()) + shift[ids]] = order.int()
    owners = torch.arange(EXPERTS, dtype=torch.int32).repeat_interleave(blocks)
    return entries, owners, ends[-1:].int()


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
    print("| tokens | top-k | experts | block | torch, us | tokenyard, us | times faster |")
    print("|---|---|---|---|---|---|---|")
    for tokens, block_size in CASES:
        topk_ids = routing("uniform", tokens, TOPK, EXPERTS)[0].int()
        got = tokenyard.moe_align_block_size(topk_ids, block_size, EXPERTS)
        for mine, other in zip(got, in_torch(topk_ids, block_size)):
            assert torch.equal(mine[: len(other)], other)
        theirs, their_spread = microseconds(lambda: in_torch(topk_ids, block_size))  # noqa: B023
        ours, our_spread = microseconds(
            lambda: tokenyard.moe_align_block_size(topk_ids, block_size, EXPERTS)  # noqa: B023
        )
        print(
            f"| {tokens} | {TOPK} | {EXPERTS} | {block_size} | {theirs:.0f} ± {their_spread:.0f} "
            f"| {ours:.1f} ± {our_spread:.1f} | {theirs / ours:.1f} |"
        )


if __name__ == "__main__":
    main()
