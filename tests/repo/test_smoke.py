"""Five seconds that find most of what breaks: run it before each commit."""

from __future__ import annotations

from tests.cases.exchange import Case, expected, job
from tokenyard.testing import assert_same, run_virtual


def test_four_virtual_ranks_equal_the_specification() -> None:
    case = Case(num_ranks=4, kind="holes", num_biases=1)
    for got, want in zip(run_virtual(job, 4, case).results, expected(case), strict=True):
        for name in want:
            assert_same(got[name], want[name], name)
