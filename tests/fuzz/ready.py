"""What a process does before its first program: groups, connections, compiled kernels."""

from __future__ import annotations

import gc
import os
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from tests.cases import exchange as exchange_case
from tests.cases import low_latency as low_latency_case
from tests.cases.exchange import FP8
from tokenyard.transports import available

# Made once a process, since all processes must make them together.
GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def get_ready(world: Any) -> None:
    """Make every group that programs may use, connect its ranks, and load kernels."""
    for size in range(2, world.size() + 1):
        for members in combinations(range(world.size()), size):
            group = dist.new_group(list(members))
            if world.rank() in members:
                GROUPS[members] = group
                mine = torch.zeros(size)
                dist.all_to_all_single(torch.zeros(size), mine, group=group)
                dist.all_reduce(mine, group=group)
    for transport in available():  # kernels are compiled, or loaded, for every dtype
        some = {"num_ranks": world.size(), "transport": transport, "ranks_per_node": 1}
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, FP8):
            exchange_case.job(world, exchange_case.Case(dtype=dtype, num_biases=1, **some))
            if dtype != FP8:
                low_latency_case.job(world, low_latency_case.Case(dtype=dtype, rounds=1, **some))
        for fp8 in ((True, False, False), (True, True, True)):
            more = {"hidden": 512, "sum_dtype": torch.bfloat16, "rounds": 1, **some}
            low_latency_case.job(world, low_latency_case.Case(fp8=fp8, **more))
    os.environ["TOKENYARD_PROGRESS"] = "0"  # who speaks of compiling keeps a socket from then on
    gc.collect()
    gc.freeze()  # `leaks` collects after each program, and need not look at torch and numba
