"""torchtitan 0.2.2, as PyPI has it, on tokenyard: forward and backward over real processes."""

from __future__ import annotations

import pytest

from tests.cases.callers import torchtitan as jobs
from tests.cases.callers.moe import Case, check, whole
from tests.cases.callers.ranks import Callers, why_not

FIRST = "torchtitan-0.2.2"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(why_not(FIRST)), reason=why_not(FIRST) or "it is at hand"),
]

NUM_RANKS = pytest.mark.parametrize("num_ranks", [2, 4])


@NUM_RANKS
def test_v1(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks)
    for before in (True, False):
        check(callers(FIRST, num_ranks).run(jobs.first, case, before), whole(case))
