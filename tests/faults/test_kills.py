"""A rank killed or stopped at a random point: every survivor is told which, in time."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.peers import kill_once_stopped
from tokenyard.shm.node import SharedNode
from tokenyard.testing import Exited, Processes, routing

pytestmark = [pytest.mark.faults, pytest.mark.processes, pytest.mark.alone]

SOON = scaled(5.0)  # seconds within which survivors must be told


def rounds(group: Any, transport: str, num_buffers: int, timeout: float) -> None:
    x = torch.randn(64, 512)
    topk_idx, weights = routing("uniform", 64, 4, 16, seed=group.rank())
    for _ in range(num_buffers):
        with tokenyard.Buffer(group, timeout=timeout, transport=transport) as buffer:
            for turn in range(3):
                got: Any = buffer.dispatch(
                    x,
                    topk_idx=topk_idx,
                    topk_weights=weights,
                    num_experts=16,
                    async_finish=turn == 1,
                )
                with got.event:
                    pass
                buffer.combine(got.recv_x.sin(), got.handle)
                rows: Any = buffer.dispatch_by_expert(x, topk_idx, weights, num_experts=16)
                buffer.combine_by_expert(rows.x, rows.handle)


def live_until_a_peer_dies(
    group: Any, transport: str, victim: int, delay: float, obituary: str
) -> tuple:
    """Buffers come and go, so the victim may die in any stage of any of them, or between two."""

    def die() -> None:
        Path(obituary).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    rounds(
        group, transport, 1, 20
    )  # kernels are loaded: a rank that is busy importing cannot notice anything
    if group.rank() == victim:
        threading.Timer(delay, die).start()
    try:
        rounds(group, transport, 100_000, 20)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks, time.monotonic(), str(error)
    return ("nothing", (), time.monotonic(), "")


def open_while_a_peer_dies(group: Any, transport: str) -> tuple:
    """Rank 1 dies in the midst of opening, rank 0 notices, and rank 2 comes when 0 has left."""
    share = SharedNode.share

    def stumble(node: SharedNode, *arguments: Any) -> Any:
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(group.rank() * scaled(0.75))
        return share(node, *arguments)

    tokenyard.Buffer(group, timeout=scaled(20), transport=transport).close()
    try:
        with mock.patch.object(SharedNode, "share", stumble):
            tokenyard.Buffer(group, timeout=scaled(20), transport=transport)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks, str(error)
    return ("nothing", (), "")


def test_a_rank_that_comes_late_is_told_why_others_left_while_opening() -> None:
    with Processes(3, timeout=scaled(60)) as ranks:
        early, _, late = ranks.run(open_while_a_peer_dies, "ring", may_die=True)
    assert early[:2] == late[:2] == ("PeerDied", (1,)), (early, late)
    assert "rank 0 has given up" in late[2]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_a_random_point(times: int, tmp_path: Path) -> None:
    chance = random.Random(times)
    waits: list[float] = []
    stages: Counter[str] = Counter()
    left_over = sorted(os.listdir("/dev/shm"))
    for turn in range(times):
        num_ranks, transport = chance.randint(2, 8), ("direct", "ring")[turn % 2]
        victim, delay = chance.randrange(num_ranks), chance.uniform(0.0, 0.5)
        obituary = tmp_path / str(turn)
        with Processes(num_ranks, timeout=scaled(120)) as ranks:
            answers = ranks.run(
                live_until_a_peer_dies, transport, victim, delay, str(obituary), may_die=True
            )
        del ranks  # with the descriptors of its processes
        if turn == 0:
            descriptors = len(os.listdir("/proc/self/fd"))
        died = float(obituary.read_text())
        assert answers.pop(victim) == Exited(-signal.SIGKILL)
        for kind, named, when, text in answers:
            assert (kind, named) == ("PeerDied", (victim,)), f"turn {turn}: {text}"
            waits.append(when - died)
            stages[text.split(":")[0]] += 1
    assert sorted(os.listdir("/dev/shm")) == left_over
    assert len(os.listdir("/proc/self/fd")) == descriptors
    waits.sort()
    print(
        f"{len(waits)} survivors were told after {waits[len(waits) // 2]:.2f} s (median), "
        f"{waits[-1]:.2f} s (longest), in {dict(stages)}"
    )
    assert waits[int(len(waits) * 0.99)] < SOON


def stop_someone(group: Any, transport: str, victim: int, timeout: float) -> tuple:
    buffer = tokenyard.Buffer(group, timeout=timeout, transport=transport)
    x = torch.randn(64, 512)
    topk_idx, weights = routing("uniform", 64, 4, 16, seed=group.rank())
    if group.rank() == victim:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    begin = time.monotonic()
    try:
        while True:
            begin = time.monotonic()
            got: Any = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=16)
            buffer.combine(got.recv_x, got.handle)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks, time.monotonic() - begin, str(error)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_stopped_at_a_random_point(times: int) -> None:
    chance = random.Random(times)
    for turn in range(times):
        num_ranks, transport = chance.randint(2, 5), ("direct", "ring")[turn % 2]
        victim = chance.randrange(num_ranks)
        with Processes(num_ranks, timeout=scaled(120)) as ranks:
            stuck = ranks.processes[victim].pid
            undertaker = threading.Thread(target=kill_once_stopped, args=(stuck, scaled(6.0)))
            undertaker.start()
            answers = ranks.run(stop_someone, transport, victim, scaled(1.0), may_die=True)
            undertaker.join()
        answers.pop(victim)
        for kind, named, seconds, text in answers:
            assert kind == "PeerTimeout", text
            assert victim in named, text
            assert scaled(1.0) <= seconds < scaled(10), text
