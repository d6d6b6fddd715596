"""Every output of Buffer equals `spec`, bit for bit: on virtual ranks and on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.transports.exchange_case import FP8, Case, expected, job
from tokenyard.testing import Processes, assert_same, poisoned, run_virtual
from tokenyard.transports import available

BASE = Case(num_ranks=0)

CASES = {
    "plain": {},
    "reference-kernels": {"kernels": "reference"},
    "float64": {"dtype": torch.float64, "num_biases": 1},
    "float32": {"dtype": torch.float32, "num_biases": 2},
    "float16-odd-hidden": {"dtype": torch.float16, "hidden": 37},
    "bfloat16-hidden-1": {"hidden": 1},
    "fp8": {"dtype": FP8, "hidden": 128},
    "fp8-odd-hidden": {"dtype": FP8, "hidden": 33},
    "long-rows": {"hidden": 1029, "num_biases": 2},
    "top-1": {"num_topk": 1},
    "top-16": {"num_topk": 16, "num_experts": 64},
    "no-tokens-on-some": {"tokens": (0, 9)},
    "no-tokens-at-all": {"tokens": (0,)},
    "all-to-one-expert": {"kind": "one"},
    "nobody": {"kind": "none"},
    "holes": {"kind": "holes", "num_biases": 1},
    "skewed": {"kind": "skewed"},
    "experts-not-divisible": {"num_experts": 13, "num_topk": 4},
    "fewer-experts-than-ranks": {"num_experts": 3, "num_topk": 2},
    "strided": {"strided": True},
    "alignment": {"expert_alignment": 16},
    "worst-tokens": {"worst": True},
    "one-channel": {"num_sms": 2},
    "two-a-node": {"ranks_per_node": 2, "num_biases": 2},
    "three-a-node-float16": {"ranks_per_node": 3, "dtype": torch.float16, "kernels": "reference"},
}


_ALWAYS = (
    "plain",
    "fp8-odd-hidden",
    "no-tokens-on-some",
    "holes",
    "experts-not-divisible",
    "worst-tokens",
    "two-a-node",
)
SAMPLED = [
    name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in CASES
]  # for numbers of ranks that lie between others: all cases, but most of them by hand


def case_of(name: str, num_ranks: int) -> Case:
    case = replace(BASE, num_ranks=num_ranks, **CASES[name])
    if isinstance(case.ranks_per_node, int):  # a node has no more ranks than there are
        case = replace(case, ranks_per_node=min(case.ranks_per_node, num_ranks))
    return case


def check(case: Case, outs: list[dict]) -> None:
    for rank, (got, want) in enumerate(zip(outs, expected(case), strict=True)):
        assert got.keys() == want.keys()
        for name in want:
            assert_same(*_valid(case, name, got[name], want[name]), f"rank {rank}: {name}")


def _valid(case: Case, name: str, got: object, want: object) -> tuple[object, object]:
    """With num_worst_tokens rows follow that nobody sent: cut them off, and look at their marks."""
    rowwise = name.split()[-1] in ("x", "scales", "topk_idx", "topk_weights", "src_idx")
    if case.worst and rowwise and isinstance(want, Tensor):
        assert isinstance(got, Tensor)
        assert got.shape[0] == case.worst_tokens()
        tail = got[want.shape[0] :]
        mark = -1 if name.split()[-1] in ("topk_idx", "src_idx") else 0
        assert bool((tail.float() == mark).all())
        got = got[: want.shape[0]]
    return got, want


def check_virtual(case: Case) -> None:
    with poisoned():
        outs = run_virtual(job, case.num_ranks, case).results
    check(case, outs)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks(name: str, num_ranks: int) -> None:
    check_virtual(case_of(name, num_ranks))


@pytest.mark.parametrize("num_ranks", [4, 17, 64])
@pytest.mark.parametrize("name", SAMPLED)
def test_more_virtual_ranks(name: str, num_ranks: int) -> None:
    check_virtual(case_of(name, num_ranks))


@pytest.mark.parametrize("transport", ["direct", "ring"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks_that_share_memory(name: str, num_ranks: int, transport: str) -> None:
    check_sharing(name, num_ranks, transport)


@pytest.mark.parametrize("transport", ["direct", "ring"])
@pytest.mark.parametrize("name", SAMPLED)
def test_17_virtual_ranks_that_share_memory(name: str, transport: str) -> None:
    check_sharing(name, 17, transport)


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


def started(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param, timeout=60) as ranks:
        yield ranks


processes = pytest.fixture(started, scope="module", params=[1, 2, 3, 8])
between = pytest.fixture(started, scope="module", params=[4, 5, 6, 7])


@pytest.mark.processes
@TRANSPORTS
@pytest.mark.parametrize("name", CASES)
def test_processes(name: str, transport: str, processes: Processes) -> None:
    check_processes(name, transport, processes)


@pytest.mark.processes
@TRANSPORTS
@pytest.mark.parametrize("name", SAMPLED)
def test_numbers_between(name: str, transport: str, between: Processes) -> None:
    check_processes(name, transport, between)


def check_processes(name: str, transport: str, ranks: Processes) -> None:
    case = replace(case_of(name, ranks.num_ranks), transport=transport)
    if transport != "collective":
        case = replace(case, kernels="numba")  # the reference set has no signals
    check(case, ranks.run(job, case))
