"""torchtitan 0.2.2 (V1) and 0.3.0 (V2), as PyPI has them, on tokenyard: forward and backward."""

from __future__ import annotations

import pytest

from tests.cases.callers import torchtitan as jobs
from tests.cases.callers.moe import Case, check, whole
from tests.cases.callers.ranks import Callers, why_not
from tests.cases.lanes import at_night
from tokenyard.testing import assert_same

FIRST, SECOND = "torchtitan-0.2.2", "torchtitan-0.3.0"
MISSING = why_not(FIRST) or why_not(SECOND)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "they are at hand"),
]

EVEN = (9, 9, 9, 9)
NUM_RANKS = pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))


@NUM_RANKS
def test_v1(callers: Callers, num_ranks: int) -> None:
    case = Case(num_ranks=num_ranks)
    for before in (True, False):
        check(callers(FIRST, num_ranks).run(jobs.first, case, before), whole(case))


@NUM_RANKS
def test_v2(callers: Callers, num_ranks: int) -> None:
    for tokens in (EVEN, Case.tokens):
        case = Case(num_ranks=num_ranks, tokens=tokens)
        want = whole(case)
        results = callers(SECOND, num_ranks).run(jobs.second, case)
        check([trained for trained, _ in results], want)
        for (_, y), one in zip(results, want):
            assert_same(y, one.y, "without gradients")


@NUM_RANKS
@pytest.mark.parametrize("factor, pad_multiple", [(None, None), (None, 8), (1.0, 8)])
def test_hybridep(
    callers: Callers, num_ranks: int, factor: float | None, pad_multiple: int | None
) -> None:
    # With a factor the shape comes of a rank's own tokens: torchtitan has as many on all ranks.
    case = Case(num_ranks=num_ranks, tokens=Case.tokens if factor is None else EVEN, seed=1)
    got = callers(SECOND, num_ranks).run(jobs.hybrid, case, factor, pad_multiple)
    check(got, whole(case))


@NUM_RANKS
@pytest.mark.parametrize("kind", ["DeepEPTokenDispatcher", "HybridEPTokenDispatcher"])
def test_dispatchers(callers: Callers, num_ranks: int, kind: str) -> None:
    case = Case(num_ranks=num_ranks, tokens=EVEN, seed=2)
    check(callers(SECOND, num_ranks).run(jobs.dispatcher, case, kind), whole(case))
