"""Dispatch and combine on GPUs, in the lines of DeepEP's test_intranode.py. Not run by any GPU yet.

    torchrun --nproc-per-node 8 benchmarks/gpu.py [--transport symmetric]

DeepEP runs beside it where it is installed. Results are compared with each other before anything is
timed. Bytes are those of the rows that a rank receives, as in DeepEP's table.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard


def median_us(work: Callable[[], object], repeats: int = 30) -> float:
    """Of the device's time; the L2 cache is emptied before each run."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 5):
        flush.zero_()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times[5:])[repeats // 2]


def buffers(transport: str) -> dict[str, Any]:
    group = dist.group.WORLD
    found: dict[str, Any] = {"tokenyard": tokenyard.Buffer(group, transport=transport)}
    if importlib.util.find_spec("deep_ep"):
        deep_ep = importlib.import_module("deep_ep")
        found["DeepEP"] = deep_ep.Buffer(group, int(2e9), 0)
    return found


def dispatch(buffer: Any, x: Any, topk_idx: Tensor, weights: Tensor, num_experts: int) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--transport", default="auto")
    asked = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(asked.tokens, asked.hidden, device="cuda").bfloat16()
    scores = torch.rand(asked.tokens, asked.experts, device="cuda")
    weights, topk_idx = scores.topk(asked.topk)
    rows = {"BF16": x, "FP8": tokenyard.per_token_cast_to_fp8(x)}
    received: dict[str, Tensor] = {}
    for name, buffer in buffers(asked.transport).items():
        for kind, given in rows.items():
            got = dispatch(buffer, given, topk_idx, weights, asked.experts)
            recv, handle = got[0], got[4]
            values = recv[0] if isinstance(recv, tuple) else recv
            same = received.setdefault(kind, values)
            assert torch.equal(values.view(torch.uint8), same.view(torch.uint8)), f"{name}, {kind}"
            again = [buffer.dispatch, given, handle]
            us = median_us(partial(again[0], again[1], handle=again[2]))
            num_bytes = values.nbytes + (recv[1].nbytes if isinstance(recv, tuple) else 0)
            if rank == 0:
                print(
                    f"[tuning] {name} dispatch ({kind}): {num_bytes / us / 1e3:.2f} GB/s (NVL), "
                    f"avg_t: {us:.2f} us",
                    flush=True,
                )
            if kind == "BF16":
                us = median_us(partial(buffer.combine, recv, handle))
                if rank == 0:
                    print(
                        f"[tuning] {name} combine: {num_bytes / us / 1e3:.2f} GB/s (NVL), "
                        f"avg_t: {us:.2f} us",
                        flush=True,
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
