"""Predict this library's own exchanges, then run them: what docs/guide/planning.md compares.

    python -m tools.own_runs                # in a node: 2, 4 and 8 ranks
    python -m tools.own_runs --namespaces   # 2 and 4 nodes of 2 ranks at 1 Gbit/s; needs root

A machine is known by runs that are not among those predicted: the smallest of each kind, with a
quarter and a half of the tokens. The line through them gives what a rank reaches, in a node or
between nodes, and the time of a stage that moves nothing. Ranks that share a core share what it
copies. Predictions are printed before the runs begin.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import tokenyard
from tokenyard.planner.cost import Cluster, Model, Work, plan
from tokenyard.testing import Processes
from tokenyard.testing.cluster import Cluster as Namespaces

MODEL = Model(name="own", hidden=2048, num_experts=64, num_topk=8, intermediate=1024, num_layers=1)
TOKENS = 2048
GBIT = 125e6  # bytes a second
_STAGES = 3  # notify, dispatch, combine


def exchange(
    group: Any, model: Model, num_tokens: int, ranks_per_node: int | None, steps: int
) -> list[float]:
    """Seconds of each dispatch and combine, by this rank's clock."""
    random = torch.Generator().manual_seed(group.rank())
    x = torch.randn(num_tokens, model.hidden, generator=random).bfloat16()
    choice = torch.rand(num_tokens, model.num_experts, generator=random)
    topk_idx = choice.topk(model.num_topk, dim=1).indices
    weights = torch.full((num_tokens, model.num_topk), 1.0 / model.num_topk)
    seconds = []
    with tokenyard.Buffer(group, ranks_per_node=ranks_per_node, timeout=120.0) as buffer:
        for _ in range(3 + steps):
            dist.barrier(group)
            begin = time.perf_counter()
            got: Any = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=weights, num_experts=model.num_experts
            )
            buffer.combine(got.recv_x, got.handle)
            seconds.append(time.perf_counter() - begin)
    return seconds[3:]


def timed(ranks: Processes, job: Callable[..., Any], *args: Any) -> float:
    """The median of calls, each as long as on its slowest rank."""
    by_rank = ranks.run(job, *args)
    return statistics.median(map(max, zip(*by_rank)))


def _seconds(cluster: Cluster, num_ranks: int, num_tokens: int) -> float:
    """As the planner has it."""
    work = Work(num_tokens=num_tokens, fp8=False)
    return plan(cluster, MODEL, num_ranks, work).seconds


# With rates of 1 a plan's seconds are bytes, of all stages.
_UNIT = Cluster(
    name="unit", ranks_per_node=8, node_rate=1.0, network_rate=1.0, overhead=0.0, by_pair=False
)


def line(ranks: Processes, unit: Cluster, most: int, nodes: int | None) -> tuple[float, float]:
    """Bytes a second, and the seconds of a stage that moves nothing: of the line through runs with
    a half and a quarter of the tokens.
    """
    sizes = (most // 4, most // 2)
    rounds = [[timed(ranks, exchange, MODEL, size, nodes, 12) for size in sizes] for _ in range(7)]
    took = list(map(statistics.median, zip(*rounds)))  # what disturbs a round leaves others alone
    moved = [_seconds(unit, ranks.num_ranks, size) for size in sizes]
    rate = (moved[1] - moved[0]) / (took[1] - took[0])
    return rate, max(0.0, took[1] - moved[1] / rate) / _STAGES


def calibrate_node() -> Cluster:
    """Two ranks of this machine."""
    with Processes(2, timeout=300) as ranks:
        rate, overhead = line(ranks, _UNIT, TOKENS, None)
    return replace(_UNIT, name="this", node_rate=rate, overhead=overhead)


def calibrate_network(node: Cluster) -> Cluster:
    """Two nodes of two ranks each."""
    unit = replace(_UNIT, ranks_per_node=2, node_rate=math.inf)
    with Namespaces([2, 2], rate="1gbit", timeout=300) as ranks:
        rate, overhead = line(ranks, unit, TOKENS // 2, 2)
    return replace(node, ranks_per_node=2, network_rate=rate, overhead=overhead)


def crowded(cluster: Cluster, num_ranks: int) -> Cluster:
    """As many ranks on this machine: those that share a core share what it copies."""
    share = min(1.0, (os.cpu_count() or 1) / num_ranks)
    return replace(cluster, node_rate=cluster.node_rate * share)


def show(name: str, guess: float, seconds: float) -> None:
    print(
        f"{name:28} predicted {guess * 1e3:7.1f} ms, took {seconds * 1e3:7.1f} ms: "
        f"{guess / seconds - 1:+6.1%}",
        flush=True,
    )


def run_in_node() -> None:
    node = calibrate_node()
    print(f"copies {node.node_rate / 1e9:.2f} GB/s a rank, {node.overhead * 1e6:.0f} us a stage")
    guesses = {n: _seconds(crowded(node, n), n, TOKENS) for n in (2, 4, 8)}
    for num_ranks, guess in guesses.items():
        print(f"{num_ranks} ranks: {guess * 1e3:.1f} ms are predicted")
    for num_ranks, guess in guesses.items():
        with Processes(num_ranks, timeout=300) as ranks:
            rounds = [timed(ranks, exchange, MODEL, TOKENS, None, 12) for _ in range(5)]
            seconds = statistics.median(rounds)
        show(f"{num_ranks} ranks", guess, seconds)


def run_namespaces() -> None:
    cluster = calibrate_network(calibrate_node())
    of_line = cluster.ranks_per_node * cluster.network_rate / GBIT
    print(f"{of_line:.2f} of the line, {cluster.overhead * 1e6:.0f} us a stage")
    guesses = {n: _seconds(crowded(cluster, 2 * n), 2 * n, TOKENS // 2) for n in (2, 4)}
    for num_nodes, guess in guesses.items():
        print(f"{num_nodes} nodes of 2 ranks: {guess * 1e3:.1f} ms are predicted")
    for num_nodes, guess in guesses.items():
        with Namespaces([2] * num_nodes, rate="1gbit", timeout=300) as ranks:
            seconds = timed(ranks, exchange, MODEL, TOKENS // 2, 2, 20)
        show(f"{num_nodes} nodes of 2 ranks", guess, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--namespaces", action="store_true", help="nodes at 1 Gbit/s; needs root")
    args = parser.parse_args()
    if args.namespaces:
        run_namespaces()
    else:
        run_in_node()


if __name__ == "__main__":
    main()
