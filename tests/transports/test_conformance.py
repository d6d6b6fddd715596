"""Every output of Buffer equals `spec`, bit for bit: on virtual ranks and on real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cases.conformance import BASE, CASES, FEW, SAMPLED, case_of, check
from tests.cases.exchange import Case, job
from tests.cases.inside import little_is_much
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tokenyard.testing import Processes, poisoned, run_virtual
from tokenyard.transports import available


def check_virtual(case: Case) -> None:
    with poisoned():
        outs = run_virtual(job, case.num_ranks, case).results
    check(case, outs)


@pytest.mark.parametrize("num_ranks", at_night([1, 2, 3, 5, 8], gate=(1, 3, 8)))
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks(name: str, num_ranks: int) -> None:
    check_virtual(case_of(name, num_ranks))


@pytest.mark.parametrize("num_ranks", at_night([4, 17, 64], gate=(17,)))
@pytest.mark.parametrize("name", SAMPLED)
def test_more_virtual_ranks(name: str, num_ranks: int) -> None:
    check_virtual(case_of(name, num_ranks))


SHARING = pytest.mark.parametrize("transport", ["direct", "ring"])


@SHARING
@pytest.mark.parametrize("num_ranks", at_night([1, 2, 5], gate=(1, 5)))
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks_that_share_memory(name: str, num_ranks: int, transport: str) -> None:
    check_sharing(name, num_ranks, transport)


@SHARING
@pytest.mark.parametrize("name", FEW)
def test_17_virtual_ranks_that_share_memory(name: str, transport: str) -> None:
    check_sharing(name, 17, transport)


@pytest.mark.parametrize("name", CASES)
def test_threads_move_rows(name: str) -> None:
    with little_is_much():
        check_sharing(name, 3, "direct")


def check_sharing(name: str, num_ranks: int, transport: str) -> None:
    case = replace(case_of(name, num_ranks), transport=transport, kernels="numba")
    check(case, run_virtual(job, num_ranks, case).results)


@pytest.mark.parametrize(
    "placement",
    [(0, 0, 0, 0), (3, 2, 1, 0, 0, 1, 2, 3), (2, 0, 2, 2, 0, 2)],
    ids=["all-on-one-rank", "interleaved", "ranks-without-experts"],
)
@pytest.mark.parametrize("kernels", ["numba", "reference"])
def test_placement(placement: tuple[int, ...], kernels: str) -> None:
    case = replace(
        BASE, num_ranks=4, num_experts=len(placement), placement=placement, kernels=kernels
    )
    with poisoned():
        outs = run_virtual(job, 4, case).results
    check(case, outs)


TRANSPORTS = pytest.mark.parametrize(
    "transport", [one for one in available() if one != "hierarchical"]
)


def parameter(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# Of the module, so that tests with as many processes follow each other.
NUMBERS = at_night(range(1, 9), gate=(1, 3, 8))
num_processes = pytest.fixture(parameter, scope="module", params=NUMBERS)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_two_processes_that_share_memory(name: str, processes: Pools) -> None:
    check_processes(name, "direct", processes(2))


@pytest.mark.processes
@TRANSPORTS
@pytest.mark.parametrize("name", SAMPLED)
def test_processes(name: str, transport: str, processes: Pools, num_processes: int) -> None:
    check_processes(name, transport, processes(num_processes))


def check_processes(name: str, transport: str, ranks: Processes) -> None:
    case = replace(case_of(name, ranks.num_ranks), transport=transport)
    if transport != "collective":
        case = replace(case, kernels="numba")  # the reference set has no signals
    check(case, ranks.run(job, case))
