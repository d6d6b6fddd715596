"""A Buffer used as it should not be: by two threads, by a forked child, through a Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.testing import Processes

pytestmark = [pytest.mark.faults, pytest.mark.processes]

TRANSPORTS = ("direct", "ring", "collective", "hierarchical")


@pytest.fixture
def pair(processes: Pools) -> Processes:
    return processes(2)


def open_buffer(group: Any, transport: str, **more: Any) -> tokenyard.Buffer:
    nodes = 1 if transport == "hierarchical" else None
    return tokenyard.Buffer(
        group, transport=transport, ranks_per_node=nodes, timeout=scaled(60), **more
    )


def call(buffer: tokenyard.Buffer, num_tokens: int = 4, **more: Any) -> Any:
    """Every token goes to both ranks, and says how many its rank has."""
    return buffer.dispatch(
        torch.full((num_tokens, 8), float(num_tokens)),
        topk_idx=torch.tensor([[0, 1]] * num_tokens),
        topk_weights=torch.ones(num_tokens, 2),
        num_experts=2,
        **more,
    )


def said(what: Any, *args: Any, **more: Any) -> str:
    try:
        what(*args, **more)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def second_thread(group: Any, transport: str) -> tuple[str, list[float], list[float]]:
    with open_buffer(group, transport) as buffer:
        call(buffer)
        heard = ""
        if group.rank() == 0:

            def intrude() -> None:
                nonlocal heard
                time.sleep(scaled(0.2))  # by now the main thread waits for rank 1
                heard = said(call, buffer, 7)

            thread = threading.Thread(target=intrude)
            thread.start()
        else:
            time.sleep(scaled(0.5))
        got = call(buffer, 3 + group.rank())
        if group.rank() == 0:
            thread.join()
        return heard, got.recv_x[:, 0].tolist(), call(buffer, 5).recv_x[:, 0].tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_second_thread_is_refused(pair: Processes, transport: str) -> None:
    (heard, *rows), (_, *others) = pair.run(second_thread, transport)
    assert "in use by another thread" in heard
    assert rows == others == [[3.0] * 3 + [4.0] * 4, [5.0] * 10]


def two_threads(group: Any, transport: str) -> tuple[list[Any], list[str]]:
    wrong, errors = [], []
    with open_buffer(group, transport) as buffer:

        def go(value: int) -> None:
            x, idx = torch.full((value, 64), float(value)), torch.zeros(value, 1).long()
            for turn in range(100):
                try:
                    got: Any = buffer.dispatch(
                        x, topk_idx=idx, topk_weights=torch.ones(value, 1), num_experts=1
                    )
                    if not torch.equal(got.recv_x, x):
                        wrong.append((value, turn))
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=go, args=(value,)) for value in (5, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong, sorted(set(errors))


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_two_threads_get_their_rows_or_an_error(transport: str) -> None:
    with Processes(1, timeout=scaled(120)) as ranks:
        (answer,) = ranks.run(two_threads, transport, may_die=True)
    assert isinstance(answer, tuple), answer
    wrong, errors = answer
    assert wrong == []
    assert all("in use by another thread" in error for error in errors), errors


def forked(group: Any, transport: str) -> Any:
    buffer = open_buffer(group, transport)
    call(buffer)
    heard = ""
    if group.rank() == 0:
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(theirs, said(call, buffer, 2).encode())
                buffer.close()
                del buffer
            finally:
                os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            heard = pipe.read().decode()
        os.waitpid(child, 0)
    rows = call(buffer, 3).recv_x[:, 0].tolist()
    buffer.close()
    return heard, rows


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_a_forked_child_is_refused(transport: str) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        answers = ranks.run(forked, transport, may_die=True)
    (heard, rows), (_, others) = answers
    assert heard.startswith("BufferClosed: ")
    assert "fork" in heard
    assert rows == others == [3.0] * 6


def interrupted(group: Any, transport: str, asynchronous: bool) -> tuple[str, str, float]:
    """Rank 1 gets a Ctrl-C while it waits for rank 0, which comes later."""
    buffer = open_buffer(group, transport)
    call(buffer)
    if group.rank() == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, scaled(0.2))
    else:
        time.sleep(scaled(0.6))

    def go() -> None:
        with call(buffer, 3, async_finish=asynchronous).event:
            pass

    start = time.monotonic()
    first = said(go)
    seconds = time.monotonic() - start
    signal.setitimer(signal.ITIMER_REAL, 0)
    second = said(call, buffer, 3)
    buffer.close()
    return first, second, seconds


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_inside_a_call(transport: str, asynchronous: bool) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        waits, interrupts = ranks.run(interrupted, transport, asynchronous)
    assert interrupts[0].startswith("KeyboardInterrupt")
    assert interrupts[1].startswith("BufferClosed: ")
    assert "KeyboardInterrupt" in interrupts[1]
    assert waits[0].startswith("PeerLeft: ")
    assert "rank 1" in waits[0]
    assert waits[1].startswith("BufferClosed: ")
    assert waits[2] < scaled(30)


def event_that_fails(group: Any, asynchronous: bool) -> list[str]:
    """A low-latency call that rank 1 rejects: rank 0 is told by its event, which a combine waits
    for. Rank 1 has none.
    """
    out, event = [], None
    with open_buffer(group, "direct", low_latency_mode=True) as buffer:
        got = call(buffer)
        idx = torch.tensor([[0], [1 + 9 * group.rank()]])
        try:
            event = buffer.low_latency_dispatch(
                torch.ones(2, 8), idx, 4, 2, use_fp8=False, async_finish=True
            ).event
        except ValueError as error:
            out.append(type(error).__name__)
        time.sleep(scaled(0.3))

        def combine() -> None:
            done = buffer.combine(
                got.recv_x, got.handle, previous_event=event, async_finish=asynchronous
            )
            with done.event:
                pass

        out.append(said(combine))
        event = None
        out.append(said(combine))
    return out


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_event_that_has_failed_is_bad_input(pair: Processes, asynchronous: bool) -> None:
    one, other = pair.run(event_that_fails, asynchronous)
    assert one[0].startswith("PeerInputError: rank 1 rejected its input")
    assert one[1] == "nothing"
    assert other[0] == "ValueError"
    assert other[1].startswith("PeerInputError: rank 0 rejected its input")
    assert other[2] == "nothing"


def event_that_fails_later(group: Any) -> list[str]:
    """An event of rank 0's own, which fails while a combine is on its way."""

    class Late(tokenyard.EventHandle):
        is_over = False

        def current_stream_wait(self) -> None:
            time.sleep(scaled(0.3))
            raise RuntimeError("the stream is gone")

    buffer = open_buffer(group, "direct")
    got, out = call(buffer), []
    event = tokenyard.EventOverlap(Late()) if group.rank() == 0 else None

    def combine() -> None:
        done = buffer.combine(got.recv_x, got.handle, previous_event=event, async_finish=True)
        done.event.current_stream_wait()

    out.append(said(combine))
    out.append(said(call, buffer))
    buffer.close()
    return out


def test_an_event_that_fails_later_is_told_to_all(pair: Processes) -> None:
    one, other = pair.run(event_that_fails_later)
    assert one[0] == "RuntimeError: the stream is gone"
    assert other[0].startswith("PeerLeft: ")
    assert "rank 0" in other[0]
    assert one[1].startswith("BufferClosed: ")
    assert other[1].startswith("BufferClosed: ")
