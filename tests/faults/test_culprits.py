"""Who is named when ranks die, close their Buffers or come late: the culprit, and nobody else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import give_up, transport_of
from tests.cases.peers import exchange
from tokenyard import opening
from tokenyard.testing import Exited, Processes, run_virtual

pytestmark = pytest.mark.faults

Told = tuple[str, tuple[int, ...]]


def told(buffer: tokenyard.Buffer) -> Told:
    try:
        exchange(buffer)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks
    return "nothing", ()


def open_buffer(group: Any, transport: str) -> tokenyard.Buffer:
    """Hierarchical: every rank on a node of its own."""
    nodes = 1 if transport == "hierarchical" else None
    return tokenyard.Buffer(group, transport=transport, ranks_per_node=nodes, timeout=scaled(60))


def with_the_store_of(holder: int, group: Any) -> Any:
    """A group like this one, whose store lives and dies with one of its ranks."""
    rank, size, port = group.rank(), group.size(), torch.zeros(1, dtype=torch.int64)
    held = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == holder else None
    if held is not None:
        port[0] = held.port
    dist.broadcast(port, holder, group)
    store = held or dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist.group.WORLD


def the_holder_dies(group: Any, transport: str, holder: int) -> Told:
    with open_buffer(with_the_store_of(holder, group), transport) as buffer:
        exchange(buffer)
        if group.rank() == holder:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(buffer)


@pytest.mark.processes
@pytest.mark.parametrize("transport, holder", [("collective", 0), ("hierarchical", 2)])
def test_the_rank_that_holds_the_store_dies(transport: str, holder: int) -> None:
    with Processes(4, timeout=scaled(120)) as ranks:
        answers = ranks.run(the_holder_dies, transport, holder, may_die=True)
    assert answers.pop(holder) == Exited(-signal.SIGKILL)
    assert answers == [("PeerDied", (holder,))] * 3


def one_dies_and_one_is_busy(group: Any, transport: str) -> Told:
    with open_buffer(group, transport) as buffer:
        exchange(buffer)
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank() == 2:
            time.sleep(scaled(2))
        return told(buffer)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["collective", "hierarchical"])
def test_a_rank_that_is_merely_busy_is_not_named(transport: str) -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        answers = ranks.run(one_dies_and_one_is_busy, transport, may_die=True)
    assert answers.pop(1) == Exited(-signal.SIGKILL)
    assert answers == [("PeerDied", (1,))] * 2


def on_machines(
    group: Any, machines: list[int], busy: tuple[int, ...], transport: str = "collective"
) -> Told:
    """As if ranks were on these machines: whether others live must be heard, and is not seen."""
    real = opening._machine
    opening._machine = lambda: machines[group.rank()]
    try:
        with tokenyard.Buffer(group, transport=transport, timeout=scaled(60)) as buffer:
            exchange(buffer)
            if group.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if group.rank() in busy:
                time.sleep(scaled(2))
            return told(buffer)
    finally:
        opening._machine = real


@pytest.mark.processes
def test_ranks_of_a_machine_speak_for_each_other() -> None:
    """Rank 3 is busy; rank 2, on the same machine, sees that it lives."""
    with Processes(4, timeout=scaled(120)) as ranks:
        answers = ranks.run(on_machines, [5, 5, 7, 7], (3,), may_die=True)
    assert answers.pop(1) == Exited(-signal.SIGKILL)
    assert answers == [("PeerDied", (1,))] * 3


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["collective", "hierarchical"])
def test_ranks_that_nobody_sees_and_that_compute_are_not_named(transport: str) -> None:
    """Four machines of one rank, as the Buffer sees them: ranks 0 and 2 come two seconds late."""
    with Processes(4, timeout=scaled(120)) as ranks:
        answers = ranks.run(on_machines, [5, 6, 7, 8], (0, 2), transport, may_die=True)
    assert answers.pop(1) == Exited(-signal.SIGKILL)
    assert answers == [("PeerDied", (1,))] * 3


def one_closes(group: Any, transport: str) -> tuple[Told, Told, str]:
    """What the others are told; and that of another Buffer, which goes on."""
    with open_buffer(group, transport) as buffer, open_buffer(group, transport) as other:
        exchange(buffer)
        exchange(other)
        if group.rank() == 1:
            buffer.close()
            dist.barrier(group)
            time.sleep(scaled(0.4))  # long enough for the others to look for words
            return ("", ()), told(other), ""
        answer = told(buffer)
        dist.barrier(group)
        try:
            exchange(buffer)
        except tokenyard.BufferClosed as error:
            return answer, told(other), str(error)
        return answer, told(other), "nothing"


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["collective", "hierarchical"])
def test_a_rank_that_closes_its_buffer_has_left(transport: str) -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        answers = ranks.run(one_closes, transport)
    for answer, other, afterwards in answers[::2]:
        assert answer == ("PeerLeft", (1,))
        assert "broken by an earlier error" in afterwards
        assert other == ("nothing", ())
    assert answers[1][1] == ("nothing", ())


def a_virtual_rank_closes(group: Any) -> Told:
    with tokenyard.Buffer(group, timeout=scaled(60)) as buffer, tokenyard.Buffer(group) as other:
        exchange(buffer)
        if group.rank() == 1:
            buffer.close()
        answer = told(buffer) if group.rank() != 1 else ("", ())
        exchange(other)
        return answer


def test_a_virtual_rank_that_closes_its_buffer_has_left() -> None:
    answers = run_virtual(a_virtual_rank_closes, 3).results
    assert answers[::2] == [("PeerLeft", (1,))] * 2


def noticed_between_two_looks(group: Any) -> Told:
    """Rank 1 finds rank 2 dead, says so and leaves, just after rank 0 has looked for such words."""
    with tokenyard.Buffer(group, transport="direct", timeout=scaled(60)) as buffer:
        exchange(buffer)
        if group.rank() == 0:
            liveness = transport_of(buffer).node.liveness
            look = liveness.have_left

            def seen_at_last() -> set[int]:
                group_store.set("looked", "")
                group_store.wait(["left"])
                return look()

            group_store, liveness.have_left = store(group), seen_at_last
            return told(buffer)
        if group.rank() == 1:
            group_store = store(group)
            group_store.wait(["looked"])
            give_up(buffer, tokenyard.PeerDied("rank 2 died", ranks=(2,), stage="dispatch"))
            buffer.close()
            group_store.set("left", "")
        else:
            store(group).wait(["left"])
            time.sleep(scaled(1))  # its Buffer is open, and it calls nothing
    return "nothing", ()


def store(group: Any) -> Any:
    return dist.distributed_c10d._get_process_group_store(group)


@pytest.mark.processes
def test_a_rank_that_leaves_has_said_why() -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        first, _, _ = ranks.run(noticed_between_two_looks)
    assert first == ("PeerDied", (2,))
