"""One pod a rank: processes that do not see each other share memory by a folder that they share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cases import conformance, low_latency, pods
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.pods import Pods
from tokenyard.testing import Cluster, why_no_cluster

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster())),
]


@pytest.fixture(scope="module")
def box() -> Iterator[Cluster]:
    with Cluster([1, 1, 1, 1], timeout=scaled(60)) as cluster:
        yield cluster


@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))
def test_pods_exchange_as_one_node(box: Cluster, num_ranks: int, tmp_path: Path) -> None:
    with Pods(box, num_ranks, pods.exchange_in_both_modes, tmp_path) as ranks:
        told, _ = ranks.answers(*range(num_ranks))
    assert {one["way"] for one in told} == {"1 node, direct"}
    for number, case in enumerate(pods.cases(num_ranks)):
        conformance.check(case, [one["plain"][number] for one in told])
    low_latency.check(low_latency.Case(num_ranks=num_ranks), [one["low"] for one in told])


@pytest.mark.parametrize("job", [pods.go_on, pods.go_on_low])
@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(2,)))
def test_a_pod_that_is_killed_is_named_at_once(
    box: Cluster, num_ranks: int, job: Callable[..., Any], tmp_path: Path
) -> None:
    with Pods(box, num_ranks, job, tmp_path) as ranks:
        ranks.wait_until_going()
        moment = ranks.send(1, signal.SIGKILL)
        told, _ = ranks.answers(*(rank for rank in range(num_ranks) if rank != 1))
    for one in told:
        assert (one["kind"], one["ranks"]) == ("PeerDied", (1,)), one
        assert one["at"] - moment < scaled(2), one


def test_a_pod_that_stands_still_is_named_in_time(box: Cluster, tmp_path: Path) -> None:
    with Pods(box, 2, pods.go_on, tmp_path) as ranks:
        ranks.wait_until_going()
        moment = ranks.send(1, signal.SIGSTOP)
        (told,), _ = ranks.answers(0)
    assert (told["kind"], told["ranks"]) == ("PeerTimeout", (1,)), told
    assert told["at"] - moment < scaled(6), told


class Trouble(NamedTuple):
    """With the folder of two pods, and what one of them says of it."""

    said: str
    script: str = "true"  # in each pod
    settings: Callable[[int], Mapping[str, str]] | None = None


FOLDER = "TOKENYARD_SHARED_FOLDER"
TROUBLES = {
    "missing": Trouble(
        f"{FOLDER}=/nowhere: this rank cannot listen there ([Errno 2] No such file or directory)",
        settings=lambda rank: {FOLDER: "/nowhere"},
    ),
    "read-only": Trouble("[Errno 30] Read-only file system", "mount -o remount,bind,ro {folder}"),
    "not shared": Trouble(
        f"let {FOLDER} be one folder of this machine for all of them",
        "mount -t tmpfs none {folder}",
    ),
    "on one rank": Trouble(
        f"only one of them listens in {FOLDER}",
        settings=lambda rank: {} if rank else {FOLDER: "{folder}"},
    ),
    "nowhere": Trouble("let ranks share a PID namespace", settings=lambda rank: {}),
}


@pytest.mark.parametrize("name", at_night(TROUBLES, gate=("not shared",)))
def test_without_such_a_folder_pods_are_nodes_and_say_why(
    box: Cluster, name: str, tmp_path: Path
) -> None:
    said, script, settings = TROUBLES[name]

    def make_ready(rank: int) -> str:
        return script.format(folder=tmp_path / f"pod-{rank}")

    def set_up(rank: int) -> dict[str, str]:
        given = {FOLDER: "{folder}"} if settings is None else settings(rank)
        return {name: at.format(folder=tmp_path / f"pod-{rank}") for name, at in given.items()}

    with Pods(box, 2, pods.exchange_once, tmp_path, script=make_ready, settings=set_up) as ranks:
        told, lines = ranks.answers(0, 1)
    assert told == [{"way": "2 nodes, hierarchical", "good": True}] * 2
    assert any(said in line for line in lines.splitlines()), lines
    assert "so they count as two nodes" in lines
