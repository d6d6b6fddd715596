"""Dispatch and combine between the ranks of one machine, against memcpy and gloo, in one run.

    python benchmarks/intranode.py --ranks 2 --tokens 4096
    python benchmarks/intranode.py --ranks 2 --tokens 1 --repeat 1000
    python benchmarks/intranode.py --ranks 2 --tokens 4096 --transport ring

All ranks work at once, and a figure is the median over rounds of the slowest rank. memcpy copies,
in each rank, as many bytes as it receives. gloo is what one writes without a library: gather,
counts and rows by all_to_all_single, and on the way back a sum in float32. Results are compared
with gloo's first.
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
from tokenyard.testing import numbered_tokens, routing, run_processes

NUM_TOPK, NUM_EXPERTS = 8, 64


class Gloo:
    """The same exchange, by hand."""

    def __init__(self, x: Tensor, in_rank: Tensor) -> None:
        self.x, self.in_rank = x, in_rank
        self.tokens = in_rank.t().nonzero()[:, 1]
        self.sent = in_rank.sum(0)

    def dispatch(self) -> Tensor:
        received = torch.empty_like(self.sent)
        dist.all_to_all_single(received, self.sent)
        self.received = received.tolist()
        out = self.x.new_empty(sum(self.received), self.x.shape[1])
        rows = self.x.index_select(0, self.tokens)
        dist.all_to_all_single(out, rows, self.received, self.sent.tolist())
        return out

    def combine(self, y: Tensor) -> Tensor:
        back = y.new_empty(len(self.tokens), y.shape[1])
        dist.all_to_all_single(back, y, self.sent.tolist(), self.received)
        total = torch.zeros(self.x.shape, dtype=torch.float32)
        return total.index_add_(0, self.tokens, back.float()).to(y.dtype)


def seconds(call: Callable[[], object], repeat: int) -> list[float]:
    """The slowest rank's time in each round, after one to warm up."""
    times = []
    for _ in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(spent.item())
    return times[1:]


def seconds_to_return(call: Callable[[], Any], repeat: int) -> list[float]:
    """This rank's time until an asynchronous call returns; its event is waited for in between."""
    times = []
    for _ in range(repeat + 1):
        dist.barrier()
        start = time.perf_counter()
        got = call()
        times.append(time.perf_counter() - start)
        got.event.current_stream_wait()
    return times[1:]


def job(group: Any, num_tokens: int, hidden: int, repeat: int, transport: str) -> dict[str, Any]:
    rank = group.rank()
    torch.set_num_threads(1)
    x = numbered_tokens(num_tokens, hidden, first=rank * num_tokens)
    topk_idx, weights = routing("uniform", num_tokens, NUM_TOPK, NUM_EXPERTS, seed=rank)
    with tokenyard.Buffer(group, transport=transport) as buffer:

        def dispatch(async_finish: bool = False) -> Any:
            return buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_experts=NUM_EXPERTS,
                async_finish=async_finish,
            )

        def there_and_back() -> None:
            there = dispatch()
            buffer.combine(there.recv_x, there.handle)

        def there_and_back_by_gloo() -> None:
            gloo.combine(gloo.dispatch())

        got = dispatch()
        gloo = Gloo(x, got.handle.is_token_in_rank)
        assert torch.equal(gloo.dispatch(), got.recv_x), "dispatch differs from gloo's"
        private = got.recv_x.clone()
        ours, theirs = buffer.combine(private, got.handle).x, gloo.combine(private)
        assert torch.equal(ours, theirs), "combine differs from gloo's"
        shared = buffer.get_next_combine_buffer(got.handle).copy_(private)

        source, target = private.view(torch.uint8), torch.zeros_like(private.view(torch.uint8))
        few = max(2, repeat // 3)
        times = {
            "memcpy": seconds(lambda: target.copy_(source), repeat),
            "dispatch": seconds(dispatch, repeat),
            "dispatch, cached handle": seconds(
                lambda: buffer.dispatch(x, handle=got.handle), repeat
            ),
            "combine, ordinary tensor": seconds(
                lambda: buffer.combine(private, got.handle), repeat
            ),
            "combine, get_next_combine_buffer": seconds(
                lambda: buffer.combine(shared, got.handle), repeat
            ),
            "dispatch and combine": seconds(there_and_back, repeat),
            "gloo dispatch": seconds(gloo.dispatch, few),
            "gloo combine": seconds(lambda: gloo.combine(private), few),
            "gloo dispatch and combine": seconds(there_and_back_by_gloo, few),
            "dispatch, async_finish, until it returns": seconds_to_return(
                lambda: dispatch(async_finish=True), repeat
            ),
            "combine, async_finish, until it returns": seconds_to_return(
                lambda: buffer.combine(private, got.handle, async_finish=True), repeat
            ),
        }
        return {"bytes": source.numel(), "times": times, "transport": repr(buffer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--transport", default="auto")
    args = parser.parse_args()
    sizes = (args.tokens, args.hidden, args.repeat, args.transport)
    result = run_processes(job, args.ranks, *sizes, timeout=600)[0]
    floor = statistics.median(result["times"]["memcpy"])
    print(f"{result['transport']}, {result['bytes'] / 1e6:.0f} MB received by rank 0\n")
    print("| | median, ms | spread, ms | of memcpy |\n|---|---|---|---|")
    for name, times in result["times"].items():
        low, middle, high = statistics.quantiles(times, n=4)
        print(
            f"| {name} | {middle * 1e3:.3g} | {(high - low) / 2 * 1e3:.2g} | {middle / floor:.2f} |"
        )


if __name__ == "__main__":
    main()
