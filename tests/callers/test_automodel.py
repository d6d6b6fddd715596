"""nemo-automodel 0.7.0, as PyPI has it, on tokenyard: forward and backward over real processes."""

from __future__ import annotations

import pytest
import torch

from tests.cases.callers import automodel as jobs
from tests.cases.callers import fused
from tests.cases.callers.moe import Case, by_spec, check, whole
from tests.cases.callers.ranks import Callers, why_not
from tests.cases.lanes import at_night

NAME = "nemo-automodel"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_not(NAME)), reason=why_not(NAME) or "it is at hand"),
]

NUM_RANKS = pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))


@NUM_RANKS
def test_fused_a2a(callers: Callers, num_ranks: int) -> None:
    ranks = callers(NAME, num_ranks)
    case = Case(num_ranks=num_ranks, dtype=torch.bfloat16, exact=False)
    for options in ({}, {"async_finish": True, "allocate_on_comm_stream": True}):
        check(ranks.run(fused.exchange, fused.AUTOMODEL, case, options), by_spec(case))


@NUM_RANKS
def test_replay_of_a_dispatch(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks, exact=False, seed=1)
    results = callers(NAME, num_ranks).run(fused.replay, fused.AUTOMODEL, case)
    assert [misses for _, misses in results] == [0] * num_ranks
    check([outcome for outcome, _ in results], by_spec(case))


@NUM_RANKS
def test_manager(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks, seed=2)
    for asynchronous in (False, True):
        got = callers(NAME, num_ranks).run(jobs.manager, case, asynchronous)
        check(got, whole(case, dense=True))


@NUM_RANKS
def test_hybrid_manager(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks, seed=3)
    check(callers(NAME, num_ranks).run(jobs.hybrid_manager, case), whole(case, dense=True))
