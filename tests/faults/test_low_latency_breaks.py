"""Low-latency calls that an exception ends midway, and calls in inference mode."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import transport_of, worker_of
from tests.cases.lanes import at_night
from tests.cases.low_latency_rounds import Rounds
from tests.cases.processes import Pools
from tokenyard.testing import Processes

pytestmark = [pytest.mark.faults, pytest.mark.processes]


@pytest.fixture
def pair(processes: Pools) -> Processes:
    return processes(2)


def said(what: Any, *args: Any, **more: Any) -> str:
    try:
        what(*args, **more)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def interrupted(group: Any, kind: str, by_hook: bool) -> tuple[list[str], float]:
    """Rank 1 gets a Ctrl-C while it waits for rank 0, which comes later and goes on for three
    calls: the first may find all that it needs.
    """
    with tokenyard.Buffer(
        group, low_latency_mode=True, transport="direct", timeout=scaled(60)
    ) as buffer:
        rounds = Rounds(buffer, num_experts=2)
        rounds.check(0)
        got = rounds.dispatch(1)

        def call() -> None:
            if kind == "dispatch":
                made = rounds.dispatch(2, return_recv_hook=by_hook)
            else:
                made = rounds.combine(got, 1, return_recv_hook=by_hook)
            if by_hook:
                made.hook()

        if group.rank() == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            answers = [said(call), said(call)]
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(scaled(2))
            return answers, 0.0
        time.sleep(scaled(0.8))
        start = time.monotonic()
        answers = [said(call) for _ in range(4)]
        return answers, time.monotonic() - start


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
@pytest.mark.parametrize("by_hook", at_night([False, True], gate=(True,)), ids=["waits", "hook"])
def test_ctrl_c_inside_a_call(pair: Processes, kind: str, by_hook: bool) -> None:
    (waits, seconds), (interrupts, _) = pair.run(interrupted, kind, by_hook)
    assert interrupts[0].startswith("KeyboardInterrupt")
    assert interrupts[1].startswith("BufferClosed: ")
    assert "KeyboardInterrupt" in interrupts[1]
    first = next(text for text in waits if text != "nothing")
    assert first.startswith("PeerLeft: ")
    assert "rank 1" in first
    assert waits[-1].startswith("BufferClosed: ")
    assert seconds < scaled(20)


def died_on_the_way(group: Any) -> str:
    """Rank 1 dies when its rows leave; rank 0 hears of it on the Buffer's thread, and calls its
    hook after that.
    """
    buffer = tokenyard.Buffer(
        group, low_latency_mode=True, transport="collective", timeout=scaled(60)
    )
    rounds = Rounds(buffer, num_experts=2)
    rounds.check(0)
    if group.rank() == 1:
        transport = transport_of(buffer)
        send = transport.send
        transport.send = lambda rows: (send(rows)[0], lambda: os.kill(os.getpid(), signal.SIGKILL))
    made = rounds.dispatch(1, return_recv_hook=True)
    deadline = time.monotonic() + scaled(60)
    while not worker_of(buffer).failure and time.monotonic() < deadline:
        time.sleep(0.02)
    return said(made.hook)


def test_the_hook_is_the_first_to_tell_of_a_death() -> None:
    with Processes(2, timeout=scaled(120)) as pair:
        first, _ = pair.run(died_on_the_way, may_die=True)
    assert first.startswith("PeerDied: "), first
    assert "rank 1 died" in first


def infer(group: Any, transport: str, inside: bool) -> list[str]:
    """Calls in inference mode whose other half is done on the Buffer's thread, or by a hook that
    is called outside of that mode.
    """
    told = []
    x, idx, weights = torch.randn(4, 16), torch.tensor([[0], [1]] * 2), torch.ones(4, 1)
    with tokenyard.Buffer(
        group, low_latency_mode=True, transport=transport, timeout=scaled(60)
    ) as buffer:
        ways: list[dict[str, Any]] = [{"async_finish": True}, {"return_recv_hook": True}]
        for options in ways:
            with torch.inference_mode():
                waits = torch.zeros(2, dtype=torch.int64)
                totals = torch.zeros(1, dtype=torch.int32)
                got: Any = buffer.low_latency_dispatch(
                    x, idx, 4, 2, totals, waits, use_fp8=False, **options
                )
            with torch.inference_mode(inside):
                (got.hook or got.event.current_stream_wait)()
            with torch.inference_mode():
                back = buffer.low_latency_combine(
                    got.recv_x,
                    idx,
                    weights,
                    got.handle,
                    combine_wait_recv_cost_stats=waits,
                    **options,
                )
            with torch.inference_mode(inside):
                (back.hook or back.event.current_stream_wait)()
                assert torch.equal(back.combined_x, x)
                assert int(totals[0]) == 4
                told.append(str(back.combined_x.is_inference()))
            del got, back
    return told


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_inference_mode(pair: Processes, transport: str, inside: bool) -> None:
    for told in pair.run(infer, transport, inside):
        assert told == ["True", "True"]
