"""Calls that return before their rows have moved: order, results, and failures."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.asynchronous import EXPERTS, TOKENS, both_ways
from tests.cases.clock import scaled
from tests.cases.inside import worker_of
from tests.cases.lanes import random_cases
from tests.cases.processes import Pools
from tokenyard.runtime.events import Worker
from tokenyard.testing import Processes, assert_same, numbered_tokens, routing, run_virtual
from tokenyard.transports import available

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


@pytest.mark.parametrize("transport", [one for one in available() if one != "hierarchical"])
def test_any_order_of_calls_gives_the_results_of_synchronous_ones(
    ranks: Processes, transport: str
) -> None:
    number = random_cases(40)
    assert ranks.run(both_ways, transport, range(number)) == [number] * 3


def test_virtual_ranks_have_threads_too() -> None:
    assert run_virtual(both_ways, 5, "auto", range(20)).results == [20] * 5


def return_early(group: Any) -> bool:
    """Dispatch while the Buffer's thread is held up, so that no row can have moved."""
    gate = threading.Event()
    x, (idx, weights) = numbered_tokens(TOKENS, 64), routing("uniform", TOKENS, 3, EXPERTS)
    with tokenyard.Buffer(group) as buffer:
        worker_of(buffer).submit(lambda: gate.wait(scaled(60)))
        got = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, async_finish=True
        )
        went_on = not got.event.is_over
        gate.set()
        got.event.current_stream_wait()
        return went_on


def test_a_call_returns_before_its_rows_move(ranks: Processes) -> None:
    """How much sooner, `tokenyard bench dispatch` measures."""
    assert ranks.run(return_early) == [True] * 3


def call_after_a_slow_one(group: Any) -> None:
    """The first rank's asynchronous rows are late, so it has not used up the others' signals."""
    num_tokens = 300 if group.rank() else 1  # the others write for longer than the first rank
    x, (idx, weights) = (
        numbered_tokens(num_tokens, 2048),
        routing("uniform", num_tokens, 3, EXPERTS),
    )
    given: dict[str, Any] = {"topk_idx": idx, "topk_weights": weights, "num_experts": EXPERTS}
    with tokenyard.Buffer(group) as buffer:
        want = buffer.dispatch(x, **given)
        for _ in range(5):
            if group.rank() == 0:
                worker_of(buffer).submit(lambda: time.sleep(scaled(0.1)))
            got = buffer.dispatch(torch.full_like(x, -1), **given, async_finish=True)
            time.sleep(0.05)
            assert_same(buffer.dispatch(x, **given)[:3], want[:3])
            got.event.current_stream_wait()


def test_a_call_waits_for_the_asynchronous_one_before_it(processes: Pools) -> None:
    processes(2).run(call_after_a_slow_one)


def call_with_more_tokens(group: Any) -> None:
    """While the thread still has to write the tokens of the rows of a call before."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        gate, sizes, calls = threading.Event(), (300, 20_000, 301), []
        worker_of(buffer).submit(lambda: gate.wait(scaled(60)))
        for num_tokens in sizes:
            idx, weights = routing("uniform", num_tokens, 3, EXPERTS)
            given: dict[str, Any] = {"topk_idx": idx, "topk_weights": weights}
            x = numbered_tokens(num_tokens, 8)
            calls.append(buffer.dispatch(x, **given, num_experts=EXPERTS, async_finish=True))
        others = [torch.full((size, 1), -7, dtype=torch.int32) for size in range(1, 600)]
        gate.set()
        for got, num_tokens in zip(calls, sizes):
            got.event.current_stream_wait()
            handle: Any = got.handle
            assert_same(got.recv_x, numbered_tokens(num_tokens, 8)[handle.recv_src_idx.long()])
        assert len(others) == 599


def test_the_thread_reads_what_was_when_the_call_was_made() -> None:
    run_virtual(call_with_more_tokens, 1)


def test_work_is_done_in_order_and_not_at_all_after_a_failure() -> None:
    worker, done, gate = Worker("test"), [], threading.Event()

    def begin() -> None:
        gate.wait(scaled(60))
        done.append("first")

    def fail() -> None:
        done.append("fail")
        raise RuntimeError("a cable was pulled")

    first = worker.submit(begin)
    second, third = worker.submit(fail), worker.submit(lambda: done.append("third"))
    assert not first.is_over
    gate.set()
    first.current_stream_wait()
    for event in (second, third):
        with pytest.raises(RuntimeError, match="a cable was pulled"):
            event.current_stream_wait()
    with pytest.raises(RuntimeError, match="a cable was pulled"):
        worker.drain()
    worker.close()
    assert done == ["first", "fail"]
    assert str(worker.failure) == "a cable was pulled"


def read_on_the_way(group: Any, transport: str) -> None:
    """Ask a handle for all it has while its rows cannot have moved yet."""
    x, (idx, weights) = numbered_tokens(40, 16), routing("uniform", 40, 3, EXPERTS)
    given: dict[str, Any] = {"topk_idx": idx, "topk_weights": weights, "num_experts": EXPERTS}
    with tokenyard.Buffer(group, transport=transport) as buffer:
        gate = threading.Event()
        worker_of(buffer).submit(lambda: gate.wait(scaled(60)))
        got = buffer.dispatch(x, **given, async_finish=True)
        known = [got.handle[place] for place in (0, 1, 4, 5)]  # these do not wait
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        copy = pickle.loads(pickle.dumps(got.handle))
        on_the_way = list(got.handle)
        assert got.event.is_over
        want = list(buffer.dispatch(x, **given).handle)
        assert_same(known, [want[place] for place in (0, 1, 4, 5)])
        assert_same(on_the_way, want)
        assert_same([*copy[2:4], copy[-1]], [*want[2:4], want[-1]])
        opener.join()


@pytest.mark.parametrize("transport", ["direct", "ring"])
def test_a_handle_waits_for_rows_that_it_is_asked_about(ranks: Processes, transport: str) -> None:
    ranks.run(read_on_the_way, transport)


def lost_on_the_way(group: Any) -> None:
    gate = threading.Event()

    def fail() -> None:
        gate.wait(scaled(60))
        raise RuntimeError("a cable was pulled")

    with tokenyard.Buffer(group) as buffer:
        x, (idx, weights) = numbered_tokens(8, 16), routing("uniform", 8, 3, EXPERTS)
        worker_of(buffer).submit(fail)
        got = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, async_finish=True
        )
        dist.barrier(group)
        gate.set()
        for ask in (lambda: got.handle[2], lambda: got.handle[3], lambda: list(got.handle)):
            with pytest.raises(RuntimeError, match="a cable was pulled"):
                ask()


def test_a_handle_raises_what_its_dispatch_raised(ranks: Processes) -> None:
    ranks.run(lost_on_the_way)


def failing_thread(group: Any) -> None:
    with tokenyard.Buffer(group) as buffer:
        worker_of(buffer).submit(lambda: torch.zeros(-1))
        with pytest.raises(RuntimeError):
            worker_of(buffer).drain()
        x, (idx, weights) = numbered_tokens(8, 16), routing("uniform", 8, 3, EXPERTS)
        with pytest.raises(tokenyard.BufferClosed, match="broken by an earlier error"):
            buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS)


def test_a_failure_on_the_thread_breaks_the_buffer(ranks: Processes) -> None:
    ranks.run(failing_thread)
