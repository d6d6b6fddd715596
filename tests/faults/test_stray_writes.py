"""Rows never land in memory that has another owner by now."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import send_instead
from tokenyard.shm import attached
from tokenyard.testing import Processes
from tokenyard.wire import message as say

pytestmark = [pytest.mark.faults, pytest.mark.processes]


def wake_up_late(group: Any) -> Any:
    """Rank 1 stalls between agreement and mapping rank 0's memory. Rank 0 gives up, and opens a
    Buffer with rank 2 whose memory may get the same descriptor.
    """
    me = group.rank()
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 2])
    topk_idx = torch.zeros(512, 1, dtype=torch.int64)  # all to the first rank

    def go(buffer: tokenyard.Buffer, value: float) -> Any:
        return buffer.dispatch(
            torch.full((512, 256), value),
            topk_idx=topk_idx,
            topk_weights=torch.ones(512, 1),
            num_experts=2,
        )

    said = ""
    if me in (0, 1):
        with tokenyard.Buffer(pair) as buffer:
            go(buffer, 0.0)  # compiles the kernels
        buffer = tokenyard.Buffer(pair, timeout=scaled(1))
        if me == 1:
            attach = attached.attach

            def slow(*args: Any) -> Any:
                time.sleep(scaled(2.5))
                return attach(*args)

            attached.attach = slow  # type: ignore[assignment]
        try:
            go(buffer, 1.0 + me)
        except tokenyard.PeerError as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            if me == 1:
                attached.attach = attach
        buffer.close()
    if me in (0, 2):
        with tokenyard.Buffer(other, timeout=scaled(60)) as buffer:
            got = go(buffer, 100.0 + me)
            before = got.recv_x.clone()
            time.sleep(scaled(3))
            return said, torch.equal(got.recv_x, before), sorted(before[:, 0].unique().tolist())
    return said


@pytest.mark.alone
def test_a_late_rank_does_not_write_into_another_buffer() -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        gave_up, late, other = ranks.run(wake_up_late)
    assert gave_up[0].startswith("PeerTimeout: ")
    assert gave_up[1:] == (True, [100.0, 102.0])
    assert other[1:] == (True, [])
    assert late.startswith(("PeerLeft: ", "PeerTimeout: "))


def dropped_results(group: Any, transport: str) -> int:
    """Results of asynchronous calls die before their rows have arrived, and memory is asked for."""
    me, bad = group.rank(), 0
    nodes = 2 if transport == "hierarchical" else None
    with tokenyard.Buffer(
        group, transport=transport, timeout=scaled(60), ranks_per_node=nodes
    ) as buffer:
        topk_idx = torch.arange(1000)[:, None] % 2
        x = torch.full((1000, 1024), 1.0 + me)
        handle = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=torch.ones(1000, 1), num_experts=2
        ).handle
        for turn in range(10):
            event = buffer.dispatch(x, handle=handle, async_finish=True).event
            mine = buffer.get_next_combine_buffer(handle)
            mine.fill_(100.0)
            if me == turn % 2:
                time.sleep(0.01)
            event.current_stream_wait()
            bad += int((mine != 100.0).any())
            del mine
    return bad


@pytest.mark.parametrize("transport", ["direct", "ring", "hierarchical"])
def test_memory_of_a_dropped_result_is_not_given_out_before_its_rows_are_there(
    transport: str,
) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        assert ranks.run(dropped_results, transport) == [0, 0]


ROUTED: Any = {"topk_idx": torch.tensor([[0, 1]] * 5), "topk_weights": torch.ones(5, 2)}
OFFERS = {
    "a place outside its memory": ("combine", {say.SEGMENTS + say.SEGMENT_BEGIN: 1 << 44}),
    "a place before its memory": ("combine", {say.SEGMENTS + say.SEGMENT_BEGIN: -8}),
    "more memory than it has": ("dispatch", {say.SEGMENTS + say.SEGMENT_SIZE: 1 << 44}),
}


def lie(group: Any, calls: dict[str, tuple[str, dict[int, int]]], payload: Any) -> dict[str, str]:
    """Rank 1 makes two calls of a kind, and then tells what cannot be."""
    heard = {}
    for name, (stage, words) in calls.items():
        with tokenyard.Buffer(group, transport="direct", timeout=scaled(60)) as buffer:
            for turn in range(3):
                lies = turn == 2 and group.rank() == 1
                try:
                    if lies and stage == "dispatch":
                        send_instead(buffer, stage, {say.TOKENS: 5, **words}, payload[name])
                        break
                    got: Any = buffer.dispatch(torch.ones(5, 8), **ROUTED, num_experts=2)
                    if lies:
                        handle = {say.HANDLE: got.handle.call}
                        send_instead(buffer, stage, {**handle, **words})
                        break
                    buffer.combine(got.recv_x, got.handle)
                except tokenyard.PeerError as error:
                    heard[name] = f"{type(error).__name__}: {error}"
        dist.barrier(group)
    return heard


def test_offers_outside_their_memory_are_refused() -> None:
    honest_counts = {name: [5, 5, 5] for name in OFFERS}
    with Processes(2, timeout=scaled(120)) as ranks:
        honest, _ = ranks.run(lie, OFFERS, honest_counts, may_die=True)
    assert honest == {
        name: f"PeerError: {stage}: rank 1 wrote what no rank writes, on rank 0"
        for name, (stage, _) in OFFERS.items()
    }


# What rank 1 says that it sends to rank 0, and to itself, of its 5 tokens, and that it has so many.
COUNTS = {
    "more rows than tokens": ((6, 5), 5),
    "more rows to another rank than tokens": ((5, 6), 5),
    "fewer rows than none": ((-1, 5), 5),
    "more tokens than there can be": ((5, 5), 1 << 44),
    "fewer tokens than none": ((5, 5), -1),
}


def test_counts_that_cannot_be_are_refused() -> None:
    calls = {name: ("dispatch", {say.TOKENS: tokens}) for name, (_, tokens) in COUNTS.items()}
    payload = {name: [5, *counts] for name, (counts, _) in COUNTS.items()}  # pairs come first
    with Processes(2, timeout=scaled(120)) as ranks:
        honest, _ = ranks.run(lie, calls, payload, may_die=True)
    said = "PeerError: dispatch: rank 1 wrote what no rank writes, on rank 0"
    assert honest == dict.fromkeys(COUNTS, said)
