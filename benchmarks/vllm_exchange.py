"""The exchange of the vLLM plugin, against all-gather and reduce-scatter over gloo.

    python benchmarks/vllm_exchange.py

All-gather and reduce-scatter is what vLLM's own manager is made of where it is implemented, and
what is proposed for CPUs: every token goes to every rank, and partial sums of all tokens come back.
"exchange" is the way there and back. "for the kernel" adds what both need besides on a CPU: a row
for each (token, local expert), as vLLM's experts kernel wants them, and the sums of those rows.

Two processes with a core each and one thread, as vLLM binds them. Both ways take turns in the same
processes; a figure is the median over rounds of the slowest rank. Results are compared first.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.ops.permute import permute, unpermute
from tokenyard.testing import run_processes

HIDDEN, NUM_EXPERTS, NUM_TOPK, RANKS = 2048, 64, 8, 2
CASES = {"prefill": 2048, "decode": 16}  # tokens a rank: 32 sequences are 16 on each of two


class Gathered:
    """Straightforward: tokens have the same number on all ranks, so nothing is padded."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        local = NUM_EXPERTS // self.size
        self.expert_map = torch.full((NUM_EXPERTS,), -1)
        self.expert_map[self.rank * local : (self.rank + 1) * local] = torch.arange(local)

    def gather(self, one: Tensor) -> Tensor:
        out = one.new_empty(self.size * one.shape[0], *one.shape[1:])
        dist.all_gather(list(out.chunk(self.size)), one, group=self.group)
        return out

    def there(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.gather(x), self.gather(ids), self.gather(weights)

    def back(self, y: Tensor) -> Tensor:
        out = y.new_empty(y.shape[0] // self.size, y.shape[1])
        dist.reduce_scatter_tensor(out, y, group=self.group)
        return out


def ways(
    ours: Exchange, theirs: Gathered, x: Tensor, ids: Tensor, weights: Tensor
) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    def move_ours() -> Tensor:
        got: Any = ours.buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=NUM_EXPERTS
        )
        return ours.buffer.combine(got.recv_x, got.handle).x

    def move_theirs() -> Tensor:
        return theirs.back(theirs.there(x, ids, weights)[0])

    def kernel_ours() -> Tensor:
        arrived = ours.send(x, ids, weights, NUM_EXPERTS)
        return ours.send_back(arrived.rows.x, arrived, arrived.weights)

    def kernel_theirs() -> Tensor:
        all_x, all_ids, all_weights = theirs.there(x, ids, weights)
        rows = permute(all_x, theirs.expert_map[all_ids], NUM_EXPERTS // RANKS)
        return theirs.back(unpermute(rows.x, rows.row_of, weights=all_weights))

    for one in (kernel_ours, kernel_theirs):
        assert torch.equal(one(), x * NUM_TOPK), one.__name__
    return {"exchange": (move_ours, move_theirs), "for the kernel": (kernel_ours, kernel_theirs)}


def job(group: Any, rounds: int) -> dict[tuple[str, str, str], float]:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank(group)]})
    torch.set_num_threads(1)
    settings = Settings(enabled=True, transport="auto", timeout=30.0)
    ours, theirs = Exchange(group, range(RANKS), RANKS, settings), Gathered(group)
    ours.warm_up(torch.bfloat16)
    figures: dict[tuple[str, str, str], float] = {}
    for name, num_tokens in CASES.items():
        torch.manual_seed(dist.get_rank(group))
        # Small whole numbers: sums of them are the same in any order.
        x = torch.randint(-3, 4, (num_tokens, HIDDEN)).to(torch.bfloat16)
        ids = torch.rand(num_tokens, NUM_EXPERTS).topk(NUM_TOPK).indices
        weights = torch.ones(num_tokens, NUM_TOPK)
        for what, pair in ways(ours, theirs, x, ids, weights).items():
            both = measure(pair, rounds if name == "prefill" else 20 * rounds)
            figures |= {(name, what, "ours"): both[0], (name, what, "gloo"): both[1]}
    ours.buffer.close()
    return figures


def measure(pair: tuple[Callable[[], Tensor], ...], rounds: int) -> list[float]:
    """They take turns. Seconds, the median over rounds of the slowest rank."""
    seconds: list[list[float]] = [[] for _ in pair]
    for _ in range(rounds + 3):
        for work, taken in zip(pair, seconds):
            dist.barrier()
            begin = time.perf_counter()
            work()
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            taken.append(float(took))
    return [statistics.median(taken[3:]) for taken in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    figures = run_processes(job, RANKS, parser.parse_args().rounds, timeout=120)[0]
    print(f"hidden {HIDDEN}, {NUM_EXPERTS} experts, top-{NUM_TOPK}, bfloat16, {RANKS} ranks, ms")
    print(f"{'':10}{'':16}{'ours':>10}{'gloo':>10}{'times':>8}")
    for name, what in dict.fromkeys((name, what) for name, what, _ in figures):
        mine, other = (1e3 * figures[name, what, who] for who in ("ours", "gloo"))
        print(f"{name:10}{what:16}{mine:10.3f}{other:10.3f}{other / mine:8.1f}")


if __name__ == "__main__":
    main()
