"""Rows never land in memory that has another owner by now."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import transport_of, without_compiled_calls
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


def lie(group: Any) -> list[str]:
    """Rank 1's offers name places outside its memory."""
    said = []
    for turn in range(2):
        with tokenyard.Buffer(group, transport="direct", timeout=scaled(60)) as buffer:
            transport = transport_of(buffer)
            mailbox = transport.node.mailbox
            offer_back, exchange = transport.offer_back, mailbox.exchange

            def back(*args: Any, real: Any = offer_back) -> Any:
                offer = real(*args)
                offer.words[:, 4] = 1 << 44
                return offer

            def start(message: Any, stage: str, real: Any = exchange) -> Any:
                if message.shape[1] == 5:  # the second round of a dispatch
                    message[:, 3] = 1 << 44
                return real(message, stage)

            if group.rank() == 1:
                if turn == 0:
                    without_compiled_calls(buffer)  # which tell what is true
                    transport.offer_back = back
                else:
                    mailbox.exchange = start
            try:
                got: Any = buffer.dispatch(
                    torch.ones(5000, 8),  # more than is offered first
                    topk_idx=torch.tensor([[0, 1]] * 5000),
                    topk_weights=torch.ones(5000, 2),
                    num_experts=2,
                )
                buffer.combine(got.recv_x, got.handle)
                said.append("nothing")
            except tokenyard.PeerError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_offers_outside_their_memory_are_refused() -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        honest, liar = ranks.run(lie, may_die=True)
    assert honest == [
        "PeerError: combine: rank 1 wrote what no rank writes, on rank 0",
        "PeerError: dispatch: rank 1 wrote what no rank writes, on rank 0",
    ]
    assert all("rank 1 wrote what no rank writes" in text for text in liar), liar


# What rank 1 says that it sends to rank 0, and to itself, of its 5 tokens, and that it has so many.
COUNTS = {
    "more rows than tokens": ((6, 5), 5),
    "more rows to another rank than tokens": ((5, 6), 5),
    "fewer rows than none": ((-1, 5), 5),
    "more tokens than there can be": ((5, 5), 1 << 44),
    "fewer tokens than none": ((5, 5), -1),
}


def tell(exchange: Any, counts: tuple[int, int], num_tokens: int, message: Any, stage: str) -> Any:
    """Another message than the one that is right."""
    message[:, say.PAYLOAD] = counts
    message[:, say.PAYLOAD + 2 : say.PAYLOAD + 4] = counts
    message[:, say.TOKENS] = num_tokens
    return exchange(message, stage)


def miscount(group: Any) -> dict[str, str]:
    """Rank 1 makes its call step by step, with wrong counts; for rank 0 it is a compiled one."""
    heard = {}
    routed: Any = {"topk_idx": torch.tensor([[0, 1]] * 5), "topk_weights": torch.ones(5, 2)}
    for name, (counts, num_tokens) in COUNTS.items():
        with tokenyard.Buffer(group, transport="direct", timeout=scaled(60)) as buffer:
            for _ in range(2):
                buffer.dispatch(torch.ones(5, 8), **routed, num_experts=2)
            mailbox = transport_of(buffer).node.mailbox
            if group.rank() == 1:
                without_compiled_calls(buffer)
                mailbox.exchange = partial(tell, mailbox.exchange, counts, num_tokens)
            try:
                buffer.dispatch(torch.ones(5, 8), **routed, num_experts=2)
                heard[name] = f"nothing, in a call that was {buffer.stats()['ways']}"
            except tokenyard.PeerError as error:
                heard[name] = f"{type(error).__name__}: {error}"
        dist.barrier(group)
    return heard


def test_counts_that_cannot_be_are_refused_by_a_compiled_call() -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        honest, _ = ranks.run(miscount, may_die=True)
    said = "PeerError: dispatch: rank 1 wrote what no rank writes, on rank 0"
    assert honest == dict.fromkeys(COUNTS, said)
