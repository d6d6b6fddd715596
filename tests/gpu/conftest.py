"""Tests for a machine with GPUs: `pytest tests/gpu`. Skipped where there are too few of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.cases.programs import free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "tests/gpu" not in item.path.as_posix():
            continue
        want = item.callspec.params.get("num_devices", 1) if hasattr(item, "callspec") else 1
        if have < want:
            item.add_marker(pytest.mark.skip(reason=f"needs {want} GPUs, {have} are here"))


def _rank(rank: int, num_ranks: int, port: int, job: Callable[..., None], args: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=num_ranks)
    try:
        job(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def run() -> Callable[..., None]:
    """run(job, num_devices, *args) calls job(group, *args) on as many GPUs, each a process."""

    def start(job: Callable[..., None], num_devices: int, *args: Any) -> None:
        mp.spawn(_rank, (num_devices, free_port(), job, args), nprocs=num_devices)

    return start
