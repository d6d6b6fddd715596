"""What tokenyard is measured beside: memcpy, the roof, gloo, and other libraries where present."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.tools.bench.case import Way
from tokenyard.tools.bench.roof import roof

MEMCPY, ROOF, GLOO = "memcpy", "roof", "gloo all_to_all"
GATHERED = "gloo all_gather, reduce_scatter"

# The second names are those before torch 2.13.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def memory_ways(num_bytes: int) -> dict[str, Way]:
    """memcpy and the roof for as many bytes, between arrays that were written before."""
    source = torch.ones(max(num_bytes, 64), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {MEMCPY: Way(lambda: target.copy_(source)), ROOF: Way(roof(torch.zeros_like(source)))}


class GlooAllToAll:
    """What one writes without a library: gather, counts and rows by all_to_all_single, and on the
    way back a sum in float32. A token goes once to each rank that needs it.
    """

    def __init__(self, group: Any, x: Tensor, is_token_in_rank: Tensor) -> None:
        self.group, self.x = group, x
        self.tokens = is_token_in_rank.t().nonzero()[:, 1]
        self.sent = is_token_in_rank.sum(0)
        self.received: list[int] = []

    def dispatch(self) -> Tensor:
        received = torch.empty_like(self.sent)
        dist.all_to_all_single(received, self.sent, group=self.group)
        self.received = received.tolist()
        out = self.x.new_empty(sum(self.received), self.x.shape[1])
        rows = self.x.index_select(0, self.tokens)
        dist.all_to_all_single(out, rows, self.received, self.sent.tolist(), group=self.group)
        return out

    def combine(self, y: Tensor) -> Tensor:
        back = y.new_empty(len(self.tokens), y.shape[1])
        dist.all_to_all_single(back, y, self.sent.tolist(), self.received, group=self.group)
        total = torch.zeros(self.x.shape, dtype=torch.float32)
        return total.index_add_(0, self.tokens, back.float()).to(y.dtype)

    def both(self) -> Tensor:
        return self.combine(self.dispatch())


def gathered(group: Any, x: Tensor, idx: Tensor, weights: Tensor) -> Way:
    """Every token to every rank, and sums of all tokens back, over gloo."""
    num_ranks = group.size()
    outs = [x.new_empty(num_ranks * len(x), x.shape[1]) for _ in range(2)]
    others = [one.new_empty(num_ranks * len(one), one.shape[1]) for one in (idx, weights)]
    back = torch.empty_like(x)

    def call() -> None:
        for out, one in zip((outs[0], *others), (x, idx, weights)):
            dist.all_gather(list(out.chunk(num_ranks)), one, group=group)
        reduce_scatter(back, outs[1], group=group)

    return Way(call)


def absent() -> dict[str, str]:
    """Who is not measured by these ranks, which work in CPU memory, and why."""
    reasons = {}
    if not find_spec("mpi4py"):
        reasons["MPI"] = "mpi4py is not installed"
    else:
        reasons["MPI"] = "wants ranks that mpirun starts: mpirun -n 2 python benchmarks/mpi.py"
    if not find_spec("vllm"):
        reasons["vLLM's collectives"] = "vllm is not installed"
    on_gpus = "on GPUs: torchrun --nproc-per-node 8 benchmarks/gpu.py"
    gpu = torch.accelerator.current_accelerator(check_available=True)
    has_gpu = gpu is not None and gpu.type == "cuda"
    reasons["NCCL"] = on_gpus if has_gpu else "there is no GPU"
    if not find_spec("deep_ep"):
        reasons["DeepEP"] = "deep_ep is not installed"
    else:
        reasons["DeepEP"] = on_gpus if has_gpu else "there is no GPU"
    return reasons


def vllm_collectives(group: Any, x: Tensor, idx: Tensor, weights: Tensor) -> dict[str, Way]:
    """All-gather and all-reduce by vLLM's C++ in shared memory; nothing where vLLM is missing."""
    if not find_spec("vllm"):
        return {}
    import uuid

    from vllm.platforms import current_platform

    current_platform.import_kernels()
    ops, rank, num_ranks = torch.ops._C, group.rank(), group.size()
    number = torch.tensor(uuid.uuid4().int >> 66)
    dist.broadcast(number, group=group, group_src=0)
    name = f"tokenyard-bench-{number.item()}"
    manager = ops.init_shm_manager(name, num_ranks, rank, torch.get_num_threads())
    dist.barrier(group)
    ops.join_shm_manager(manager, name)
    dist.barrier(group)
    routing = torch.cat([idx.int().view(torch.float32), weights], 1)
    all_x = x.new_empty(num_ranks * len(x), x.shape[1])
    all_routing = routing.new_empty(num_ranks * len(x), routing.shape[1])
    sums = torch.zeros_like(all_x)

    def call() -> None:
        ops.shm_all_gather(manager, x, all_x)
        ops.shm_all_gather(manager, routing, all_routing)
        ops.shm_allreduce(manager, sums)

    return {"vLLM all_gather, all_reduce": Way(call)}
