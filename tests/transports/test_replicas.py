"""Experts with copies: every call equals `spec`, bit for bit, on every transport."""

from __future__ import annotations

import pytest
import torch

from tests.cases.exchange import FP8
from tests.cases.processes import Pools
from tests.cases.replicas import SLOTS, Case, check, check_low_latency, job, low_latency_job
from tokenyard.testing import run_virtual


def run(case: Case) -> None:
    check(case, run_virtual(job, case.num_ranks, case).results)


@pytest.mark.parametrize("transport", ["direct", "ring", "collective"])
@pytest.mark.parametrize("num_ranks", SLOTS)
def test_on_one_node(transport: str, num_ranks: int) -> None:
    run(Case(num_ranks=num_ranks, transport=transport))


@pytest.mark.parametrize("num_ranks", [4, 6, 8])
@pytest.mark.parametrize("compiled", [True, False])
def test_between_nodes(num_ranks: int, compiled: bool) -> None:
    run(Case(num_ranks=num_ranks, transport="hierarchical", ranks_per_node=2, compiled=compiled))


@pytest.mark.parametrize(
    "case",
    [
        Case(num_ranks=4, transport="direct"),
        Case(num_ranks=4, transport="direct", dtype=FP8),
        Case(num_ranks=3, transport="ring", dtype=FP8),
        Case(num_ranks=4, transport="collective", kernels="reference", dtype=torch.float64),
        Case(num_ranks=6, transport="hierarchical", ranks_per_node=3, dtype=FP8),
        Case(num_ranks=5, transport="collective", ranks_per_node=2, kind="one"),
    ],
    ids=lambda case: f"{case.transport}-{case.dtype}-{case.num_ranks}",
)
def test_other_rows_and_kernels(case: Case) -> None:
    run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case(num_ranks=1, transport="direct"),
        Case(num_ranks=4, transport="direct"),
        Case(num_ranks=8, transport="direct", fp8=True, hidden=128),
        Case(num_ranks=6, transport="hierarchical", ranks_per_node=2),
        Case(num_ranks=4, transport="collective", fp8=True, hidden=128),
    ],
    ids=lambda case: f"{case.transport}-{case.num_ranks}",
)
def test_low_latency(case: Case) -> None:
    check_low_latency(case, run_virtual(low_latency_job, case.num_ranks, case).results)


@pytest.mark.processes
def test_two_processes(processes: Pools) -> None:
    case = Case(num_ranks=2)
    check(case, processes(2).run(job, case))
    check_low_latency(case, processes(2).run(low_latency_job, case))
