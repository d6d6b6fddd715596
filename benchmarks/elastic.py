"""DeepEP V2's expanded dispatch and combine beside the library's own rows by expert.

    python benchmarks/elastic.py                   # 2 ranks; 32, 512 and 2048 tokens a rank
    python benchmarks/elastic.py --tokens 2048

Both bring rows by expert and sum them back unweighted, with experts that do nothing. `in place`:
the experts' output lies in memory of the buffer, which other ranks can read; `ordinary`: in memory
of torch. V2 also brings the rows' weights, and adds in another order. Ways take turns. Prints a
line of JSON for each number of tokens: microseconds of a round, the median of the rounds' means,
and the median of the rounds' ratios.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard
from tokenyard.testing import Processes

PLACES = ("in place", "ordinary")


def inputs(rank: int, tokens: int, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rank)
    x = torch.randint(-8, 8, (tokens, args.hidden)).to(torch.bfloat16)
    weights, idx = torch.rand(tokens, args.experts).topk(args.topk)
    return x, idx.contiguous(), weights.contiguous()


def make_ways(
    buffer: tokenyard.Buffer,
    elastic: tokenyard.ElasticBuffer,
    given: tuple[Tensor, Tensor, Tensor],
    num_experts: int,
) -> dict[str, Callable[[], Tensor]]:
    first: Any = buffer.dispatch_by_expert(*given, num_experts=num_experts)
    ordinary = first.x.clone()  # experts that do nothing say the same every time

    def own(in_place: bool) -> Tensor:
        got: Any = buffer.dispatch_by_expert(*given, num_experts=num_experts)
        return buffer.combine_by_expert(got.x if in_place else ordinary, got.handle, weigh=False)

    def v2(in_place: bool) -> Tensor:
        got: Any = elastic.dispatch(*given, num_experts=num_experts, do_expand=True)
        return elastic.combine(got.recv_x if in_place else ordinary, got.handle).combined_x

    ways: dict[str, Callable[[], Tensor]] = {}
    for place in PLACES:
        in_place = place == PLACES[0]
        ways[f"by expert, {place}"] = partial(own, in_place)
        ways[f"V2, {place}"] = partial(v2, in_place)
    return ways


def job(group: Any, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    with (
        tokenyard.Buffer(group) as buffer,
        tokenyard.ElasticBuffer(group, num_max_tokens_per_rank=tokens) as elastic,
    ):
        ways = make_ways(buffer, elastic, inputs(buffer.rank, tokens, args), args.experts)
        wanted = next(iter(ways.values()))()
        for name, run in ways.items():
            assert torch.equal(run(), wanted), f"{name}: wrong sums"
        steps = 100 if tokens <= 64 else 30 if tokens <= 512 else 5
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.rounds):
            for name in list(ways) if turn % 2 else reversed(list(ways)):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    ways[name]()
                taken[name].append((time.perf_counter() - begin) / steps * 1e6)
        result = {name: median(each) for name, each in taken.items()}
        for place in PLACES:
            pairs = zip(taken[f"V2, {place}"], taken[f"by expert, {place}"], strict=True)
            result[f"ratio, {place}"] = median(v2 / own for v2, own in pairs)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512, 2048])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    with Processes(args.ranks, timeout=300) as processes:
        for tokens in args.tokens:
            got = processes.run(job, tokens, args)
            shown = {name: round(max(one[name] for one in got), 3) for name in got[0]}
            print(json.dumps({"tokens": tokens, "ranks": args.ranks} | shown), flush=True)


if __name__ == "__main__":
    main()
