"""An agreement by nodes: results equal `spec`, errors raise on all ranks, and few bytes cross."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases import enclosed_errors as errors
from tests.cases.clock import scaled
from tests.cases.conformance import CASES, FEW, SAMPLED, check, name_of, on_nodes
from tests.cases.exchange import job
from tests.cases.inside import transport_of
from tests.cases.processes import Pools
from tokenyard.testing import Processes, run_virtual
from tokenyard.wire import node_blocks

SHAPES = [(2, 2), (3, 2, 1)]
MORE_SHAPES = [(1, 3), (1, 1, 1), (4, 4), (2, 3, 3)]
LATE = 2


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_blocks, "LEAST_RANKS", 2)


def in_process(group: Any, run: Any, *args: Any) -> Any:
    """As the fixture, in a rank's process."""
    before, node_blocks.LEAST_RANKS = node_blocks.LEAST_RANKS, 2
    try:
        return run(group, *args)
    finally:
        node_blocks.LEAST_RANKS = before


@pytest.mark.parametrize("sizes", SHAPES, ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks(name: str, sizes: tuple[int, ...]) -> None:
    case = on_nodes(name, sizes)
    check(case, run_virtual(job, case.num_ranks, case).results)


@pytest.mark.parametrize("sizes", MORE_SHAPES, ids=name_of)
@pytest.mark.parametrize("name", FEW)
def test_more_shapes(name: str, sizes: tuple[int, ...]) -> None:
    case = on_nodes(name, sizes)
    check(case, run_virtual(job, case.num_ranks, case).results)


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)], ids=name_of)
@pytest.mark.parametrize("name", SAMPLED)
def test_processes(name: str, sizes: tuple[int, ...], processes: Pools) -> None:
    case = on_nodes(name, sizes)
    check(case, processes(case.num_ranks).run(in_process, job, case))


def way(group: Any) -> bool:
    with tokenyard.Buffer(group, transport="hierarchical", ranks_per_node=2) as buffer:
        return transport_of(buffer).agrees_by_nodes


def test_all_of_these_are_by_nodes() -> None:
    assert run_virtual(way, 4).results == [True] * 4
    assert run_virtual(way, 2).results == [False] * 2  # one node


@pytest.mark.parametrize("size, per_node", [(2, 1), (4, 2), (6, 3), (5, 3)], ids=str)
def test_errors_on_virtual_ranks(size: int, per_node: int) -> None:
    errors.check(run_virtual(errors.fail, size, per_node, timeout=scaled(120)).results)


@pytest.mark.processes
def test_errors_on_processes(processes: Pools) -> None:
    errors.check(processes(4).run(in_process, errors.fail, 2))


def come_late(group: Any, skew: float, dies: bool) -> tuple[str, tuple[int, ...]]:
    """One rank does not come in time, or never, and its neighbour comes when other nodes wait."""
    rank, ones = group.rank(), torch.ones(1, 1)
    with tokenyard.Buffer(
        group, transport="hierarchical", ranks_per_node=2, timeout=scaled(3)
    ) as buffer:
        buffer.all_gather(ones)
        time.sleep(scaled(skew) if rank == LATE + 1 else 0)
        try:
            if rank == LATE and dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == LATE:
                time.sleep(scaled(6))
            buffer.all_gather(ones)
        except tokenyard.PeerError as error:
            return type(error).__name__, error.ranks
        return "nothing", ()


@pytest.mark.processes
@pytest.mark.parametrize("skew", [0.0, 1.5])
@pytest.mark.parametrize("dies", [False, True])
def test_the_rank_that_does_not_come_is_named(skew: float, dies: bool) -> None:
    with Processes(6, timeout=scaled(60)) as ranks:
        answers = ranks.run(in_process, come_late, skew, dies, may_die=dies)
    del answers[LATE]
    assert answers == [("PeerDied" if dies else "PeerTimeout", (LATE,))] * 5


def two_calls(group: Any, num_experts: int) -> None:
    ones, size = torch.ones(2, 8), group.size()
    topk_idx = (torch.arange(4) + 3 * group.rank()).repeat(2, 1) % num_experts
    with tokenyard.Buffer(group, transport="hierarchical", ranks_per_node=4) as buffer:
        weights = torch.ones(topk_idx.shape)
        got: Any = buffer.dispatch(
            ones, topk_idx=topk_idx, topk_weights=weights, num_experts=num_experts
        )
        sums = buffer.combine(got.recv_x, got.handle).x
        assert sums.eq(len({int(one) * size // num_experts for one in topk_idx[0]})).all()


def test_one_block_crosses_between_two_nodes() -> None:
    """Five nodes of 4: each rank speaks with two others at most."""
    run = run_virtual(two_calls, 20, 40)
    nodes = torch.arange(20) // 4
    for stage, width in (("dispatch (notify)", 3), ("combine (notify)", 0)):
        sent = run.bytes_sent[stage]
        assert (sent > 0).sum(1).max() == node_blocks.most_messages(20, 4) == 2
        between = [
            int((sent[nodes == a][:, nodes == b] > 0).sum()) for a in range(5) for b in range(5)
        ]
        assert between == (1 - torch.eye(5, dtype=torch.int64)).flatten().tolist()
        assert sent.unique().tolist() == [0, 8 * node_blocks.block_words(4, width)]
        assert torch.equal(sent > 0, (sent > 0).t())
