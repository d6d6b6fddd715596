"""Shared memory of the low-latency mode: as much as calls need, however they got there."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import slots_of
from tests.cases.processes import Pools
from tests.cases.shared_memory import shared_bytes
from tokenyard.testing import run_virtual

NUM_MAX, STEP, STEPS = 16, 2048, 20


def ascend(group: Any) -> tuple[int, int]:
    """Rows that get longer and longer, there and back, with calls that are never received."""
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        idx, weights = torch.tensor([[0], [1]] * (NUM_MAX // 2)), torch.ones(NUM_MAX, 1)
        for step in range(1, STEPS + 1):
            x = torch.full((NUM_MAX, STEP * step), float(step))
            for turn in range(4):
                got: Any = buffer.low_latency_dispatch(x, idx, NUM_MAX, 2, use_fp8=False)
                y = got.recv_x
                if turn % 2:
                    y = buffer.get_next_low_latency_combine_buffer(got.handle)
                    y.copy_(got.recv_x)
                back = buffer.low_latency_combine(
                    y, idx, weights, got.handle, zero_copy=bool(turn % 2)
                )
                assert torch.equal(back.combined_x, x)
                del got, y, back
                if turn == 2:  # whoever drops the hook skips the call
                    buffer.low_latency_dispatch(
                        x, idx, NUM_MAX, 2, use_fp8=False, return_recv_hook=True
                    )
        return shared_bytes()[1], sum(len(place._held) for place in slots_of(buffer).places)


@pytest.mark.processes
def test_outgrown_memory_comes_back(processes: Pools) -> None:
    row = STEP * STEPS * 4
    block = NUM_MAX * row  # of a dispatch; a combine's is as large, as all rows come back
    ranks = processes(2)
    for mapped, known in ranks.run(ascend):
        # Two blocks each way, of which a combine's may be twice as large, and two results of
        # zero_copy with room for all that could come: of both ranks.
        last = 2 * (2 * block + 2 * 2 * block + 2 * 2 * block)
        assert mapped < 2 * last, f"{mapped} bytes for {last}"
        assert known <= 24


def ahead(group: Any) -> list[float]:
    """Rank 0 calls a third time while rank 1 has read nothing: what rank 1 reads of two calls."""
    with tokenyard.Buffer(
        group, low_latency_mode=True, transport="direct", timeout=scaled(60)
    ) as buffer:
        topk_idx = torch.full((NUM_MAX, 1), 1 - group.rank())
        found: list[float] = []

        def call(number: int, later: bool = False) -> Any:
            x = torch.full((NUM_MAX, STEP), float(number), dtype=torch.bfloat16)
            return buffer.low_latency_dispatch(
                x, topk_idx, NUM_MAX, 2, use_fp8=False, return_recv_hook=later
            )

        for _ in range(4):  # the first that name memory wait until all have mapped it
            call(0)
        if group.rank() == 0:
            for number in (1, 2, 3, 4):
                call(number)
            return found
        calls = [call(1, later=True), call(2, later=True)]
        time.sleep(scaled(0.5))  # nobody tells this rank that the other one waits
        for number in (3, 4):
            first = calls.pop(0)
            first.hook()
            rows = first.recv_x[0, : int(first.recv_count)]
            found += [float(rows.min()), float(rows.max())]
            calls.append(call(number, later=True))
        for one in calls:
            one.hook()
        return found


def test_nobody_writes_over_rows_that_are_not_read() -> None:
    assert run_virtual(ahead, 2).results == [[], [1, 1, 2, 2]]


def descend(group: Any) -> list[int]:
    """One call with long rows, there and back, and many with short ones."""
    told = []
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        idx, weights = torch.tensor([[0], [1]] * (NUM_MAX // 2)), torch.ones(NUM_MAX, 1)
        for hidden, times in ((STEP * STEPS, 2), (STEP, 80)):
            x = torch.ones(NUM_MAX, hidden)
            for _ in range(times):
                got: Any = buffer.low_latency_dispatch(x, idx, NUM_MAX, 2, use_fp8=False)
                back = buffer.low_latency_combine(got.recv_x, idx, weights, got.handle)
                assert torch.equal(back.combined_x, x)
                del got, back
            told.append(shared_bytes()[1])
    return told


@pytest.mark.processes
def test_memory_of_a_large_call_comes_back(processes: Pools) -> None:
    for large, small in processes(2).run(descend):
        assert large > 2 * 4 * NUM_MAX * STEP * STEPS * 4 // 2
        assert small < large // 4, f"{small} of {large} bytes"


def close_before_a_slow_rank(group: Any) -> str:
    """Rank 0 calls its hook when rank 1 has called its own, and closes; a later one is dropped."""
    x, topk_idx = torch.ones(64, 1024, dtype=torch.bfloat16), torch.zeros(64, 1, dtype=torch.int64)
    with tokenyard.Buffer(group, low_latency_mode=True, transport="direct") as buffer:
        dispatch = partial(
            buffer.low_latency_dispatch,
            num_max_dispatch_tokens_per_rank=64,
            num_experts=2,
            use_fp8=False,
            return_recv_hook=True,
        )
        *_, hook = dispatch(x, topk_idx)
        dispatch(x[:3], topk_idx[:3])
        if group.rank() == 0:
            time.sleep(scaled(0.5))
        try:
            hook()
        except tokenyard.PeerError as error:
            return str(error)
    return "received"


@pytest.mark.processes
def test_a_slow_rank_finds_the_memory_of_one_that_closes(processes: Pools) -> None:
    begin = time.monotonic()
    assert processes(2).run(close_before_a_slow_rank) == ["received", "received"]
    assert time.monotonic() - begin < scaled(50)


def close_as_a_call_ends(group: Any) -> str:
    """Rank 0 closes its Buffer while a call on the Buffer's thread waits for rank 1 to read."""
    x, topk_idx = torch.ones(64, 1024, dtype=torch.bfloat16), torch.zeros(64, 1, dtype=torch.int64)
    for _ in range(5):
        with tokenyard.Buffer(group, low_latency_mode=True, transport="direct") as buffer:
            dispatch = partial(buffer.low_latency_dispatch, x, topk_idx, 64, 2, use_fp8=False)
            if group.rank() == 0:
                dispatch(async_finish=True)
                time.sleep(scaled(0.1))  # that call has read what came, and waits
            else:
                *_, hook = dispatch(return_recv_hook=True)
                time.sleep(scaled(0.2))
                hook()
    return "closed"


@pytest.mark.processes
def test_a_buffer_may_be_closed_while_a_call_ends_on_its_thread(processes: Pools) -> None:
    assert processes(2).run(close_as_a_call_ends) == ["closed", "closed"]


def shrink_before_all_have_read(group: Any) -> float:
    """Rank 0 goes on to far smaller calls while rank 1 is yet to read a large block of it."""
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        other = 1 - group.rank()

        def call(rows: int, hidden: int, later: bool) -> Any:
            x = torch.full((rows, hidden), 1.0 + group.rank(), dtype=torch.bfloat16)
            idx = torch.full((rows, 1), other)
            return buffer.low_latency_dispatch(
                x, idx, rows, 2, use_fp8=False, return_recv_hook=later
            )

        large = call(512, 8192, group.rank() == 1)
        small = call(4, 64, True)
        if group.rank() == 1:
            time.sleep(scaled(0.5))
            large.hook()
        call(4, 64, False)
        small.hook()
        return float(large.recv_x[0, :512].float().sum())


@pytest.mark.processes
def test_a_large_block_stays_until_all_have_read_it(processes: Pools) -> None:
    first, second = processes(2).run(shrink_before_all_have_read)
    assert first == 2 * 512 * 8192
    assert second == 512 * 8192


def drop_and_close(group: Any) -> float:
    """Rank 0 drops its hook and closes; rank 1 receives what rank 0 has sent later."""
    x, topk_idx = torch.ones(4, 64), torch.zeros(4, 1, dtype=torch.int64) + 1 - group.rank()
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        if group.rank() == 1:
            time.sleep(scaled(0.5))
        got: Any = buffer.low_latency_dispatch(
            x, topk_idx, 4, 2, use_fp8=False, return_recv_hook=group.rank() == 0
        )
        if group.rank() == 0:
            return 0.0
        return float(got.recv_x[0, :4].sum())


@pytest.mark.processes
def test_a_rank_that_drops_its_hook_waits_before_it_leaves(processes: Pools) -> None:
    assert processes(2).run(drop_and_close) == [0.0, 256.0]
