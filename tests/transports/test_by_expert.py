"""dispatch_by_expert and combine_by_expert equal `spec`, bit for bit, on every transport."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cases.by_expert import check, job
from tests.cases.conformance import BASE, CASES, case_of
from tests.cases.exchange import Case
from tests.cases.processes import Pools
from tokenyard.testing import poisoned, run_virtual
from tokenyard.transports import available

# Biases, a fixed number of rows and channels are no concern of these calls.
NAMES = [name for name in CASES if name not in ("worst-tokens", "one-channel")]
EVERY_CASE = pytest.mark.parametrize("name", NAMES)
FEW = ("plain", "fp8", "alignment", "holes", "no-tokens-on-some", "no-tokens-at-all", "two-a-node")


def check_virtual(case: Case) -> None:
    with poisoned():
        outs = run_virtual(job, case.num_ranks, case).results
    check(case, outs)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@EVERY_CASE
def test_virtual_ranks(name: str, num_ranks: int) -> None:
    check_virtual(case_of(name, num_ranks))


@pytest.mark.parametrize("transport", ["direct", "ring"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@EVERY_CASE
def test_virtual_ranks_that_share_memory(name: str, num_ranks: int, transport: str) -> None:
    case = replace(case_of(name, num_ranks), transport=transport, kernels="numba")
    check(case, run_virtual(job, num_ranks, case).results)


@pytest.mark.parametrize(
    "placement",
    [(0, 0, 0, 0), (3, 2, 1, 0, 0, 1, 2, 3), (2, 0, 2, 2, 0, 2)],
    ids=["all-on-one-rank", "interleaved", "ranks-without-experts"],
)
@pytest.mark.parametrize("transport", ["collective", "direct"])
def test_placement(placement: tuple[int, ...], transport: str) -> None:
    case = replace(
        BASE, num_ranks=4, num_experts=len(placement), placement=placement, transport=transport
    )
    check_virtual(replace(case, expert_alignment=4))


@pytest.mark.processes
@pytest.mark.parametrize("transport", available())
@pytest.mark.parametrize("name", FEW)
def test_processes(name: str, transport: str, processes: Pools) -> None:
    case = replace(case_of(name, 4), transport=transport)
    if transport == "hierarchical":
        case = replace(case, ranks_per_node=2)
    check(case, processes(4).run(job, case))


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "ring"])
def test_rows_that_are_streamed(transport: str, processes: Pools) -> None:
    """Long ones, more than a megabyte in all."""
    case = replace(BASE, num_ranks=2, tokens=(90, 70), hidden=1024, num_topk=6, expert_alignment=8)
    case = replace(case, transport=transport)
    check(case, processes(2).run(job, case))
