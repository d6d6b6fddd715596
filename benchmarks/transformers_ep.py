"""Ways of transformers to bring tokens to experts, on one experts module of Qwen3-MoE.

    python benchmarks/transformers_ep.py

Ranks have tokens of their own (tokenyard against "all_to_all"), or all have one batch (tokenyard
against "all_reduce"). Results are compared first. Ways take turns; a figure is the median over
rounds of the slowest rank. Prints milliseconds forward, and forward and backward.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tokenyard.integrations.transformers import TokenyardEP
from tokenyard.testing import run_processes

Batch = tuple[Tensor, Tensor, Tensor]


def make_experts(args: argparse.Namespace, rank: int) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts // args.ranks,
        num_experts_per_tok=args.topk,
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(rank)
    experts = Qwen3MoeExperts(config)
    experts._is_expert_parallel = True
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return experts


def batch_of(args: argparse.Namespace, tokens: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, args.hidden, generator=generator)
    weights, idx = torch.rand(tokens, args.experts, generator=generator).topk(args.topk)
    return x, idx, weights / weights.sum(1, keepdim=True)


def forward(way: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        return way(*batch)


def both(way: Any, batch: Batch) -> Tensor:
    x, idx, weights = batch
    x = x.clone().requires_grad_()
    way(x, idx, weights.clone().requires_grad_()).square().sum().backward()
    assert x.grad is not None
    return x.grad


def rounds(calls: Mapping[str, Callable[[], object]], number: int, repeat: int) -> dict[str, float]:
    """Milliseconds of a call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat + 1):
        for name, call in calls.items():
            call()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(number):
                call()
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item() / number * 1e3)
    return {name: statistics.median(spent[1:]) for name, spent in times.items()}


def job(group: Any, args: argparse.Namespace) -> list[str]:
    rank = group.rank()
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    experts, lines = make_experts(args, rank), []
    for has_one_batch in (False, True):
        theirs = "all_reduce" if has_one_batch else "all_to_all"
        shape = (1, args.ranks) if has_one_batch else (args.ranks, 1)
        ep = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("ep",))
        tp = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))["tp"]
        ways = {theirs: EPImplementationInterface()[theirs], "tokenyard": TokenyardEP}
        run = {name: way(experts, ep, tp) for name, way in ways.items()}
        for tokens in args.tokens:
            batch = batch_of(args, tokens, 0 if has_one_batch else rank)
            line = f"{'one batch of' if has_one_batch else 'each'} {tokens:5}"
            for what, call, atol in (("forward", forward, 1e-4), ("both", both, 1e-3)):
                calls = {name: partial(call, way, batch) for name, way in run.items()}
                results = [one() for one in calls.values()]
                torch.testing.assert_close(*results, rtol=0, atol=atol)
                ms = rounds(calls, 20 if tokens <= 16 else 5, args.repeat)
                line += (
                    f"   {what}: {theirs} {ms[theirs]:8.3f}, tokenyard {ms['tokenyard']:8.3f}, "
                    f"{ms[theirs] / ms['tokenyard']:.2f} times as fast"
                )
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 1024])
    sizes = {"ranks": 2, "hidden": 1024, "intermediate": 64, "experts": 32, "topk": 4, "repeat": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print("\n".join(run_processes(job, args.ranks, args, timeout=900)[0]))


if __name__ == "__main__":
    main()
