"""The exchange of the vLLM plugin, against all-gather and all-reduce of every token.

    python benchmarks/vllm_exchange.py     # in an environment of .ci/vllm-env, with its collectives

All-gather and all-reduce is what vLLM's own manager is made of where it is implemented, and what is
proposed for CPUs: every token goes to every rank, and partial sums of all tokens come back. "shm"
does so through vLLM's C++ collectives, where vLLM is installed, "gloo" through torch.distributed.
"exchange" is the way there and back. "for the kernel" adds what all need besides on a CPU: a row
for each (token, local expert), as vLLM's experts kernel wants them, and the sums of those rows; it
is what a layer of the server pays beside its experts.

Two processes with a core each and one thread, as vLLM binds them. The ways take turns in the same
processes; a figure is the median over rounds of the slowest rank. Results are compared first.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.vllm_gathering import GatheringExchange, GlooExchange, ShmExchange
from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.testing import run_processes

HIDDEN, NUM_EXPERTS, NUM_TOPK, RANKS = 2048, 64, 8, 2
# Tokens a rank, and calls of a turn. 32 sequences are 16 on each of two ranks. A barrier lets ranks
# go some 0.3 ms apart, which a turn of one short call would measure.
CASES = {"prefill": (2048, 1), "decode": (16, 40)}
OURS = "tokenyard"


class _SameNumber:
    """Outside of vLLM. All ranks have as many tokens here."""

    def most_tokens(self, mine: int) -> int:
        return mine


class Gloo(_SameNumber, GlooExchange):
    pass


class Shm(_SameNumber, ShmExchange):
    pass


def open_exchanges(group: Any) -> dict[str, Exchange]:
    settings = Settings(enabled=True, transport="auto", timeout=30.0)
    kinds: dict[str, type[Exchange]] = {OURS: Exchange, "gloo": Gloo}
    if find_spec("vllm") is not None:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        kinds["shm"] = Shm
    opened = {name: kind(group, range(RANKS), RANKS, settings) for name, kind in kinds.items()}
    opened[OURS].warm_up(torch.bfloat16)
    return opened


def ways(
    exchange: Exchange, x: Tensor, ids: Tensor, weights: Tensor
) -> dict[str, Callable[[], Tensor]]:
    def move() -> Tensor:
        if isinstance(exchange, GatheringExchange):
            all_x, *_ = exchange.gather_all(x, ids, weights)
            exchange.add_up(all_x)
            return all_x
        got: Any = exchange.buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=NUM_EXPERTS
        )
        return exchange.buffer.combine(got.recv_x, got.handle).x

    # Experts that do nothing say the same every time, and in memory that is not the exchange's.
    arrived = exchange.send(x, ids, weights, NUM_EXPERTS)
    y, out = arrived.x.clone(), torch.empty_like(x)
    exchange.send_back(y, arrived)

    def for_the_kernel() -> Tensor:
        arrived = exchange.send(x, ids, weights, NUM_EXPERTS)
        return exchange.send_back(y, arrived, out=out)

    assert torch.equal(for_the_kernel(), x * NUM_TOPK), type(exchange).__name__
    return {"exchange": move, "for the kernel": for_the_kernel}


def job(group: Any, rounds: int) -> dict[tuple[str, str, str], float]:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank(group)]})
    torch.set_num_threads(1)
    exchanges = open_exchanges(group)
    figures: dict[tuple[str, str, str], float] = {}
    for name, (num_tokens, num_calls) in CASES.items():
        torch.manual_seed(dist.get_rank(group))
        # Small whole numbers: sums of them are the same in any order.
        x = torch.randint(-3, 4, (num_tokens, HIDDEN)).to(torch.bfloat16)
        ids = torch.rand(num_tokens, NUM_EXPERTS).topk(NUM_TOPK).indices
        weights = torch.ones(num_tokens, NUM_TOPK)
        all_ways = {who: ways(one, x, ids, weights) for who, one in exchanges.items()}
        for what in all_ways[OURS]:
            work = {who: one[what] for who, one in all_ways.items()}
            taken = measure(work, rounds, num_calls)
            figures |= {(name, what, who): seconds for who, seconds in taken.items()}
    for one in exchanges.values():
        one.buffer.close()
    return figures


def measure(work: dict[str, Callable[[], Tensor]], rounds: int, num_calls: int) -> dict[str, float]:
    """They take turns. Seconds of a call, the median over rounds of the slowest rank."""
    seconds: dict[str, list[float]] = {who: [] for who in work}
    for _ in range(rounds + 3):
        for who, run in work.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(num_calls):
                run()
            seconds_each = (time.perf_counter() - begin) / num_calls
            took = torch.tensor(seconds_each, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[who].append(float(took))
    return {who: statistics.median(taken[3:]) for who, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    figures = run_processes(job, RANKS, parser.parse_args().rounds, timeout=120)[0]
    others = list(dict.fromkeys(who for _, _, who in figures if who != OURS))
    print(f"hidden {HIDDEN}, {NUM_EXPERTS} experts, top-{NUM_TOPK}, bfloat16, {RANKS} ranks, ms")
    head = "".join(f"{who:>10}{'times':>8}" for who in others)
    print(f"{'':10}{'':16}{OURS:>10}{head}")
    for name, what in dict.fromkeys((name, what) for name, what, _ in figures):
        mine = figures[name, what, OURS]
        line = f"{name:10}{what:16}{1e3 * mine:10.3f}"
        for who in others:
            other = figures[name, what, who]
            line += f"{1e3 * other:10.3f}{other / mine:8.2f}"
        print(line)


if __name__ == "__main__":
    main()
