"""A network that is cut, and nodes that die: every rank is told who, in time."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from tests.cases.clock import scaled
from tests.cases.conformance import check
from tests.cases.exchange import Case, job
from tests.cases.lanes import at_night
from tokenyard.testing import Cluster, Exited, why_no_cluster
from tokenyard.testing.cluster import _NAMESPACES, _PREFIX

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.faults,
    pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster())),
]


def dispatch_until_it_fails(group: Any, sizes: list[int], timeout: float) -> dict[str, Any]:
    """Long dispatches over a slow network, one after the other; what came in their way, and when.

    time.monotonic is the machine's, so all processes of a box share it.
    """
    x = torch.ones(512, 2048)
    topk_idx = torch.arange(group.size()).repeat(512, 1)
    buffer = tokenyard.Buffer(
        group, transport="hierarchical", ranks_per_node=sizes, timeout=timeout
    )
    try:
        for _ in range(1000):
            buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=torch.ones(topk_idx.shape),
                num_experts=group.size(),
            )
    except tokenyard.PeerError as error:
        kind, ranks, at = type(error).__name__, error.ranks, time.monotonic()
        return {"kind": kind, "ranks": ranks, "text": str(error), "at": at}
    raise AssertionError("nothing happened")


def in_a_new_group(group: Any, case: Case) -> dict[str, Any]:
    return job(dist.new_group(), case)


@pytest.mark.parametrize("node", at_night([0, 1], gate=(1,)))
def test_partition(node: int) -> None:
    """Five seconds without a network, and a time limit of two."""
    with Cluster([2, 2], rate="200mbit", timeout=scaled(120)) as box:
        moment: list[float] = []

        def cut_and_heal() -> None:
            time.sleep(scaled(4))  # ranks have started, and are in the middle of a dispatch
            moment.append(time.monotonic())
            box.cut(node)
            time.sleep(scaled(5))
            box.heal(node)

        fate = threading.Thread(target=cut_and_heal)
        box.run(warm_up, box.sizes)
        fate.start()
        told = box.run(dispatch_until_it_fails, box.sizes, scaled(2.0))
        fate.join()
        for rank, answer in enumerate(told):
            assert answer["at"] - moment[0] < scaled(5.0), answer
            assert answer["kind"] == "PeerTimeout", answer
            others = set(box.ranks_of(1 - rank // 2))
            assert answer["ranks"], answer
            assert set(answer["ranks"]) <= others, answer
        case = Case(num_ranks=4, ranks_per_node=(2, 2), transport="hierarchical")
        check(case, box.run(in_a_new_group, case))


def warm_up(group: Any, sizes: list[int]) -> None:
    """Kernels are loaded."""
    job(group, Case(num_ranks=group.size(), ranks_per_node=tuple(sizes), transport="hierarchical"))


@pytest.mark.parametrize(
    "sizes, node",
    [
        ([2, 2], 0),
        ([2, 1, 1], 1),
        pytest.param([2, 2], 1, marks=pytest.mark.slow),
        pytest.param([2, 2, 2], 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_node(sizes: list[int], node: int) -> None:
    with Cluster(sizes, rate="200mbit", timeout=scaled(120)) as box:
        box.run(warm_up, sizes)
        moment: list[float] = []

        def kill() -> None:
            time.sleep(scaled(3))
            moment.append(time.monotonic())
            box.kill(node)

        fate = threading.Thread(target=kill)
        fate.start()
        told = box.run(dispatch_until_it_fails, sizes, scaled(5.0), may_die=True)
        fate.join()
        dead = box.ranks_of(node)
        for rank, answer in enumerate(told):
            if rank in dead:
                assert answer == Exited(-signal.SIGKILL)
                continue
            assert answer["kind"] in ("PeerDied", "PeerTimeout"), answer
            assert set(answer["ranks"]) & set(dead), answer
            # Mostly 0.6 s; but a full queue may lose the packet that says a connection is gone.
            assert answer["at"] - moment[0] < scaled(20), answer


def test_nothing_is_left_behind() -> None:
    def ours() -> list[str]:
        return [path.name for path in _NAMESPACES.glob(f"{_PREFIX}-*")]

    before = set(ours())
    box = Cluster([1, 1])
    assert len(set(ours()) - before) == 3
    box.close()
    assert set(ours()) <= before
    assert not any(process.is_alive() for process in box.processes)
    with pytest.raises(RuntimeError, match="tbf"):
        Cluster([1, 1], rate="fast")
    assert set(ours()) <= before
