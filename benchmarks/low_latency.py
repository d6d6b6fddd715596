"""Dispatch and combine of a few tokens: the low-latency mode against the normal one, in one run.

    python benchmarks/low_latency.py
    python benchmarks/low_latency.py --ranks 2 --tokens 1 8 64 --hidden 2048 --fp8

All ranks work at once. A round is STEPS times a dispatch and a combine, one after the other as in
decoding; a figure is the median over rounds of the slowest rank's time, for one of them. The modes
take turns, so that whatever else the machine does meets both.

The experts' output is an ordinary tensor, or lies where combine needs no copy ("zero copy"). The
low-latency mode brings rows by expert and weighs them in its combine. The normal one does neither:
"with permute" adds the permute and unpermute that a grouped GEMM needs, to and from ordinary
tensors. Before anything is timed the modes' sums are compared, for tokens whose sums are exact.
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
STEPS = 10


class Modes:
    def __init__(self, buffer: tokenyard.Buffer, num_tokens: int, hidden: int, fp8: bool) -> None:
        self.buffer, self.num_max, self.fp8 = buffer, num_tokens, fp8
        self.x = numbered_tokens(num_tokens, hidden, first=buffer.rank * num_tokens)
        self.idx, self.weights = routing(
            "uniform", num_tokens, NUM_TOPK, NUM_EXPERTS, seed=buffer.rank
        )
        self.outputs: dict[torch.Size, Tensor] = {}

    def output(self, recv_x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """What experts would give back, in bfloat16 whatever came in, and made beforehand."""
        shape = recv_x[0].shape if isinstance(recv_x, tuple) else recv_x.shape
        if shape not in self.outputs:
            self.outputs[shape] = torch.ones(shape, dtype=torch.bfloat16)
        return self.outputs[shape]

    def low_latency(self, zero_copy: bool = False, same: bool = False) -> Tensor:
        buffer = self.buffer
        got: Any = buffer.low_latency_dispatch(
            self.x, self.idx, self.num_max, NUM_EXPERTS, use_fp8=self.fp8
        )
        y = got.recv_x if same else self.output(got.recv_x)
        if zero_copy:
            y = buffer.get_next_low_latency_combine_buffer(got.handle)
        return buffer.low_latency_combine(
            y, self.idx, self.weights, got.handle, zero_copy=zero_copy
        ).combined_x

    def normal(self, zero_copy: bool = False, permuted: bool = False) -> Tensor:
        buffer = self.buffer
        x = tokenyard.per_token_cast_to_fp8(self.x) if self.fp8 else self.x
        got: Any = buffer.dispatch(
            x, topk_idx=self.idx, topk_weights=self.weights, num_experts=NUM_EXPERTS
        )
        y = got.recv_x if permuted else self.output(got.recv_x)
        if permuted:
            here = tokenyard.permute(y, got.recv_topk_idx, NUM_EXPERTS // buffer.group_size)
            y = tokenyard.unpermute(here.x, here.row_of, weights=got.recv_topk_weights)
        if zero_copy:
            y = buffer.get_next_combine_buffer(got.handle)
        return buffer.combine(y, got.handle).x

    def verify(self) -> None:
        """Integers and powers of two, whose sums are exact in any order: both modes must agree."""
        x, weights, fp8 = self.x, self.weights, self.fp8
        self.x = torch.arange(x.shape[0])[:, None].expand(x.shape).remainder(8).to(x.dtype)
        self.weights = torch.full_like(weights, 0.125)
        self.fp8 = False
        assert torch.equal(self.low_latency(same=True), self.normal(permuted=True)), (
            "the modes differ"
        )
        self.x, self.weights, self.fp8 = x, weights, fp8


def job(group: Any, num_tokens: int, hidden: int, fp8: bool, repeat: int) -> list[list[float]]:
    torch.set_num_threads(1)
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        modes = Modes(buffer, num_tokens, hidden, fp8)
        modes.verify()
        calls: list[Callable[[], Tensor]] = [
            modes.low_latency,
            modes.normal,
            lambda: modes.low_latency(zero_copy=True),
            lambda: modes.normal(zero_copy=True),
        ]
        if not fp8:
            calls.append(lambda: modes.normal(permuted=True))
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(repeat + 2):
            for call, spent in zip(calls, times):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(STEPS):
                    call()
                spent_here = (time.perf_counter() - start) / STEPS
                slowest = torch.tensor(spent_here, dtype=torch.float64)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                if turn >= 2:
                    spent.append(slowest.item())
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--fp8", action="store_true", help="dispatch in FP8")
    args = parser.parse_args()
    print(f"hidden {args.hidden}, top-{NUM_TOPK} of {NUM_EXPERTS} experts; us, median ± spread\n")
    for num_ranks in args.ranks:
        crossover = None
        print(
            f"| tokens at {num_ranks} ranks | low latency | normal | low latency, zero copy "
            "| normal, zero copy | normal, with permute |"
        )
        print("|---|---|---|---|---|---|")
        with Processes(num_ranks, timeout=300) as ranks:
            for num_tokens in args.tokens:
                repeat = max(5, args.repeat // max(1, num_tokens // 64))
                times = ranks.run(job, num_tokens, args.hidden, args.fp8, repeat)[0]
                quartiles = [statistics.quantiles(one, n=4) for one in times]
                shown = [f"{mid * 1e6:.0f} ± {(up - low) / 2e-6:.0f}" for low, mid, up in quartiles]
                print(f"| {num_tokens} | {' | '.join(shown + [''] * (5 - len(shown)))} |")
                if crossover is None and quartiles[0][1] > quartiles[1][1]:
                    crossover = num_tokens
        where = "at none of these" if crossover is None else f"from {crossover} tokens a rank on"
        print(f"\nAt {num_ranks} ranks the normal mode is faster {where}.\n")


if __name__ == "__main__":
    main()
