"""The MoE block of a transformers model on ranks of one machine, against transformers' dispatch.

    python benchmarks/transformers_moe.py

Both run the same Qwen3-MoE block (router and experts) in float32 on each rank's own tokens; theirs
is `EpDispatchExpertsParallel` over gloo, ours `expert_parallel`. "exchange" is the way there and
back with experts that do nothing: a row for every token and expert it chose, and their weighted
sums. All ranks work at once; they take turns, and a figure is the median over rounds of the slowest
rank. Outputs and gradients are compared first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard
from transformers.distributed.parallel_utils import _WaitTensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

from tokenyard.integrations.transformers import expert_parallel
from tokenyard.nn import functional
from tokenyard.testing import run_processes


def make_block(config: Any) -> nn.Module:
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=config.hidden_size**-0.5)
    return block


def by_transformers(block: Any, mesh: DeviceMesh) -> EpDispatchExpertsParallel:
    shard = MoEParamShard(Shard(0), shards_expert_dim=True)
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    for key, parameter in list(block.experts.named_parameters()):
        own = parameter.detach().chunk(num_ranks)[rank].clone()
        shard.shard_param(block.experts, key, mesh)
        sliced = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        setattr(block.experts, key, nn.Parameter(sliced))
    style = EpDispatchExpertsParallel()
    style.install_forward(block.experts, mesh)
    return style


def step(block: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients, forward and backward."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    out = block(x)
    out.backward(x.detach())
    grads = [one.grad for one in block.parameters()]
    local = [one.to_local() if isinstance(one, DTensor) else one for one in grads]
    return [out.detach(), x.grad, *local]


def rounds(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """The slowest rank's time in each round; calls take turns, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat + 1):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item())
    return {name: spent[1:] for name, spent in times.items()}


def job(group: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    config = Qwen3MoeConfig(
        hidden_size=args.hidden,
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        moe_intermediate_size=args.intermediate,
        num_attention_heads=16,
        num_key_value_heads=16,
        experts_implementation="grouped_mm",
    )
    mesh = DeviceMesh.from_group(group, "cpu")
    theirs = make_block(config)
    ours: Any = expert_parallel(make_block(config), group)
    style = by_transformers(theirs, mesh)
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(1, args.tokens, args.hidden, generator=generator)
    for got, want in zip(step(ours, x), step(theirs, x)):
        assert (got - want).norm() <= 1e-5 * want.norm(), "results differ"

    x_TD = x[0]
    _, weights, topk_idx = (one.detach() for one in ours.gate(x_TD))
    buffer, num_local = ours.tokenyard_buffer, args.experts // group.size()

    def exchange_of_theirs() -> Tensor:
        rows, _, order, sent, received = style._dispatch_tokens(
            x_TD, topk_idx, num_local, group, group.size()
        )
        rows = _WaitTensor.apply(rows)
        return style._combine_tokens(rows, weights, order, sent, received, group)

    def exchange_of_ours() -> Tensor:
        rows = functional.dispatch(buffer, x_TD, topk_idx, weights, args.experts)
        grouped = functional.permute(rows.x, rows.topk_idx, num_local)
        y = functional.unpermute(grouped.x, grouped.row_of, rows.topk_weights)
        return functional.combine(buffer, y, rows.ticket, args.tokens)

    torch.testing.assert_close(exchange_of_ours(), exchange_of_theirs())

    def forward(block: Any) -> None:
        with torch.no_grad():
            block(x)

    return rounds(
        {
            "exchange, transformers": exchange_of_theirs,
            "exchange, tokenyard": exchange_of_ours,
            "forward, transformers": lambda: forward(theirs),
            "forward, tokenyard": lambda: forward(ours),
            "forward and backward, transformers": lambda: step(theirs, x),
            "forward and backward, tokenyard": lambda: step(ours, x),
        },
        args.repeat,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "ranks": 2,
        "tokens": 2048,
        "hidden": 2048,
        "experts": 64,
        "topk": 8,
        "intermediate": 128,
        "repeat": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    times = run_processes(job, args.ranks, args, timeout=300)[0]
    print(f"{args.tokens} tokens a rank, {args.ranks} ranks; the results are the same")
    for what in ("exchange", "forward", "forward and backward"):
        theirs, ours = times[f"{what}, transformers"], times[f"{what}, tokenyard"]
        medians = statistics.median(theirs), statistics.median(ours)
        ratio = statistics.median(a / b for a, b in zip(theirs, ours))
        print(
            f"{what:>22}: transformers {medians[0] * 1e3:7.1f} ms, "
            f"tokenyard {medians[1] * 1e3:7.1f} ms, {ratio:.1f} times faster"
        )


if __name__ == "__main__":
    main()
