"""Calls of both modes, in an order that differs between ranks, and in one that does not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
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
Said = tuple[str, str, tuple[int, ...]]
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


def answer(call: Callable[[], Any]) -> Said:
    """What a call raised, and which ranks that names."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "", "", ()


def differ(group: Any, transport: str, order: tuple[str, ...]) -> list[Said]:
    """What came of this rank's call of an order, and of the next one, if it has a part in it."""
    where, rank = dist.new_group(list(range(len(order)))), group.rank()
    if rank >= len(order):
        return []
    buffer = tokenyard.Buffer(where, transport=transport, low_latency_mode=True, timeout=scaled(2))
    made = calls(buffer)
    said = [answer(made[name]) for name in (order[rank], LD)]
    dist.barrier(where)  # so that nobody hears that another has closed its Buffer
    buffer.close()
    return said


def check_given_up(said: Sequence[Said], stage: str, rank: int, size: int) -> None:
    """A rank has waited in vain for others, or has heard that another one has, perhaps for it. Its
    Buffer is closed.
    """
    (kind, text, named), (second, *_) = said
    assert kind in ("PeerTimeout", "PeerLeft", "PeerDied"), f"{stage} on rank {rank}: {text}"
    assert text.startswith(stage), f"{stage} on rank {rank}: {text}"
    assert named, f"{stage} on rank {rank}: {text}"
    assert set(named) <= set(range(size)), f"{stage} on rank {rank}: {text}"
    assert rank not in named or "has given up" in text, f"{stage} on rank {rank}: {text}"
    assert second == "BufferClosed", f"{stage} on rank {rank}: {second}"


@pytest.mark.parametrize("order", at_night(ORDERS, [(D, LD), (D, LC, LD)]), ids=" and ".join)
@pytest.mark.parametrize("transport", at_night(["direct", "ring"], ["direct"]))
def test_calls_of_different_modes(ranks: Processes, transport: str, order: tuple[str, ...]) -> None:
    """Nobody tells them before they have waited in vain."""
    told = ranks.run(differ, transport, order)
    for rank, stage in enumerate(order):
        check_given_up(told[rank], stage, rank, len(order))


@pytest.mark.parametrize("order", at_night(ORDERS, [(D, LC, LD)]), ids=" and ".join)
def test_calls_of_different_modes_that_share_no_memory(
    ranks: Processes, order: tuple[str, ...]
) -> None:
    told = ranks.run(differ, "collective", order)
    for rank, stage in enumerate(order):
        (kind, text, _), (second, *_) = told[rank]
        wanted = [
            f"{stage}: ranks differ in what they call: {stage} on rank {rank}, "
            f"{theirs} on rank {other}"
            for other, theirs in enumerate(order)
            if theirs != stage
        ]
        assert kind == "CallMismatch", f"{order} on rank {rank}: {kind}: {text}"
        assert text in wanted, f"{order} on rank {rank}: {text}"
        assert second == "", f"{order} on rank {rank}: {second}"


def differ_later(group: Any, fast: str, by_hook: bool) -> list[Said]:
    """Rank 0 sends, and receives later; rank 1 makes another call instead."""
    buffer = tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(2))
    made = calls(buffer)

    def go() -> None:
        if group.rank() == 1:
            made[D]()
        elif by_hook:
            made[fast](return_recv_hook=True).hook()
        else:
            made[fast](async_finish=True).event.current_stream_wait()

    said = [answer(call) for call in (go, made[LD])]
    dist.barrier(group)
    buffer.close()
    return said


@pytest.mark.parametrize("fast", at_night([LD, LC], [LC]))
@pytest.mark.parametrize("by_hook", [True, False], ids=["hook", "async"])
def test_a_call_that_is_received_later(fast: str, by_hook: bool, processes: Pools) -> None:
    told = processes(2).run(differ_later, fast, by_hook)
    for rank, stage in enumerate((fast, D)):
        check_given_up(told[rank], stage, rank, 2)


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
            receive(kind, made[kind] - 1)
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
