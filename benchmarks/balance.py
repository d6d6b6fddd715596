"""A layer of experts under skewed routings, with a balance and without, beside even ones.

    python benchmarks/balance.py --ranks 2 --tokens 16 256 1024
    python benchmarks/balance.py --ranks 4 --count

Every rank has one thread. All ways take turns in every round, since the machine's speed changes; a
figure is the median of rounds. `even` routes the same number of tokens so that all experts get as
many. With --count pairs are counted and nothing is timed: more ranks than cores would share them.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tokenyard
from tokenyard.nn import MoE, RouterConfig, functional
from tokenyard.testing import run_processes

EXPERTS, TOPK, HIDDEN, INTERMEDIATE, SLACK = 64, 8, 1024, 512, 0.05
ROUTINGS = "even", "uniform", "zipf 1.0", "zipf 1.5"


def choose(routing: str, num_tokens: int, rank: int, size: int, seed: int) -> Tensor:
    """[T, K]: as a router would choose. Which experts are hot is the same on all ranks."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    if routing == "even":
        first = rank * num_tokens * TOPK
        return ((first + torch.arange(num_tokens * TOPK)) % EXPERTS).view(num_tokens, TOPK)
    exponent = float(routing.split()[1]) if routing != "uniform" else 0.0
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(seed))
    chances = (order + 1.0) ** -exponent
    return torch.multinomial(chances.expand(num_tokens, -1), TOPK, generator=draw)


def make_layer(buffer: tokenyard.Buffer, dtype: torch.dtype) -> MoE:
    torch.manual_seed(0)
    config = RouterConfig(num_experts=EXPERTS, num_topk=TOPK)
    return MoE(buffer, HIDDEN, INTERMEDIATE, config, dtype=dtype).eval()


@torch.no_grad()
def job(group: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rank, size, dtype = group.rank(), group.size(), getattr(torch, args.dtype)
    with (
        tokenyard.Buffer(group) as plain,
        tokenyard.Buffer(group, balance=SLACK) as balanced,
    ):
        layers = {"plain": make_layer(plain, dtype), "balanced": make_layer(balanced, dtype)}
        return [
            measure(layers, tokens, rank, size, dtype, seed, args)
            for tokens in args.tokens
            for seed in range(args.seeds)
        ]


def measure(
    layers: dict[str, MoE],
    num_tokens: int,
    rank: int,
    size: int,
    dtype: torch.dtype,
    seed: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    x = torch.randn(num_tokens, HIDDEN, dtype=dtype)
    weights = torch.rand(num_tokens, TOPK)
    ids = {name: choose(name, num_tokens, rank, size, seed) for name in ROUTINGS}

    def call(way: str, routing: str) -> None:
        layer = layers[way]
        given = layer.buffer, x, ids[routing], weights, EXPERTS, layer.experts
        functional.through_experts(*given, place=layer._share.place)

    found: dict[str, Any] = {"tokens": num_tokens, "seed": seed}
    balanced = layers["balanced"].buffer
    for routing in ROUTINGS:
        balanced.stats(reset=True)
        call("balanced", routing)
        told = balanced.stats(reset=True)["balance"]
        found[routing] = {"pairs": [told["busiest_before"], told["busiest_after"]]}
    if args.count:
        return found
    each: dict[tuple[str, str], list[float]] = {}
    ways = [(way, routing) for routing in ROUTINGS for way in layers]
    for turn in range(args.rounds + 2):
        for key in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            begin = time.perf_counter()
            call(*key)
            if turn > 1:
                each.setdefault(key, []).append(time.perf_counter() - begin)
    even = each["plain", "even"]
    for routing in ROUTINGS:
        for way in layers:
            pairs = zip(each[way, routing], even)
            found[routing][way] = median(one / other for one, other in pairs)
        pairs = zip(each["balanced", routing], each["plain", routing])
        found[routing]["beside plain"] = median(one / other for one, other in pairs)
    found["ms"] = 1e3 * median(even)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()
    print("tokens  routing   pairs of the busiest / mean   time / even plain   balanced /")
    print("                  by owner     balanced         plain   balanced    plain")
    for found in run_processes(job, args.ranks, args, timeout=3600.0)[0]:
        for routing in ROUTINGS:
            one = found[routing]
            before, after = one["pairs"]
            line = f"{found['tokens']:6}  {routing:8}  {before:8.2f} {after:12.3f}"
            if not args.count:
                line += f" {one['plain']:13.2f} {one['balanced']:10.2f} {one['beside plain']:8.3f}"
            print(line)
        if not args.count:
            print(f"        an evenly routed layer takes {found['ms']:.1f} ms")


if __name__ == "__main__":
    main()
