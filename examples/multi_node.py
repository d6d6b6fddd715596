"""Experts on several machines: a token crosses the network once per machine that needs it.

On two machines, the first of which the other reaches as `first` through its interface eth0:

    export GLOO_SOCKET_IFNAME=eth0
    torchrun --nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr first examples/multi_node.py
    torchrun --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr first examples/multi_node.py

The first line on the first machine, the second on the other. On one machine, two nodes of two ranks
that are only virtual, since they share its memory:

    torchrun --nproc-per-node 4 examples/multi_node.py --ranks-per-node 2
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import tokenyard

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 16, 8, 1024, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks-per-node", type=int, default=int(os.environ["LOCAL_WORLD_SIZE"]))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
    topk_weights, topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(NUM_TOPK)

    # Without ranks_per_node the Buffer finds out which ranks share a machine's memory.
    with tokenyard.Buffer(dist.group.WORLD, ranks_per_node=args.ranks_per_node) as buffer:
        layout = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        for _ in range(2):  # the first time kernels are loaded, and memory is found
            start = time.perf_counter()
            got: Any = buffer.dispatch(
                x, topk_idx=topk_idx, topk_weights=topk_weights, num_experts=NUM_EXPERTS
            )
            y = (got.recv_x.float() * got.recv_topk_weights.sum(1, keepdim=True)).to(x.dtype)
            combined = buffer.combine(y, got.handle)
            spent = time.perf_counter() - start
        want = x.float() * topk_weights.sum(1, keepdim=True)
        error = ((combined.x.float() - want).abs() / want.abs().clamp(1)).max().item()
        assert error < 0.05, error  # rows, nodes' sums and the sum are rounded to bfloat16
        nodes = layout.num_tokens_per_rdma_rank
        per_node = "all on one node" if nodes is None else f"tokens by node {nodes.tolist()}"
        print(f"rank {rank}: {buffer}")
        print(f"rank {rank}: {per_node}, {int((topk_idx >= 0).sum())} (token, expert) pairs")
        print(f"rank {rank}: there and back in {spent * 1e3:.1f} ms, error {error:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
