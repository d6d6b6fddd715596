"""moe_align_block_size against the same in torch operations, one thread, in one run.

    python benchmarks/align.py

Results are compared before anything is timed. Both are timed in turn, 15 calls a round, so that
what else the machine does hits both alike. Medians of the rounds, half the distance between their
quartiles, and the median of their ratios.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import tokenyard
from tokenyard.testing import routing

CASES = [(1, 64), (64, 64), (4096, 128), (65536, 128)]  # tokens, block size
TOPK, EXPERTS, ROUNDS = 8, 256, 9


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


def microseconds(call: Callable[[], object], repeat: int = 15) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def spread(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.1f} ± {(high - low) / 2:.1f}"


def main() -> None:
    torch.set_num_threads(1)
    print("| tokens | top-k | experts | block | torch, us | tokenyard, us | times faster |")
    print("|---|---|---|---|---|---|---|")
    for tokens, block_size in CASES:
        topk_ids = routing("uniform", tokens, TOPK, EXPERTS)[0].int()
        got = tokenyard.moe_align_block_size(topk_ids, block_size, EXPERTS)
        for mine, other in zip(got, in_torch(topk_ids, block_size)):
            assert torch.equal(mine[: len(other)], other)
        theirs, ours = [], []
        for _ in range(ROUNDS):
            theirs.append(microseconds(lambda: in_torch(topk_ids, block_size)))  # noqa: B023
            ours.append(
                microseconds(
                    lambda: tokenyard.moe_align_block_size(topk_ids, block_size, EXPERTS)  # noqa: B023
                )
            )
        ratio = statistics.median(torch_us / our_us for torch_us, our_us in zip(theirs, ours))
        case = f"| {tokens} | {TOPK} | {EXPERTS} | {block_size}"
        print(f"{case} | {spread(theirs)} | {spread(ours)} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
