"""Random cases on virtual ranks against `spec`: 50 in the gate, 20,000 at night."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases.conformance import check
from tests.cases.exchange import FP8, Case, job
from tokenyard.testing import ROUTINGS, poisoned, run_virtual


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 9))
    num_experts = draw(st.integers(1, 40))
    placement = None
    if draw(st.booleans()):
        ranks = st.integers(0, num_ranks - 1)
        placement = tuple(draw(st.lists(ranks, min_size=num_experts, max_size=num_experts)))
    transport = draw(st.sampled_from(["collective", "direct", "ring", "hierarchical"]))
    return Case(
        num_ranks=num_ranks,
        tokens=tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=num_ranks))),
        hidden=draw(st.integers(1, 70)),
        num_topk=draw(st.integers(1, min(16, num_experts))),
        num_experts=num_experts,
        dtype=draw(
            st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, FP8])
        ),
        kind=draw(st.sampled_from(ROUTINGS)),
        placement=placement,
        ranks_per_node=draw(st.none() | st.integers(1, num_ranks)),
        transport=transport,
        # the reference set has no signals
        kernels=draw(
            st.sampled_from(["numba", "reference"] if transport == "collective" else ["numba"])
        ),
        num_biases=draw(st.integers(0, 2)),
        expert_alignment=draw(st.integers(1, 130)),
        worst=draw(st.booleans()),
        strided=draw(st.booleans()),
        num_sms=draw(st.sampled_from([2, 4, 20, 48])),
        seed=draw(st.integers(0, 10_000)),
        way=draw(st.sampled_from(["compiled", "general", "mixed"]))
        if transport == "hierarchical"
        else "compiled",
    )


def check_on_virtual_ranks(case: Case) -> None:
    with poisoned():
        outs = run_virtual(job, case.num_ranks, case).results
    check(case, outs)


ALWAYS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "database": None,
}


@pytest.mark.timeout(400)
@settings(max_examples=50, derandomize=True, **ALWAYS)
@given(cases())
def test_random_cases(case: Case) -> None:
    check_on_virtual_ranks(case)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("part", range(20))
@settings(max_examples=1_000, derandomize=False, **ALWAYS)
@given(case=cases())
def test_very_many_random_cases(part: int, case: Case) -> None:
    """In parts, so that workers share them. Each draws other cases, also where CI is set."""
    check_on_virtual_ranks(case)
