"""Compiled calls between nodes: which calls they make, and that they are the engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.compiled import (
    OTHER,
    PLAIN,
    both_ways,
    inputs,
    leave_and_go_on,
    open_buffer,
    which_are_compiled,
)
from tests.cases.inside import MET, NOWHERE, POSTED, engine_of
from tests.cases.processes import Pools
from tokenyard.testing import assert_same, run_virtual
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.wire.message import PAYLOAD
from tokenyard.wire.nodes_table import BEFORE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not change which way a combine goes."""
    monkeypatch.setattr(Staging, "soon", scaled(60))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 2, 1)], ids=str)
def test_both_ways_are_alike(sizes: tuple[int, ...]) -> None:
    run_virtual(both_ways, sum(sizes), sizes)


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 1)], ids=str)
def test_one_rank_leaves_a_compiled_call(sizes: tuple[int, ...], processes: Pools) -> None:
    ranks = processes(sum(sizes))
    wanted = ranks.run(leave_and_go_on, sizes, NOWHERE)
    for phase in (POSTED, MET):
        assert_same(ranks.run(leave_and_go_on, sizes, phase), wanted)


def test_plain_calls_are_compiled_and_others_are_the_engines() -> None:
    for answer in run_virtual(which_are_compiled, 2, [*PLAIN, *OTHER], (1, 1)).results:
        assert answer == {**dict.fromkeys(PLAIN, True), **dict.fromkeys(OTHER, False)}


def lie(group: Any, more: int) -> str:
    """Rank 1 tells of so many rows more than its parcel has."""
    with open_buffer(group, (1, 1)) as buffer:
        compiled = engine_of(buffer).calls
        given = inputs(group.rank())
        given["x"] = given["x"].to(torch.float16)
        buffer.dispatch(**given)
        (plan,) = [one for one in compiled._plans.values() if one.shape[1] == torch.float16]
        if group.rank() == 1:
            key = next(key for key, one in compiled._plans.items() if one is plan)

            def pack() -> int:
                verdict = rows.pack()
                sent = compiled._enclosures.steps.staging.sent[0].numpy().view("int64")
                sent[BEFORE + PAYLOAD] += more
                return int(verdict)

            rows = plan.steps.rows
            steps = plan.steps._replace(rows=rows._replace(pack=pack))
            compiled._plans[key] = plan._replace(steps=steps)
        try:
            buffer.dispatch(**given)
        except tokenyard.PeerError as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("more", [1, -1])
def test_counts_that_cannot_be(more: int) -> None:
    told = run_virtual(lie, 2, more).results[0]
    assert told == "dispatch: rank 1 enclosed what no rank encloses, on rank 0"
