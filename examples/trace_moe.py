"""Four ranks, one of which is slow: what Buffer.stats and a trace say of it.

    torchrun --nproc-per-node 4 examples/trace_moe.py

Writes trace.json: open it at https://ui.perfetto.dev, or in chrome://tracing.
"""

import time
from typing import Any

import torch

import tokenyard

EXPERTS, TOPK, HIDDEN, TOKENS, STEPS, SLOW = 16, 2, 256, 64, 20, 2


def main() -> None:
    group = tokenyard.local_group()  # of torchrun, or this process alone
    slow = min(SLOW, group.size() - 1)
    with tokenyard.Buffer(group) as buffer:
        torch.manual_seed(buffer.rank)
        step(buffer)  # compiles kernels, where this machine has none
        buffer.stats(reset=True)
        with tokenyard.trace("trace.json"):
            for _ in range(STEPS):
                if buffer.rank == slow:
                    time.sleep(0.05)  # its experts take longer
                step(buffer)
        stats = buffer.stats()
    waited = stats["waited_for"]
    worst = max(waited, key=waited.get, default=buffer.rank)
    link = max(stats["bytes"], key=stats["bytes"].get)
    print(
        f"rank {buffer.rank}: {stats['stages']['dispatch']['rows_sent']} rows sent, mostly by "
        f"{link}; waited {sum(waited.values()):.3f} s, most of it for rank {worst}",
        flush=True,
    )


def step(buffer: tokenyard.Buffer) -> None:
    x = torch.randn(TOKENS, HIDDEN)
    weights, idx = torch.rand(TOKENS, EXPERTS).topk(TOPK)
    got: Any = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS)
    buffer.combine(got.recv_x * 2, got.handle)


if __name__ == "__main__":
    main()
