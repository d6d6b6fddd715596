"""Buffers of one group, and the user's own collectives, at the same time: nobody gets another's
rows.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.buffers_at_once import TURNS, dispatch, two_buffers
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.testing import run_virtual


def beside_a_collective(group: Any) -> str:
    """As many bytes as the Buffer's rows have: gloo cannot tell them apart, and others abort."""
    with tokenyard.Buffer(group, transport="collective", timeout=scaled(60)) as buffer:
        for turn in range(TURNS):
            one = dispatch(buffer, float(turn), is_async=True)
            mine = torch.full((64, 256 * 4 + 20), 7, dtype=torch.uint8)
            theirs = torch.zeros_like(mine)
            dist.all_to_all_single(theirs, mine, group=group)
            one.event.current_stream_wait()
            if not ((one.recv_x == turn).all() and (theirs == 7).all()):
                return f"rows went astray in turn {turn}"
    return "ok"


@pytest.mark.processes
@pytest.mark.parametrize(
    "job, args", [(two_buffers, ("collective",)), (beside_a_collective, ())], ids=["two", "user's"]
)
def test_rows_of_each_have_their_own_connections(
    job: Any, args: tuple[str, ...], processes: Pools
) -> None:
    assert processes(2).run(job, *args, may_die=True) == ["ok", "ok"]


def test_virtual_ranks_have_their_own_too() -> None:
    assert run_virtual(two_buffers, 3, "auto").results == ["ok"] * 3


def descriptors(group: Any) -> int:
    """More than before, after Buffers came and went."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    counts: list[int] = []
    for _ in range(6):
        with tokenyard.Buffer(group, transport="collective", timeout=scaled(60)) as buffer:
            dispatch(buffer, 1.0, is_async=True).event.current_stream_wait()
        dist.barrier(group)
        deadline = time.monotonic() + scaled(30)
        while counts and open_files() > counts[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(open_files())
    return counts[-1] - counts[0]


@pytest.mark.processes
def test_connections_are_closed_with_their_buffer(processes: Pools) -> None:
    assert processes(2).run(descriptors) == [0, 0]
