"""tokenyard.rearrange against Tensor.copy_ and against a plain copy of the same bytes, in one run.

    python benchmarks/rearrange.py

One thread, then two threads on the first case. Results are compared before anything is timed.
Medians of rounds in which all take turns, and half the distance between quartiles.
"""

import statistics
import time
from collections.abc import Callable
from math import exp, log

import torch

import tokenyard

CASES = [
    ((8192, 4096), (1, 0)),
    ((8191, 4093), (1, 0)),
    ((100, 256, 512), (2, 1, 0)),
    ((64, 512, 8, 128), (0, 2, 1, 3)),
    ((64, 8, 512, 128), (0, 1, 3, 2)),
    ((32, 32, 32, 32, 32), (4, 3, 2, 1, 0)),
    ((16, 3, 512, 512), (0, 2, 3, 1)),
    ((16, 512, 512, 3), (0, 3, 1, 2)),
    ((7, 9, 11, 13, 17, 19), (5, 1, 3, 0, 2, 4)),
    ((4096, 64, 128), (1, 0, 2)),
]


def milliseconds(calls: list[Callable[[], object]], rounds: int = 11) -> list[tuple[float, float]]:
    """Median and spread of each, taken in turns so that a busy machine slows all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e3)
    result = []
    for taken in times:
        low, middle, high = statistics.quantiles(taken[1:], n=4)
        result.append((middle, (high - low) / 2))
    return result


def against_torch(dtype: torch.dtype) -> tuple[list[float], list[float]]:
    faster, of_copy = [], []
    for shape, axes in CASES:
        src = torch.randn(shape).to(dtype)
        view = src.permute(axes)
        ours, theirs = (torch.empty(view.shape, dtype=dtype) for _ in range(2))
        plain = torch.empty_like(src)
        tokenyard.rearrange(ours, view)
        assert torch.equal(ours, view)
        (torch_ms, torch_spread), (our_ms, our_spread), (copy_ms, _) = milliseconds(
            [
                lambda: theirs.copy_(view),  # noqa: B023
                lambda: tokenyard.rearrange(ours, view),  # noqa: B023
                lambda: plain.copy_(src),  # noqa: B023
            ]
        )
        faster.append(torch_ms / our_ms)
        of_copy.append(copy_ms / our_ms)
        print(
            f"| {str(dtype)[6:]} | {shape} | {axes} | {torch_ms:.1f} ± {torch_spread:.1f} "
            f"| {our_ms:.1f} ± {our_spread:.1f} | {faster[-1]:.1f} | {of_copy[-1]:.2f} |",
            flush=True,
        )
    return faster, of_copy


def with_two_threads() -> None:
    src = torch.randn(CASES[0][0]).t()
    dst = torch.empty(src.shape)

    def run(num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        tokenyard.rearrange(dst, src)

    (one, _), (two, _) = milliseconds([lambda: run(1), lambda: run(2)])
    print(f"\n{CASES[0][0]} float32: {one:.1f} ms on one thread, {two:.1f} ms on two")


def main() -> None:
    torch.set_num_threads(1)
    print("| dtype | shape | axes | copy_, ms | rearrange, ms | times faster | of a plain copy |")
    print("|---|---|---|---|---|---|---|")
    faster, of_copy = [], []
    for dtype in (torch.float32, torch.bfloat16):
        more = against_torch(dtype)
        faster += more[0]
        of_copy += more[1]
    mean, mean_of_copy = (exp(statistics.mean(map(log, each))) for each in (faster, of_copy))
    print(f"\nGeometric means: {mean:.1f} times faster, {mean_of_copy:.2f} of a plain copy.")
    with_two_threads()


if __name__ == "__main__":
    main()
