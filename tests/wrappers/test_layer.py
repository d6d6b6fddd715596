"""Models with nn.MoE under wrappers: twenty steps on 2 ranks are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.wrappers import layer_jobs as jobs
from tests.wrappers.cases import LAYER, REFUSED
from tests.wrappers.compare import Outcome, assert_like_one_process
from tokenyard.testing import Processes, run_virtual

pytestmark = pytest.mark.processes

Ranks = Callable[[int], Processes]
IN_CI = {"ddp", "fsdp_layers", "fsdp_bfloat16"}


@cache
def one_process(kind: str = "none") -> Outcome:
    return run_virtual(jobs.train, 1, kind).results[0]


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one in IN_CI else pytest.mark.slow) for one in LAYER]
)
def test_twenty_steps(ranks: Ranks, kind: str) -> None:
    if kind == "fsdp_bfloat16":  # one process rounds as well
        (want,) = ranks(1).run(jobs.train, kind)
    else:
        want = one_process("no_sync" if kind == "ddp_no_sync" else "none")
    results = ranks(2).run(jobs.train, kind)
    assert_like_one_process(results, want, LAYER[kind].within)


@pytest.mark.parametrize("where", ["root", "experts"])
def test_sharded_experts_are_noticed(ranks: Ranks, where: str) -> None:
    for said in ranks(2).run(jobs.sharded_experts, where):
        assert REFUSED["fsdp_all"].outcome in said
        assert "Experts.gate_up was sharded by fully_shard" in said
