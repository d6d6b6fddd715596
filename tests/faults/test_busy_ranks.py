"""A rank that compiles kernels is waited for, however short the time limit is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.package import cold
from tests.cases.processes import Pools
from tests.cases.programs import launched
from tokenyard.runtime.busy import busy


class Silent:
    def beat(self, seconds: float) -> None: ...

    def end(self, seconds: float) -> None: ...


def be_busy(group: Any, transport: str, limit: float, low_latency: bool) -> float:
    """Rank 0 is busy for three time limits before its call. How long the call took."""
    nodes: Any = {"ranks_per_node": 1} if transport == "hierarchical" else {}
    x, idx, weights = torch.ones(4, 8), torch.arange(8).view(4, 2) % 4, torch.ones(4, 2)
    with tokenyard.Buffer(
        group, transport=transport, timeout=limit, low_latency_mode=low_latency, **nodes
    ) as buffer:
        begin = time.monotonic()
        if group.rank() == 0:
            with busy(Silent()):
                time.sleep(3 * limit)
        if low_latency:
            buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
        else:
            got: Any = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=4)
            assert buffer.combine(got.recv_x, got.handle).x.shape == x.shape
        return time.monotonic() - begin


@pytest.mark.processes
@pytest.mark.parametrize(
    "transport, low_latency",
    [
        ("direct", False),
        ("collective", False),
        pytest.param("hierarchical", False, marks=pytest.mark.slow),
        ("direct", True),
        pytest.param("ring", False, marks=pytest.mark.slow),
        pytest.param("collective", True, marks=pytest.mark.slow),
    ],
)
def test_a_busy_rank_is_waited_for(processes: Pools, transport: str, low_latency: bool) -> None:
    limit = scaled(1.5)
    for seconds in processes(2).run(be_busy, transport, limit, low_latency):
        assert seconds > 2 * limit


COLD = """
import torch, torch.distributed as dist, tokenyard
dist.init_process_group("gloo")
x, (weights, idx) = torch.randn(4, 8), torch.rand(4, 16).topk(2)
with tokenyard.Buffer(dist.group.WORLD, timeout=5) as buffer:
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=16)
    buffer.combine(got.recv_x, got.handle)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_cold_rank_beside_a_warm_one(tmp_path: Path) -> None:
    """The second finds what the tests have compiled, or compiles too."""
    ranks = []
    for launch, folder in zip(launched(2), [cold(tmp_path), {}], strict=True):
        ranks.append(
            subprocess.Popen(
                # A launcher of its own: of one launcher's children, one speaks.
                ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, COLD],
                env=os.environ | launch | folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [rank.communicate(timeout=scaled(200)) for rank in ranks]
    assert [out for out, _ in said] == ["done\n"] * 2, said
    first, *more = [line for line in said[0][1].splitlines() if "compiling" in line]
    assert re.fullmatch(
        r"tokenyard: compiling [\w.]+, \d+ of \d+ functions, once for this machine", first
    )
    for line in more:
        assert re.fullmatch(
            r"tokenyard: compiling [\w.]+, \d+ of \d+ functions, \d+ s so far", line
        )
