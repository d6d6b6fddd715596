"""Which ranks share a node: found, or given; and what all nodes agree on."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases import late_opening
from tests.cases.asynchronous import both_ways
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard import opening
from tokenyard.errors import SharedMemoryError
from tokenyard.shm import segment
from tokenyard.testing import Processes, run_virtual
from tokenyard.topology import Topology

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(4)


def where(buffer: tokenyard.Buffer) -> tuple[str, tuple[int, ...]]:
    """The transport that was chosen, and the node of each rank."""
    stats = buffer.stats()
    return stats["transport"], tuple(stats["nodes"])


def on_other_machines(group: Any, machines: list[int]) -> tuple[str, tuple[int, ...]]:
    """As if the boot ids of ranks were these."""
    real = opening._machine
    opening._machine = lambda: machines[group.rank()]
    try:
        with tokenyard.Buffer(group) as buffer:
            assert dispatch(buffer) == 6 * group.size()
            return where(buffer)
    finally:
        opening._machine = real


def dispatch(buffer: tokenyard.Buffer, num_tokens: int = 6) -> int:
    """Every token to every rank."""
    topk_idx = torch.arange(buffer.group_size).repeat(num_tokens, 1)
    got: Any = buffer.dispatch(
        torch.ones(num_tokens, 64),
        topk_idx=topk_idx,
        topk_weights=torch.ones(topk_idx.shape),
        num_experts=buffer.group_size,
    )
    combined = buffer.combine(got.recv_x, got.handle).x
    assert combined.eq(buffer.group_size).all()
    return len(got.recv_x)


@pytest.mark.parametrize(
    "machines, nodes, name",
    [
        ([5, 5, 5, 5], (0, 0, 0, 0), "direct"),
        ([7, 7, 5, 5], (0, 0, 1, 1), "hierarchical"),
        ([5, 7, 5, 7], (0, 1, 0, 1), "hierarchical"),
        ([5, 7, 7, 7], (0, 1, 1, 1), "hierarchical"),
        ([4, 5, 6, 7], (0, 1, 2, 3), "hierarchical"),
    ],
    ids=str,
)
def test_machines_are_told_apart(
    ranks: Processes, machines: list[int], nodes: tuple[int, ...], name: str
) -> None:
    assert ranks.run(on_other_machines, machines) == [(name, nodes)] * 4


class Told(logging.Handler):
    """What the library has logged as a warning, inside a rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("tokenyard").addHandler(self)
        return self.texts

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("tokenyard").removeHandler(self)


def in_two_containers(group: Any) -> tuple[str, tuple[int, ...], list[str]]:
    """Ranks 0 and 1 cannot open the files of ranks 2 and 3, nor the other way round."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    torch.distributed.all_gather(pids, torch.tensor([os.getpid()]))
    hidden = [int(pid) for rank, pid in enumerate(pids) if rank // 2 != group.rank() // 2]
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(tuple(f"/proc/{pid}/" for pid in hidden)):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    segment.os.open = refuse
    try:
        with Told() as told, tokenyard.Buffer(group) as buffer:
            assert dispatch(buffer) == 24
            return *where(buffer), told
    finally:
        segment.os.open = real


NO_MEMORY = "is on the machine of rank 0 and cannot use its memory, so they count as two nodes: "


def test_ranks_that_cannot_attach_each_others_memory_are_on_different_nodes(
    ranks: Processes,
) -> None:
    for rank, (name, nodes, told) in enumerate(ranks.run(in_two_containers)):
        assert (name, nodes) == ("hierarchical", (0, 0, 1, 1))
        if rank != 2:  # one rank of a node says so
            assert told == []
            continue
        assert told[0].startswith(f"rank 2 {NO_MEMORY}Permission denied for process ")
        assert len(told) == 1


def as_nobody(group: Any) -> tuple[tuple[int, ...], list[str]]:
    """Rank 3 looks at the others as another user (who could not open the group's store)."""
    real = opening.why_not_attached

    def look(seconds: float, *words: int) -> str | None:
        os.seteuid(65534)
        try:
            return real(seconds, *words)
        finally:
            os.seteuid(0)

    if group.rank() == 3:
        opening.why_not_attached = look  # type: ignore[assignment]
    try:
        with Told() as told, tokenyard.Buffer(group) as buffer:
            return where(buffer)[1], told
    finally:
        opening.why_not_attached = real


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_rank_is_on_another_node_and_says_why(ranks: Processes) -> None:
    results = ranks.run(as_nobody)
    assert [nodes for nodes, _ in results] == [(0, 0, 0, 1)] * 4
    assert [len(told) for _, told in results] == [0, 0, 0, 1]
    told = results[3][1][0]
    assert told.startswith(f"rank 3 {NO_MEMORY}Permission denied for process ")
    assert "of user 0, while this one is of user 65534" in told
    assert told.endswith("run all ranks as one user")


def too_small(group: Any, culprit: int) -> tuple[str, int]:
    """One rank may make no file, memory files too, larger than 1 MiB."""
    with tokenyard.Buffer(
        group, transport="hierarchical", ranks_per_node=[3, 1], timeout=scaled(60)
    ) as buffer:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if group.rank() == culprit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(SharedMemoryError) as caught:
                dispatch(buffer, num_tokens=4000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return str(caught.value), dispatch(buffer)


@pytest.mark.parametrize("culprit", [1, 3])
def test_too_little_memory_on_one_rank_is_an_error_on_all_nodes(
    ranks: Processes, culprit: int
) -> None:
    for rank, (text, rows) in enumerate(ranks.run(too_small, culprit)):
        if rank == culprit:
            assert "bytes of shared memory are needed" in text
        else:
            assert (
                text
                == f"dispatch: rank {culprit} could not get memory for its rows, on rank {rank}"
            )
        assert rows == 24  # and the Buffer goes on working


def test_asynchronous_calls_over_two_levels(ranks: Processes) -> None:
    assert ranks.run(both_ways, "hierarchical", range(40), (2, 2)) == [40] * 4


def test_given_nodes_choose_two_levels(ranks: Processes, caplog: pytest.LogCaptureFixture) -> None:
    assert ranks.run(chosen, [1, 3]) == ["hierarchical"] * 4
    with caplog.at_level(logging.INFO, logger="tokenyard"):
        assert run_virtual(chosen, 4, [1, 3]).results == ["collective over loopback"] * 4


def chosen(group: Any, sizes: list[int]) -> str:
    with tokenyard.Buffer(group, ranks_per_node=sizes) as buffer:
        return where(buffer)[0]


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (3, 2, 1), (1, 4, 2, 4)], ids=str)
def test_every_rank_is_reached_once_from_every_rank_of_another_node(sizes: tuple[int, ...]) -> None:
    topology = Topology.of_sizes(sizes)
    for rank in range(topology.num_ranks):
        partners = [
            other
            for other in range(topology.num_ranks)
            if rank in [source for _, source in topology.upstream(other)]
        ]
        homes = [topology.node_of_rank[other] for other in partners]
        assert homes == [n for n in range(len(sizes)) if n != topology.node_of_rank[rank]]


def test_the_environment_gives_the_timeout_of_programs_that_give_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(group: Any) -> str:
        """What rank 0 is told that rank 1 leaves alone."""
        with tokenyard.Buffer(group) as buffer:
            if group.rank() == 0:
                with pytest.raises(tokenyard.PeerTimeout) as raised:
                    dispatch(buffer)
                told.set()
                return str(raised.value)
            assert told.wait(scaled(20))
            return ""

    told = threading.Event()
    monkeypatch.setenv("TOKENYARD_TIMEOUT", "0.25")
    assert "0.25 s passed" in run_virtual(alone, 2).results[0]
    for wrong, said in (("soon", "'soon'"), ("-1", "-1.0"), ("nan", "nan")):
        monkeypatch.setenv("TOKENYARD_TIMEOUT", wrong)
        with pytest.raises(ValueError, match=f"TOKENYARD_TIMEOUT is {said}, want seconds above 0"):
            run_virtual(alone, 2)


def test_a_machine_that_cannot_be_named_just_now_is_no_other_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_descriptor(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        opening._machine()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_a_rank_that_comes_late_meets_those_that_try_again(
    processes: Pools, is_first: bool
) -> None:
    if is_first:
        with Processes(3, timeout=scaled(60)) as fresh:
            late_opening.check(fresh.run(late_opening.tries, "collective", True))
    else:
        late_opening.check(processes(2).run(late_opening.tries, "direct", False))


def stall_when_all_have_come(group: Any) -> list[str]:
    """Rank 1 stalls within an opening: what ranks are told then, and when they try again."""
    real = opening._try_probe

    def stall(kernel_set: Any) -> Any:
        time.sleep(scaled(2.5))
        return real(kernel_set)

    if group.rank() == 1:
        opening._try_probe = stall
    told = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            tokenyard.Buffer(group, transport="collective", timeout=scaled(1))
        told.append(f"{type(raised.value).__name__}: {raised.value}")
    return told


def test_a_group_that_is_out_of_step_is_refused() -> None:
    """Gloo would end the process of a rank that came with another exchange than the others."""
    with Processes(2, timeout=scaled(60)) as ranks:
        for first, second in ranks.run(stall_when_all_have_come):
            assert first.startswith("PeerTimeout: Buffer (")
            assert second.startswith("RuntimeError: the group is out of step, since this rank gave")
