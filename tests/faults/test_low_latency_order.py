"""Calls of both modes, in an order that differs between ranks, and in one that does not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.testing import Processes

pytestmark = [pytest.mark.faults, pytest.mark.processes]

D, CD, C, LD, LC = (
    "dispatch",
    "cached dispatch",
    "combine",
    "low-latency dispatch",
    "low-latency combine",
)
ORDERS = [(D, LD), (LC, C), (LD, LD, D), (LC, D, D), (CD, CD, LD), (LD, LC, LC), (D, LC, LD)]


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


def calls(buffer: tokenyard.Buffer) -> dict[str, Callable[..., Any]]:
    """One call of each kind, which may be made once the first two of them were."""
    x, idx, weights = torch.ones(2, 64), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)

    def normal(**more: Any) -> Any:
        return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=2, **more)

    def fast(**more: Any) -> Any:
        return buffer.low_latency_dispatch(x, idx, 2, 2, use_fp8=False, **more)

    one, other = normal(), fast()
    rows = other.recv_x.clone()
    return {
        D: normal,
        CD: lambda **more: buffer.dispatch(x, one.handle, **more),
        C: lambda **more: buffer.combine(one.recv_x, one.handle, **more),
        LD: fast,
        LC: lambda **more: buffer.low_latency_combine(rows, idx, weights, other.handle, **more),
    }


def differ(group: Any, transport: str, late: float) -> list[list[str]]:
    """For each order: what this rank's call raised, what the next one did, and the seconds."""
    told, rank = [], group.rank()
    pair = dist.new_group([0, 1])
    for order in ORDERS:
        dist.barrier(group)
        if rank >= len(order):
            continue
        where = pair if len(order) == 2 else group
        with tokenyard.Buffer(
            where, transport=transport, low_latency_mode=True, timeout=scaled(60)
        ) as buffer:
            made = calls(buffer)
            if rank == len(order) - 1:
                time.sleep(late)
            start, said = time.monotonic(), ["", ""]
            for turn, name in enumerate((order[rank], LD)):
                try:
                    made[name]()
                except Exception as error:
                    said[turn] = f"{type(error).__name__}: {error}"
                if turn == 0:
                    seconds = time.monotonic() - start
            told.append([*said, f"{seconds:.1f}"])
    return told


@pytest.mark.timeout(200)
@pytest.mark.parametrize("transport, late", [("direct", 0.0), ("direct", 0.5), ("ring", 0.0)])
def test_calls_of_different_modes(ranks: Processes, transport: str, late: float) -> None:
    told = ranks.run(differ, transport, late, timeout=scaled(250))
    for rank, answers in enumerate(told):
        orders = [order for order in ORDERS if rank < len(order)]
        for order, (first, second, seconds) in zip(orders, answers, strict=True):
            mine, others = order[rank], dict(enumerate(order))
            wanted = [
                f"CallMismatch: {mine}: ranks differ in what they call: {mine} on rank {rank}, "
                f"{theirs} on rank {other}"
                for other, theirs in others.items()
                if theirs != mine
            ]
            assert first in wanted, f"{order} on rank {rank}: {first}"
            assert second.startswith("BufferClosed: "), f"{order} on rank {rank}: {second}"
            assert float(seconds) < scaled(30) + late


def differ_later(group: Any, fast: str, by_hook: bool) -> list[str]:
    """Rank 0 sends, and receives later; rank 1 makes another call instead."""
    said = []
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        made = calls(buffer)
        got = None

        def go() -> None:
            nonlocal got
            if group.rank() == 1:
                made[D]()
                return
            if by_hook:
                made[fast](return_recv_hook=True).hook()
            else:
                got = made[fast](async_finish=True)
                got.event.current_stream_wait()

        for call in (go, made[LD]):
            try:
                call()
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("fast", [LD, LC])
@pytest.mark.parametrize("by_hook", [True, False], ids=["hook", "async"])
def test_a_call_that_is_received_later(fast: str, by_hook: bool, processes: Pools) -> None:
    one, other = processes(2).run(differ_later, fast, by_hook)
    what = "ranks differ in what they call"
    assert one[0] == f"CallMismatch: {fast}: {what}: {fast} on rank 0, {D} on rank 1"
    assert other[0] == f"CallMismatch: {D}: {what}: {D} on rank 1, {fast} on rank 0"
    assert one[1].startswith("BufferClosed: ")
    assert other[1].startswith("BufferClosed: ")


def differ_before_sending(group: Any) -> str:
    """Rank 1 waits for the place of a call whose hook rank 0 has dropped, and sends nothing before
    it finds rank 0 elsewhere.
    """
    buffer = tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60))
    made = calls(buffer)
    for _ in range(2):
        made[LD](return_recv_hook=True)
    try:
        made[D if group.rank() == 0 else LD]()
    except Exception as error:
        buffer.close()
        return f"{type(error).__name__}: {error}"
    return ""


def test_who_has_sent_nothing_says_why_it_leaves(processes: Pools) -> None:
    one, other = processes(2).run(differ_before_sending)
    what = f"ranks differ in what they call: {LD} on rank 1, {D} on rank 0"
    assert other == f"CallMismatch: {LD}: {what}"
    assert one.startswith("CallMismatch: ")
    assert what in one or f"{D} on rank 0, {LD} on rank 1" in one


def mixed(group: Any, transport: str, seed: int, rounds: int) -> dict[str, int]:
    """The same calls on all ranks; how and when each receives, and how long it sleeps, is its own
    affair.
    """
    order, own = random.Random(seed), random.Random(f"{seed} {group.rank()}")
    made = {"normal": 0, "back": 0, "fast": 0, "fast back": 0}
    x, idx, weights = torch.ones(2, 32), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    with tokenyard.Buffer(
        group, low_latency_mode=True, transport=transport, timeout=scaled(60)
    ) as buffer:
        fast: list[Any] = []  # dispatched, not combined
        unread: dict[str, list[Any]] = {"fast": [], "fast back": []}
        events: list[Any] = []
        normal: Any = None

        def receive(kind: str, before: int) -> None:
            while unread[kind] and unread[kind][0][0] < before:
                unread[kind].pop(0)[1]()

        def left(kind: str, got: Any) -> Any:
            if got.hook is not None:
                unread[kind].append((made[kind], got.hook))
            elif got.event.event is not None:
                unread[kind].append((made[kind], got.event.current_stream_wait))
            return got

        def later(kind: str) -> dict[str, Any]:
            receive(kind, made[kind] - 1)  # what was sent two calls ago must have been received
            return own.choice([{}, {"async_finish": True}, {"return_recv_hook": True}])

        for _ in range(rounds):
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            if own.random() < 0.3:
                kind = own.choice(list(unread))
                receive(kind, made[kind] - own.randint(0, 1))
            what = order.choice(list(made))
            if what == "fast" and len(fast) < 2:
                options = later("fast")
                got = buffer.low_latency_dispatch(x, idx, 2, 2, use_fp8=False, **options)
                fast.append(left("fast", got))
            elif what == "fast back" and fast:
                receive("fast", made["fast"])
                got = fast.pop(0)
                options = later("fast back")
                back = buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, **options)
                left("fast back", back)
                del got, back
            elif what == "normal":
                normal = buffer.dispatch(
                    x,
                    topk_idx=idx,
                    topk_weights=weights,
                    num_experts=2,
                    async_finish=own.random() < 0.5,
                )
                events.append(normal.event)
            elif what == "back" and normal is not None:
                if own.random() < 0.5:
                    rows, pending = normal.recv_x, normal.event
                    if pending.event is None:
                        pending = None
                    done = buffer.combine(
                        rows, normal.handle, previous_event=pending, async_finish=True
                    )
                else:
                    if normal.event.event is not None:
                        normal.event.current_stream_wait()
                    done = buffer.combine(normal.recv_x, normal.handle)
                events.append(done.event)
            else:
                continue
            made[what] += 1
        for kind in unread:
            receive(kind, made[kind])
        for event in events:
            if event.event is not None:
                event.current_stream_wait()
        torch.distributed.barrier(group)
    return made


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "rounds", [150, pytest.param(5000, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("transport", ["direct", "ring"])
def test_the_same_order_is_never_taken_for_another(
    ranks: Processes, transport: str, rounds: int
) -> None:
    for seed in range(2):
        first, *others = ranks.run(mixed, transport, seed, rounds, timeout=scaled(250))
        assert all(other == first for other in others)
        assert min(first.values()) > rounds // 50
