"""Rows by expert in one call each way, beside dispatch, permute, unpermute and combine.

    python benchmarks/by_expert.py                        # 2 ranks; 32, 512 and 2048 tokens a rank
    python benchmarks/by_expert.py --tokens 2048 --pin    # each rank bound to a core

Experts that do nothing, so that the exchange alone is measured. `in place`: the experts' output
lies in memory of the Buffer, which other ranks can read; `ordinary`: in memory of torch, as after
grouped_mm; `general`: dispatch and combine without compiled calls, as they were before there were
any. The sums of all ways are compared by bits before they are timed. Prints a line of JSON for each
number of tokens: microseconds of a round, the best of the rounds' means.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard
from tokenyard.testing import Processes

PLAIN = "dispatch, combine"
OLD, OLD_COPIED = "with permute, unpermute", "with permute, unpermute, ordinary"
OLD_GENERAL = "with permute, unpermute, general"
NEW, NEW_COPIED = "by expert, in place", "by expert, ordinary"


def inputs(rank: int, tokens: int, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rank)
    x = torch.randint(-8, 8, (tokens, args.hidden)).to(torch.bfloat16)
    weights, idx = torch.rand(tokens, args.experts).topk(args.topk)
    return x, idx.contiguous(), weights.contiguous()


def without_compiled_calls(group: Any, transport: str) -> tokenyard.Buffer:
    os.environ["TOKENYARD_COMPILED_CALLS"] = "0"
    try:
        return tokenyard.Buffer(group, transport=transport)
    finally:
        del os.environ["TOKENYARD_COMPILED_CALLS"]


def make_ways(
    buffer: tokenyard.Buffer,
    general: tokenyard.Buffer,
    x: Tensor,
    idx: Tensor,
    weights: Tensor,
    num_experts: int,
) -> dict[str, Callable[[], Tensor]]:
    routed: Any = {"topk_idx": idx, "topk_weights": weights, "num_experts": num_experts}
    num_local = len(buffer.get_local_experts(num_experts))
    got: Any = buffer.dispatch_by_expert(x, **routed)
    ordinary = got.x.clone()  # experts that do nothing say the same every time

    def old(buffer: tokenyard.Buffer, in_place: bool) -> Tensor:
        got: Any = buffer.dispatch(x, **routed)
        rows = tokenyard.permute(got.recv_x, got.recv_topk_idx, num_local)
        out = buffer.get_next_combine_buffer(got.handle)
        y = rows.x if in_place else ordinary
        tokenyard.unpermute(y, rows.row_of, weights=got.recv_topk_weights, out=out)
        return buffer.combine(out, got.handle).x

    def new(in_place: bool) -> Tensor:
        got: Any = buffer.dispatch_by_expert(x, **routed)
        return buffer.combine_by_expert(got.x if in_place else ordinary, got.handle)

    def plain() -> Tensor:
        got: Any = buffer.dispatch(x, **routed)
        return buffer.combine(got.recv_x, got.handle).x

    return {
        PLAIN: plain,
        OLD_GENERAL: lambda: old(general, True),
        OLD: lambda: old(buffer, True),
        NEW: lambda: new(True),
        OLD_COPIED: lambda: old(buffer, False),
        NEW_COPIED: lambda: new(False),
    }


def job(group: Any, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of a round of each way: the best of the rounds' means."""
    torch.set_num_threads(1)
    if args.pin:
        os.sched_setaffinity(0, {group.rank() % (os.cpu_count() or 1)})
    with (
        tokenyard.Buffer(group, transport=args.transport) as buffer,
        without_compiled_calls(group, args.transport) as general,
    ):
        ways = make_ways(buffer, general, *inputs(buffer.rank, tokens, args), args.experts)
        wanted = ways[OLD]()
        for name, run in ways.items():
            if name != PLAIN:
                assert torch.equal(run(), wanted), f"{name}: wrong sums"
        steps = 100 if tokens <= 64 else 30 if tokens <= 512 else 10
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(args.rounds):
            for name, run in ways.items():
                run()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    run()
                best[name] = min(best[name], (time.perf_counter() - begin) / steps * 1e6)
        return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 512, 2048])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--pin", action="store_true")
    args = parser.parse_args()
    with Processes(args.ranks, timeout=300) as ranks:
        for tokens in args.tokens:
            us = ranks.run(job, tokens, args)[0]
            ratios = {
                "in place": us[NEW] / us[OLD],
                "in place, of general": us[NEW] / us[OLD_GENERAL],
                "ordinary": us[NEW_COPIED] / us[OLD_COPIED],
            }
            shown = {name: round(value, 1) for name, value in us.items()}
            of_permute = {name: round(value, 2) for name, value in ratios.items()}
            print(json.dumps({"tokens": tokens, "us": shown, "new of old": of_permute}), flush=True)


if __name__ == "__main__":
    main()
