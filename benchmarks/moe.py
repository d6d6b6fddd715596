"""A step of the MoE layer, forward and backward, against gathering all tokens on all ranks.

    python benchmarks/moe.py --ranks 4 --tokens 512

Gathering is the usual way on CPUs: every rank gets every token by all_gather, runs its own experts,
and reduce_scatter adds up; the way back is the same reversed, here over gloo. Router, experts and
everything inside a rank are the same code. Outputs and gradients are compared first. A figure is
the median over rounds of the slowest rank; both ways take turns in each round.
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
from tokenyard.nn import MoE, RouterConfig, functional
from tokenyard.testing import run_processes

# The second names are those before torch 2.13.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Gather(torch.autograd.Function):
    """All ranks' rows; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
        all_gather(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(), grad.shape[1])
        reduce_scatter(out, grad.contiguous())
        return out


class Scatter(torch.autograd.Function):
    """The sum of all ranks' rows, of which each keeps its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Gather.backward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Gather.forward(ctx, grad)


def gathering(layer: MoE, x: Tensor) -> Tensor:
    chosen = layer.router(x)
    topk_idx = Gather.apply(chosen.topk_idx)
    weights, rows = Gather.apply(chosen.topk_weights), Gather.apply(x)
    local = torch.full((layer.num_experts,), -1)
    local[layer.experts.ids] = torch.arange(len(layer.experts.ids))
    grouped = functional.permute(rows, local[topk_idx], len(layer.experts.ids))
    y = layer.experts(grouped.x, grouped.offsets)
    return Scatter.apply(functional.unpermute(y, grouped.row_of, weights))


def step(run: Callable[[Tensor], Tensor], layer: MoE, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    out = run(x)
    out.backward(x.detach())
    return [out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def job(group: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=args.experts, num_topk=args.topk)
    with tokenyard.Buffer(group) as buffer:
        layer = MoE(buffer, args.hidden, args.intermediate, router)
        x = torch.randn(group.size(), args.tokens, args.hidden)[group.rank()]
        calls: dict[str, Callable[[Tensor], Tensor]]
        calls = {"tokenyard": layer, "gathering": lambda x: gathering(layer, x)}
        for got, want in zip(*(step(call, layer, x) for call in calls.values())):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.repeat):
            for name, call in calls.items():
                dist.barrier()
                start = time.perf_counter()
                step(call, layer, x)
                spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                times[name].append(spent.item() * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    times = run_processes(job, args.ranks, args, timeout=300)[0]
    print("| | ms | gathering takes |\n|---|---|---|")
    for name, took in times.items():
        low, middle, high = statistics.quantiles(took, n=4)
        ratio = statistics.median(slow / one for slow, one in zip(times["gathering"], took))
        print(f"| {name} | {middle:.0f} ± {(high - low) / 2:.0f} | {ratio:.2f} times as long |")


if __name__ == "__main__":
    main()
