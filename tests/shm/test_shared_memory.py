"""Shared memory and descriptors come back: from dead results, kept handles, dropped Buffers."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.shared_memory import shared_bytes
from tokenyard.testing import Processes

pytestmark = pytest.mark.processes


@pytest.fixture
def pair(processes: Pools) -> Processes:
    return processes(2)


def dispatch(buffer: tokenyard.Buffer, num_tokens: int, **more: Any) -> Any:
    """Half of the tokens to each rank, 8 KiB each."""
    return buffer.dispatch(
        torch.zeros(num_tokens, 4096, dtype=torch.bfloat16),
        topk_idx=torch.arange(num_tokens)[:, None] % 2,
        topk_weights=torch.ones(num_tokens, 1),
        num_experts=2,
        **more,
    )


def grow(group: Any, transport: str) -> dict[str, tuple[int, int]]:
    out, nodes = {}, 2 if transport == "hierarchical" else None

    def opened() -> tokenyard.Buffer:
        return tokenyard.Buffer(group, transport=transport, ranks_per_node=nodes)

    with opened() as buffer:
        dispatch(buffer, 8000)
        for _ in range(300):
            dispatch(buffer, 10)
        gc.collect()
        out["a large one, then small ones"] = shared_bytes()
    with opened() as buffer:
        for num_tokens in range(200, 6000, 200):
            got = dispatch(buffer, num_tokens)
            buffer.combine(got.recv_x, got.handle)
        del got
        gc.collect()
        out["ascending"] = shared_bytes()
    with opened() as buffer:
        kept = [dispatch(buffer, 2000).handle for _ in range(8)]
        gc.collect()
        out["handles"] = shared_bytes()
        x = torch.ones(2000, 4096, dtype=torch.bfloat16)
        assert bool((buffer.combine(x, kept[0]).x == 1).all())
    gc.collect()
    out["closed"] = shared_bytes()
    return out


@pytest.mark.parametrize("transport", at_night(["direct", "hierarchical"], gate=("direct",)))
def test_memory_returns_when_less_is_needed(pair: Processes, transport: str) -> None:
    mib = 1 << 20
    for answer in pair.run(grow, transport):
        own, mapped = answer["a large one, then small ones"]  # 62 MiB, then 0.1
        assert own < 3 * mib
        assert mapped < 6 * mib
        own, mapped = answer["ascending"]  # to 47 MiB, and its sum
        assert own < 2 * 94 * mib
        assert mapped < 4 * 94 * mib
        own, mapped = answer["handles"]  # 8 of 16 MiB
        assert own < 3 * 16 * mib
        assert mapped < 6 * 16 * mib
        assert answer["closed"] == (0, 0)


def by_source(buffer: tokenyard.Buffer, num_tokens: int) -> None:
    """All that one handle is for."""
    got = dispatch(buffer, num_tokens)
    buffer.dispatch(torch.zeros(num_tokens, 4096, dtype=torch.bfloat16), handle=got.handle)
    buffer.combine(got.recv_x, got.handle)
    rows = buffer.get_next_combine_buffer(got.handle).zero_()
    buffer.combine(rows, got.handle)
    buffer.combine(
        torch.zeros_like(rows), got.handle, async_finish=True
    ).event.current_stream_wait()


def by_expert(buffer: tokenyard.Buffer, num_tokens: int) -> None:
    x, ids = torch.zeros(num_tokens, 4096), torch.arange(num_tokens)[:, None] % 2
    got: Any = buffer.dispatch_by_expert(x, ids, torch.ones(num_tokens, 1), num_experts=2)
    buffer.combine_by_expert(got.x, got.handle)


def gathered(buffer: tokenyard.Buffer, num_tokens: int) -> None:
    buffer.all_gather(torch.zeros(num_tokens, 4096))


def low_latency(buffer: tokenyard.Buffer, num_tokens: int) -> None:
    x, ids = torch.zeros(num_tokens, 4096).bfloat16(), torch.arange(num_tokens)[:, None] % 2
    got: Any = buffer.low_latency_dispatch(x, ids, num_tokens, 2, use_fp8=False)
    rows, weights = (
        buffer.get_next_low_latency_combine_buffer(got.handle),
        torch.ones(x.shape[0], 1),
    )
    for is_there in (False, True):
        given = rows if is_there else got.recv_x
        buffer.low_latency_combine(given, ids, weights, got.handle, zero_copy=is_there)


GROWING = {one.__name__: one for one in (by_source, by_expert, gathered, low_latency)}


def fall(group: Any, name: str) -> tuple[int, int]:
    """Bytes of this rank's segments: after a large call, and after 260 small ones."""
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        GROWING[name](buffer, 2000)
        most = shared_bytes()[0]
        for _ in range(260):
            GROWING[name](buffer, 10)
        return most, shared_bytes()[0]


@pytest.mark.parametrize("name", GROWING)
def test_all_calls_give_a_large_block_back(pair: Processes, name: str) -> None:
    for most, end in pair.run(fall, name):
        assert most > 8 << 20
        assert end < 3 << 20


def open_and_close(group: Any, options: dict[str, Any]) -> tuple[list[str], int]:
    failed: list[str] = []
    with tokenyard.Buffer(group, **options):
        pass
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(15):
        try:
            with tokenyard.Buffer(group, timeout=scaled(60), **options):
                pass
        except tokenyard.TokenyardError as error:
            failed.append(f"{type(error).__name__}: {error}")
            break
    gc.collect()
    return failed, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize(
    "options",
    [
        {"low_latency_mode": True},
        {"transport": "ring"},
        {},
        {"transport": "hierarchical", "ranks_per_node": 2},
        {"transport": "collective"},
    ],
    ids=["low-latency", "ring", "direct", "hierarchical", "collective"],
)
def test_a_buffer_is_opened_and_closed_without_a_call(
    options: dict[str, Any], processes: Pools
) -> None:
    for failed, descriptors in processes(2).run(open_and_close, options):
        assert failed == []
        assert descriptors <= 0


def close_without_a_collector(group: Any, options: dict[str, Any]) -> int:
    """Bytes that stay mapped after close, before Python looks for circles."""
    gc.collect()
    gc.disable()
    try:
        _, before = shared_bytes()
        with tokenyard.Buffer(group, **options) as buffer:
            with dispatch(buffer, 8, async_finish=True).event:
                pass
            _, during = shared_bytes()
            assert during > before
        return shared_bytes()[1] - before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "direct"},
        {"transport": "direct", "low_latency_mode": True},
        {"transport": "ring"},
        {"transport": "hierarchical", "ranks_per_node": 1},
    ],
    ids=["direct", "low-latency", "ring", "hierarchical"],
)
def test_close_unmaps_at_once(pair: Processes, options: dict[str, Any]) -> None:
    assert pair.run(close_without_a_collector, options) == [0, 0]


def own_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("tokenyard-rank")]


def drop(
    group: Any, options: dict[str, Any], asynchronous: bool
) -> tuple[int, int, int, list[str]]:
    def once() -> None:
        buffer = tokenyard.Buffer(group, **options)
        got = dispatch(buffer, 500, async_finish=asynchronous)
        with got.event:
            pass

    once()
    gc.collect()
    before, memory = len(os.listdir("/proc/self/fd")), shared_bytes()
    for _ in range(4):
        once()
        gc.collect()
    # The Buffer's own thread closes it, a moment later where the machine is busy; so does gloo its
    # connections, and the other rank its half.
    deadline = time.monotonic() + scaled(10)
    while time.monotonic() < deadline:
        threads, after = own_threads(), shared_bytes()
        grown = len(os.listdir("/proc/self/fd")) - before
        own, mapped = after[0] - memory[0], after[1] - memory[1]
        if not threads and max(grown - 2, own, mapped) <= 0:
            break
        time.sleep(0.02)
    return grown, own, mapped, threads


@pytest.mark.parametrize(
    "asynchronous", at_night([False, True], gate=(True,)), ids=["sync", "async"]
)
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "direct", "low_latency_mode": True},
        {"transport": "ring"},
        {"transport": "hierarchical", "ranks_per_node": 1},
        {"transport": "collective"},
    ],
    ids=["direct", "ring", "hierarchical", "collective"],
)
def test_a_dropped_buffer_frees_itself(
    pair: Processes, options: dict[str, Any], asynchronous: bool
) -> None:
    for descriptors, own, mapped, threads in pair.run(drop, options, asynchronous):
        assert descriptors <= 2  # gloo lets go of connections a moment later
        assert own <= 0  # the first may have been on its way yet when it was counted
        assert mapped <= 0
        assert threads == []


def infer(group: Any, transport: str, worst: int) -> tuple[bool, bool]:
    nodes = 1 if transport == "hierarchical" else None
    with (
        tokenyard.Buffer(
            group, transport=transport, ranks_per_node=nodes, timeout=scaled(60)
        ) as buffer,
        torch.inference_mode(),
    ):
        x = torch.randn(4, 8)
        got: Any = buffer.dispatch(
            x,
            topk_idx=torch.tensor([[0], [1], [0], [1]]),
            topk_weights=torch.ones(4, 1),
            num_experts=2,
            num_worst_tokens=worst,
            async_finish=True,
        )
        back = buffer.combine(got.recv_x, got.handle, previous_event=got.event, async_finish=True)
        back.event.current_stream_wait()
        return torch.equal(back.x, x), bool((got.recv_topk_idx[4:] == -1).all())


@pytest.mark.parametrize("worst", [0, 16])
@pytest.mark.parametrize("transport", ["direct", "ring", "collective", "hierarchical"])
def test_asynchronous_calls_in_inference_mode(transport: str, worst: int, processes: Pools) -> None:
    assert processes(2).run(infer, transport, worst) == [(True, True)] * 2


def many_sizes(group: Any, rounds: int, large: int) -> dict[str, int]:
    """Random sizes of up to 4 MB, with one dispatch of `large` tokens of 8 KiB among them."""
    chance, most = random.Random(7), 0
    with tokenyard.Buffer(group, transport="direct") as buffer:
        kept: deque[Any] = deque(maxlen=4)  # handles, which must not keep rows
        for turn in range(rounds):
            num_tokens = large if turn == rounds // 2 else chance.randrange(500)
            got = dispatch(buffer, num_tokens)
            if turn % 3 == 0:
                buffer.combine(got.recv_x, got.handle)
            if turn == rounds // 2:
                most = shared_bytes()[1]
            kept.append(got.handle)
            del got
        gc.collect()
        return {"most": most, "end": shared_bytes()[1]}


@pytest.mark.parametrize(
    "rounds, large",
    [
        (900, 16_000),
        pytest.param(
            20_000, 122_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="1-GB"
        ),
    ],
)
def test_one_large_result_among_many_leaves_nothing_behind(
    rounds: int, large: int, processes: Pools
) -> None:
    answers = processes(2, timeout=1700).run(many_sizes, rounds, large)
    need = 2 * 2 * 500 * 8192  # of both ranks: a result of 4 MB, and the sums of a combine
    for answer in answers:
        assert answer["most"] > large * 8192
        assert answer["end"] < 2 * need, answer


def cannot_open(group: Any, options: dict[str, Any]) -> tuple[set[str], int]:
    said: set[str] = set()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        try:
            tokenyard.Buffer(group, timeout=scaled(60), **options)
        except (tokenyard.TokenyardError, ValueError) as error:
            said.add(type(error).__name__)
    gc.collect()
    return said, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"transport": "ring", "num_nvl_bytes": 1 << 45}, "SharedMemoryError"),
        (
            {"transport": "collective", "low_latency_mode": True, "enable_shrink": True},
            "ValueError",
        ),
    ],
    ids=["ring", "low-latency"],
)
def test_an_opening_that_fails_leaves_nothing_behind(
    options: dict[str, Any], kind: str, processes: Pools
) -> None:
    for said, descriptors in processes(2).run(cannot_open, options):
        assert said == {kind}
        assert descriptors <= 2  # gloo lets go of connections a moment later
