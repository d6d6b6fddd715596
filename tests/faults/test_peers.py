"""Peers that die or stall: every survivor is told who, in time, and nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.peers import exchange, kill_once_stopped
from tokenyard.engine.agreement import Agreement
from tokenyard.testing import Exited, Processes, RankFailed, run_virtual

pytestmark = [pytest.mark.faults, pytest.mark.alone]

TIMEOUT = scaled(1.0)


def told(buffer: tokenyard.Buffer) -> dict[str, Any]:
    """What a rank sees of an exchange that cannot end well, and of the Buffer afterwards."""
    start = time.monotonic()
    with pytest.raises(tokenyard.PeerError) as caught:
        exchange(buffer)
    seconds = time.monotonic() - start
    with pytest.raises(tokenyard.BufferClosed) as closed:
        exchange(buffer)
    return {
        "kind": type(caught.value).__name__,
        "ranks": caught.value.ranks,
        "rank": caught.value.rank,
        "text": str(caught.value),
        "seconds": seconds,
        "afterwards": str(closed.value),
    }


def one_dies(group: Any, transport: str, nodes: int | None = None) -> dict[str, Any]:
    buffer = tokenyard.Buffer(group, timeout=scaled(60), transport=transport, ranks_per_node=nodes)
    exchange(buffer)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(buffer)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_killed_peer(transport: str) -> None:
    with Processes(4, timeout=scaled(120)) as ranks:
        answers = ranks.run(one_dies, transport, may_die=True)
    assert answers.pop(1) == Exited(-signal.SIGKILL)
    for answer in answers:
        assert answer["kind"] == "PeerDied"
        assert (answer["ranks"], answer["rank"]) == ((1,), 1)
        assert "rank 1 died" in answer["text"]
        assert "the Buffer was broken by an earlier error" in answer["afterwards"]
        assert answer["seconds"] < scaled(10)


def one_dies_in_a_collective(group: Any, transport: str) -> tuple[Any, ...]:
    with tokenyard.Buffer(group, timeout=scaled(60), transport=transport) as buffer:
        exchange(buffer)
        assert buffer.dead_ranks() == ()
        exchange(buffer)  # the other has looked, too
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            told = buffer.explain("all_reduce", error)
            return type(told).__name__, told.ranks, str(told), buffer.dead_ranks()
    return ("nothing", (), "", ())


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
def test_a_death_in_somebody_elses_collective(transport: str) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        answer, gone = ranks.run(one_dies_in_a_collective, transport, may_die=True)
    assert gone == Exited(-signal.SIGKILL)
    assert answer[:2] == ("PeerDied", (1,))
    assert answer[2].startswith("all_reduce: ")
    assert "rank 1 died" in answer[2]
    assert answer[3] == (1,)


@pytest.mark.processes
def test_killed_peer_of_another_node() -> None:
    with Processes(4, timeout=scaled(120)) as ranks:
        answers = ranks.run(one_dies, "hierarchical", 2, may_die=True)
    assert answers.pop(1) == Exited(-signal.SIGKILL)
    for answer in answers:
        assert answer["kind"] == "PeerDied"
        assert answer["ranks"] == (1,), answer
        assert answer["seconds"] < scaled(10)


def start_up(group: Any, transport: str, nodes: int | None = None) -> None:
    """Import modules and load kernels, which may take longer than a short time limit allows."""
    with tokenyard.Buffer(group, transport=transport, ranks_per_node=nodes) as buffer:
        exchange(buffer)


def one_stops(group: Any, transport: str, nodes: int | None = None) -> dict[str, Any]:
    buffer = tokenyard.Buffer(group, timeout=TIMEOUT, transport=transport, ranks_per_node=nodes)
    exchange(buffer)
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told(buffer)


@pytest.mark.processes
@pytest.mark.parametrize("transport", at_night(["direct", "ring", "collective"], gate=("direct",)))
def test_stopped_peer(transport: str) -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        ranks.run(start_up, transport, timeout=scaled(250))
        stuck = ranks.processes[2]
        undertaker = threading.Thread(
            target=kill_once_stopped, args=(stuck.pid, TIMEOUT + scaled(3))
        )
        undertaker.start()
        answers = ranks.run(one_stops, transport, may_die=True)
        undertaker.join()
    assert answers.pop(2) == Exited(-signal.SIGKILL)
    for answer in answers:
        assert answer["kind"] == "PeerTimeout"
        assert answer["ranks"] == (2,)
        assert f"{TIMEOUT:g} s passed; no word from rank 2" in answer["text"]
        assert TIMEOUT <= answer["seconds"] < TIMEOUT + scaled(10)


@pytest.mark.processes
def test_stopped_peer_of_another_node() -> None:
    with Processes(4, timeout=scaled(120)) as ranks:
        ranks.run(start_up, "hierarchical", 2, timeout=scaled(250))
        stuck = ranks.processes[2]
        undertaker = threading.Thread(
            target=kill_once_stopped, args=(stuck.pid, TIMEOUT + scaled(4))
        )
        undertaker.start()
        answers = ranks.run(one_stops, "hierarchical", 2, may_die=True)
        undertaker.join()
    assert answers.pop(2) == Exited(-signal.SIGKILL)
    for answer in answers:
        assert answer["kind"] == "PeerTimeout"
        assert answer["ranks"] == (2,), answer
        assert TIMEOUT <= answer["seconds"] < TIMEOUT + scaled(10)


def only_some_come(group: Any, end: threading.Barrier) -> dict[str, Any] | None:
    """Rank 0 makes no call, and does not leave before the others have given it up."""
    buffer = tokenyard.Buffer(group, timeout=scaled(1))
    answer = told(buffer) if group.rank() else None
    end.wait(scaled(60))
    return answer


def test_silent_virtual_rank() -> None:
    for answer in run_virtual(only_some_come, 3, threading.Barrier(3)).results[1:]:
        assert answer["kind"] == "PeerTimeout"
        assert 0 in answer["ranks"]
        assert answer["seconds"] < scaled(10)


def one_raises(group: Any) -> dict[str, Any]:
    buffer = tokenyard.Buffer(group)
    if group.rank() == 1:
        raise ZeroDivisionError("an expert of rank 1")
    return told(buffer)


def test_a_virtual_rank_that_raises_is_the_one_named() -> None:
    with pytest.raises(ZeroDivisionError, match="an expert of rank 1"):
        run_virtual(one_raises, 3)


def only_rank_one_raises(group: Any) -> int:
    if group.rank() == 1:
        raise ZeroDivisionError("an expert of rank 1")
    return group.rank()


@pytest.mark.processes
def test_kit_shows_the_traceback_of_a_rank() -> None:
    with Processes(2) as ranks:
        with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2: .*an expert of rank 1"):
            ranks.run(only_rank_one_raises)
        assert ranks.run(os_rank) == [0, 1]


def os_rank(group: Any) -> int:
    return group.rank()


def never_ends(group: Any) -> None:
    while group.rank() == 0:
        time.sleep(scaled(0.1))


@pytest.mark.processes
def test_kit_shows_where_a_late_rank_stands() -> None:
    with Processes(2) as ranks:
        ranks.run(os_rank)  # started, and this module imported
        with pytest.raises(TimeoutError, match=r"(?s)rank 0 did not end within .*never_ends"):
            ranks.run(never_ends, timeout=scaled(0.5))
        assert not any(process.is_alive() for process in ranks.processes)


def group_destroyed(group: Any) -> Any:
    """In a group of its own, since the kit needs the first one."""
    import torch.distributed as dist

    second = dist.new_group()
    buffer = tokenyard.Buffer(second, transport="collective")
    exchange(buffer)
    dist.destroy_process_group(second)
    del second
    exchange(buffer)  # on connections of its own
    buffer.close()
    return buffer.group


@pytest.mark.processes
def test_a_destroyed_group_is_not_kept_alive_and_its_buffers_work_on() -> None:
    with Processes(2) as ranks:
        assert ranks.run(group_destroyed) == [None, None]


def one_misses_the_end_of_opening(group: Any) -> tuple[str, tuple[int, ...], str]:
    """Rank 1 takes rank 2 for dead when all others have opened their Buffers."""

    def confirm(self: Agreement, stage: str, failure: Exception | None) -> None:
        real(self, stage, failure)
        if group.rank() == 1:
            raise tokenyard.PeerDied("Buffer: rank 2 died, on rank 1", ranks=(2,), stage=stage)

    real, Agreement.confirm = Agreement.confirm, confirm  # type: ignore[method-assign]
    try:
        exchange(tokenyard.Buffer(group, timeout=scaled(20), transport="direct"))
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks, str(error)
    return ("nothing", (), "")


@pytest.mark.processes
def test_a_death_at_the_end_of_opening_is_told_in_the_first_call() -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        answers = ranks.run(one_misses_the_end_of_opening)
    for kind, named, text in answers:
        assert (kind, named) == ("PeerDied", (2,)), text


def jumped(group: Any) -> float:
    """The clock of the machine is set by an hour while rank 0 waits."""
    with tokenyard.Buffer(group, transport="collective", timeout=scaled(30)) as buffer:
        exchange(buffer)
        real, begin = time.time, time.monotonic()
        if group.rank() == 1:
            time.sleep(scaled(1))
        else:
            time.time = lambda: real() + 3600 * (time.monotonic() > begin + scaled(0.4))
        try:
            exchange(buffer)
        finally:
            time.time = real
        return time.monotonic() - begin


@pytest.mark.processes
def test_a_clock_that_is_set_breaks_nothing() -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        assert max(ranks.run(jumped)) < scaled(20)
