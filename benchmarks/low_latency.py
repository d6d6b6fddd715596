"""Dispatch and combine of a few tokens: the low-latency mode against the normal one, in one run.

    python benchmarks/low_latency.py
    python benchmarks/low_latency.py --ranks 2 --tokens 1 8 64 --hidden 2048 --fp8

All ranks work at once; a figure is the median over rounds of the slowest rank's time for a dispatch
and the combine of what arrived, and the two modes take turns, so that whatever else the machine
does meets both. The low-latency mode brings rows by expert and weighs them in its combine. The
normal one does neither: "with permute" adds the permute and unpermute that a grouped GEMM needs.
Everything is compared with the specification's rules first: the two modes' sums must be equal.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard
from tokenyard.testing import Processes, numbered_tokens, routing

NUM_TOPK, NUM_EXPERTS = 8, 64


class Modes:
    def __init__(self, buffer: tokenyard.Buffer, num_tokens: int, hidden: int, fp8: bool) -> None:
        self.buffer, self.num_max, self.fp8 = buffer, num_tokens, fp8
        self.x = numbered_tokens(num_tokens, hidden, first=buffer.rank * num_tokens)
        self.idx, self.weights = routing(
            "uniform", num_tokens, NUM_TOPK, NUM_EXPERTS, seed=buffer.rank
        )
        self.y: Tensor | None = None

    def low_latency(self, zero_copy: bool = False) -> Tensor:
        got = self.buffer.low_latency_dispatch(
            self.x, self.idx, self.num_max, NUM_EXPERTS, use_fp8=self.fp8
        )
        y = got.recv_x
        if self.fp8:  # the experts' output is in bfloat16, whatever came in
            if self.y is None:
                self.y = torch.ones(got.recv_x[0].shape, dtype=torch.bfloat16)
            y = self.y
        if zero_copy:
            y = self.buffer.get_next_low_latency_combine_buffer(got.handle)
        return self.buffer.low_latency_combine(
            y, self.idx, self.weights, got.handle, zero_copy=zero_copy
        ).combined_x

    def normal(self, permuted: bool = False) -> Tensor:
        x = tokenyard.per_token_cast_to_fp8(self.x) if self.fp8 else self.x
        got = self.buffer.dispatch(
            x, topk_idx=self.idx, topk_weights=self.weights, num_experts=NUM_EXPERTS
        )
        y = got.recv_x
        if permuted:
            here = tokenyard.permute(y, got.recv_topk_idx, NUM_EXPERTS // self.buffer.group_size)
            y = tokenyard.unpermute(here.x, here.row_of, weights=got.recv_topk_weights)
        elif self.fp8:
            y = self.buffer.get_next_combine_buffer(got.handle)
        return self.buffer.combine(y, got.handle).x

    def verify(self) -> None:
        """Integers and powers of two, whose sums are exact in any order: both modes must agree."""
        x, weights, fp8 = self.x, self.weights, self.fp8
        self.x = torch.arange(x.shape[0])[:, None].expand(x.shape).remainder(8).to(x.dtype)
        self.weights = torch.full_like(weights, 0.125)
        self.fp8 = False
        assert torch.equal(self.low_latency(), self.normal(permuted=True)), "the modes differ"
        self.x, self.weights, self.fp8 = x, weights, fp8


def job(group: Any, num_tokens: int, hidden: int, fp8: bool, repeat: int) -> list[list[float]]:
    torch.set_num_threads(1)
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        modes = Modes(buffer, num_tokens, hidden, fp8)
        modes.verify()
        calls: list[Callable[[], Tensor]] = [
            modes.low_latency,
            lambda: modes.low_latency(zero_copy=True),
            modes.normal,
        ]
        if not fp8:
            calls.append(lambda: modes.normal(permuted=True))
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(repeat + 3):
            for call, spent in zip(calls, times):
                dist.barrier()
                start = time.perf_counter()
                call()
                slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn >= 3:
                    spent.append(slowest.item())
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--fp8", action="store_true", help="dispatch in FP8")
    args = parser.parse_args()
    print(f"hidden {args.hidden}, top-{NUM_TOPK} of {NUM_EXPERTS} experts; us, median ± spread\n")
    for num_ranks in args.ranks:
        crossover = None
        print(f"| tokens at {num_ranks} ranks | low latency | zero copy | normal | with permute |")
        print("|---|---|---|---|---|")
        with Processes(num_ranks, timeout=300) as ranks:
            for num_tokens in args.tokens:
                repeat = max(5, args.repeat // max(1, num_tokens // 64))
                times = ranks.run(job, num_tokens, args.hidden, args.fp8, repeat)[0]
                quartiles = [statistics.quantiles(one, n=4) for one in times]
                shown = [f"{mid * 1e6:.0f} ± {(up - low) / 2e-6:.0f}" for low, mid, up in quartiles]
                print(f"| {num_tokens} | {' | '.join(shown + [''] * (4 - len(shown)))} |")
                if crossover is None and quartiles[0][1] > quartiles[2][1]:
                    crossover = num_tokens
        where = "at none of these" if crossover is None else f"from {crossover} tokens a rank on"
        print(f"\nAt {num_ranks} ranks the normal mode is faster {where}.\n")


if __name__ == "__main__":
    main()
