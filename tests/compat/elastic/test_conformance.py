"""ElasticBuffer equals `spec`, bit for bit, on every transport."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases.conformance import BASE
from tests.cases.elastic import ElasticCase, check, job
from tests.cases.exchange import FP8
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tokenyard.testing import poisoned, run_virtual
from tokenyard.transports import available

CASES: dict[str, dict[str, Any]] = {
    "plain": {"num_topk": 5, "num_experts": 16},
    "reference-kernels": {"kernels": "reference", "num_topk": 4, "num_biases": 1},
    "float32": {"dtype": torch.float32, "num_biases": 2, "num_topk": 6},
    "fp8": {"dtype": FP8, "hidden": 128, "num_topk": 4},
    "holes": {"kind": "holes", "num_biases": 2, "num_topk": 5},
    "nobody": {"kind": "none", "num_biases": 1},
    "no-tokens-at-all": {"tokens": (0,)},
    "top-1": {"num_topk": 1},
    "two-a-node": {"ranks_per_node": 2, "num_biases": 2, "num_topk": 7},
}
WAYS: dict[str, dict[str, bool]] = {
    "compact": {},
    "expanded": {"do_expand": True},
    "compact-no-sync": {"do_cpu_sync": False},
    "expanded-no-sync": {"do_expand": True, "do_cpu_sync": False},
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def case_of(name: str, way: str, num_ranks: int, **more: Any) -> ElasticCase:
    fields = {"num_experts": 8, "expert_alignment": 4} | CASES[name] | more
    if "ranks_per_node" in fields:
        fields["ranks_per_node"] = min(fields["ranks_per_node"], num_ranks)
    # Every rank has experts, and as many as any other.
    fields["num_experts"] = -(-fields["num_experts"] // num_ranks) * num_ranks
    return ElasticCase(exchange=replace(BASE, num_ranks=num_ranks, **fields), **WAYS[way])


def check_virtual(case: ElasticCase) -> None:
    with poisoned():
        outs = run_virtual(job, case.exchange.num_ranks, case).results
    check(case, outs)


@pytest.mark.parametrize("num_ranks", at_night([1, 2, 4], gate=(1, 4)))
@pytest.mark.parametrize("name", CASES)
@EVERY_WAY
def test_virtual_ranks(name: str, way: str, num_ranks: int) -> None:
    check_virtual(case_of(name, way, num_ranks))


@pytest.mark.parametrize("num_ranks", at_night([3, 5, 6, 7, 8], gate=(5,)))
@pytest.mark.parametrize("name", ["plain", "holes"])
@EVERY_WAY
def test_more_virtual_ranks(name: str, way: str, num_ranks: int) -> None:
    check_virtual(case_of(name, way, num_ranks))


@EVERY_WAY
def test_a_rank_without_experts(way: str) -> None:
    exchange = replace(BASE, num_ranks=3, num_experts=2, num_topk=2, expert_alignment=4)
    check_virtual(ElasticCase(exchange=exchange, **WAYS[way]))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [16, 64])
@pytest.mark.parametrize("name", ["plain", "fp8"])
@EVERY_WAY
def test_many_virtual_ranks(name: str, way: str, num_ranks: int) -> None:
    case = case_of(name, way, num_ranks, num_experts=64, num_topk=8, tokens=(3, 0, 5))
    check_virtual(case)


@pytest.mark.parametrize("transport", ["direct", "ring"])
@pytest.mark.parametrize("num_ranks", at_night([1, 3], gate=(3,)))
@pytest.mark.parametrize("name", ["plain", "float32", "fp8", "holes", "no-tokens-at-all"])
@EVERY_WAY
def test_virtual_ranks_that_share_memory(
    name: str, way: str, num_ranks: int, transport: str
) -> None:
    case = case_of(name, way, num_ranks, transport=transport, kernels="numba")
    check(case, run_virtual(job, num_ranks, case).results)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize("transport", ["direct", "collective", "hierarchical"])
@EVERY_WAY
def test_reductions_on_several_nodes(
    way: str, transport: str, multiple: bool, hybrid: bool
) -> None:
    """Sums by node, or not, and of shares, or of all rows at once."""
    case = case_of("two-a-node", way, 4, transport=transport)
    case = replace(case, allow_hybrid_mode=hybrid, allow_multiple_reduction=multiple)
    check(case, run_virtual(job, 4, case).results)


def check_processes(case: ElasticCase, processes: Pools) -> None:
    exchange = case.exchange
    if exchange.transport == "hierarchical":
        per_node = 2 if exchange.num_ranks % 2 == 0 else 1
        exchange = replace(exchange, ranks_per_node=per_node)
    case = replace(case, exchange=exchange)
    check(case, processes(exchange.num_ranks).run(job, case))


@pytest.mark.processes
@pytest.mark.parametrize("transport", available())
@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))
@pytest.mark.parametrize("name", ["plain", "float32", "fp8", "holes"])
@pytest.mark.parametrize("way", ["compact", "expanded"])
def test_processes(name: str, way: str, num_ranks: int, transport: str, processes: Pools) -> None:
    check_processes(case_of(name, way, num_ranks, transport=transport), processes)


@pytest.mark.processes
@EVERY_WAY
def test_one_process(way: str, processes: Pools) -> None:
    check_processes(case_of("holes", way, 1), processes)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("transport", available())
@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("name", ["plain", "fp8"])
@EVERY_WAY
def test_more_processes(
    name: str, way: str, num_ranks: int, transport: str, processes: Pools
) -> None:
    check_processes(case_of(name, way, num_ranks, transport=transport), processes)
