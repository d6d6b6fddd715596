"""A rank that runs out of descriptors or memory says so, and nobody else is blamed."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tokenyard.kernels.numba.signals import await_all
from tokenyard.testing import Processes

pytestmark = [pytest.mark.faults, pytest.mark.processes]

CGROUP = Path("/sys/fs/cgroup/memory/tokenyard-test")  # v1, as on the machines that run CI


def say(error: BaseException, start: float) -> str:
    when = "soon" if time.monotonic() - start < scaled(20) else "late"
    return f"{type(error).__name__}: {error} ({when})"


def out_of_descriptors(group: Any, room: int) -> list[str]:
    out, held = [], []
    buffer = tokenyard.Buffer(group, timeout=scaled(60))

    def go(num_tokens: int) -> Any:
        return buffer.dispatch(
            torch.ones(num_tokens, 1024),
            topk_idx=torch.arange(num_tokens)[:, None] % 2,
            topk_weights=torch.ones(num_tokens, 1),
            num_experts=2,
        )

    assert await_all.signatures, "a rank without descriptors could not wait"
    go(4)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gaps: list[int] = []  # numbers below the highest that were free
    if group.rank() == 1:
        used = max(map(int, os.listdir("/proc/self/fd")))
        while (free := os.open(os.devnull, os.O_RDONLY)) < used:
            gaps.append(free)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, limits[1]))
    for turn in range(3):
        start = time.monotonic()
        try:
            held.append(go(1000 * (turn + 1)))
            out.append("ok")
        except (tokenyard.TokenyardError, ValueError) as error:
            out.append(say(error, start))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    buffer.close()
    for one in gaps:
        os.close(one)
    return out


@pytest.mark.parametrize("room", [1, 2, 3])
def test_no_descriptor_is_left(room: int) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        other, mine = ranks.run(out_of_descriptors, room)
    first, theirs = (
        next((text for text in answer if text != "ok"), "") for answer in (mine, other)
    )
    assert first.startswith("SharedMemoryError: ")
    assert "ulimit -n" in first
    assert "rank 1" in theirs
    assert "rank 0 " not in first + theirs.replace("on rank 0", "")
    assert theirs.startswith(("SharedMemoryError: ", "PeerLeft: "))
    assert "(soon)" in theirs
    assert "PeerDied" not in str(mine + other)
    assert "PeerTimeout" not in str(mine + other)


def in_a_small_cgroup(group: Any, transport: str, num_worst: int) -> list[Any]:
    out: list[Any] = []
    buffer = tokenyard.Buffer(group, transport=transport, timeout=scaled(60))

    def go(num_tokens: int, worst: int = 0) -> Any:
        got: Any = buffer.dispatch(
            torch.ones(num_tokens, 4096),
            topk_idx=torch.ones(num_tokens, 1, dtype=torch.int64),
            topk_weights=torch.ones(num_tokens, 1),
            num_experts=2,
            num_worst_tokens=worst,
        )
        return tuple(got.recv_x.shape)

    go(4)
    if group.rank() == 1:
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    large = 4 if num_worst else 40_000  # 640 MB
    for num_tokens in (large if group.rank() == 0 else 0, 4):
        start = time.monotonic()
        try:
            out.append(go(num_tokens, num_worst if num_tokens == large else 0))
        except (tokenyard.TokenyardError, ValueError) as error:
            out.append(say(error, start))
    buffer.close()
    return out


@pytest.mark.skipif(not os.access(CGROUP.parent, os.W_OK), reason="needs root and cgroup v1")
@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_no_memory_for_a_result(transport: str) -> None:
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.limit_in_bytes").write_text("450M")
    try:
        with Processes(2, timeout=scaled(120)) as ranks:
            answers = ranks.run(in_a_small_cgroup, transport, 0, may_die=True)
    finally:
        time.sleep(scaled(0.2))
        CGROUP.rmdir()
    other, mine = answers
    assert isinstance(mine, list), mine
    assert mine[0].startswith("SharedMemoryError: ")
    assert "bytes" in mine[0]
    assert other[0].startswith("SharedMemoryError: ")
    assert "rank 1 could not get" in other[0]
    assert other[1] == (0, 4096)  # the Buffer goes on
    assert mine[1] == (8, 4096)


def absurd_worst(group: Any, transport: str) -> list[str]:
    out = []
    with tokenyard.Buffer(group, transport=transport, timeout=scaled(60)) as buffer:
        for worst in ((2**31 - 1) * (group.rank() == 1), 0):
            start = time.monotonic()
            try:
                buffer.dispatch(
                    torch.ones(4, 4096),
                    topk_idx=torch.arange(4)[:, None] % 2,
                    topk_weights=torch.ones(4, 1),
                    num_experts=2,
                    num_worst_tokens=worst,
                )
                out.append("ok")
            except (tokenyard.TokenyardError, ValueError) as error:
                out.append(say(error, start))
    return out


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_an_absurd_num_worst_tokens_is_an_error(transport: str) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        other, mine = ranks.run(absurd_worst, transport)
    assert re.match(r"SharedMemoryError: .*\d{14} bytes of (shared )?memory are needed", mine[0])
    assert "rank 1 could not get" in other[0]
    assert mine[1] == other[1] == "ok"


def address_space(group: Any, transport: str) -> list[Any]:
    out: list[Any] = []
    buffer = tokenyard.Buffer(group, transport=transport, timeout=scaled(60))

    def go(num_tokens: int) -> float:
        got: Any = buffer.dispatch(
            torch.ones(num_tokens, 4096),
            topk_idx=torch.tensor([[0, 1]] * num_tokens),
            topk_weights=torch.ones(num_tokens, 2),
            num_experts=2,
        )
        return buffer.combine(got.recv_x, got.handle).x[0, 0].item()

    go(50)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if group.rank() == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), limits[1]))
    for num_tokens in (4000 if group.rank() == 0 else 1, 1):
        start = time.monotonic()
        try:
            out.append(go(num_tokens))
        except (tokenyard.TokenyardError, ValueError, MemoryError) as error:
            out.append(say(error, start))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    buffer.close()
    return out


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_no_address_space_for_a_result(transport: str) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        answers = ranks.run(address_space, transport, may_die=True)
    other, mine = answers
    assert isinstance(mine, list), mine
    assert mine[0].startswith("SharedMemoryError: ")
    assert other[0].startswith(("SharedMemoryError: ", "PeerLeft: "))
    assert "rank 1" in other[0]
    assert "(soon)" in other[0]
