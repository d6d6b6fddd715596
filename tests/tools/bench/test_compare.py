"""Two runs: what changed beyond the noise, and what moved with the machine."""

from __future__ import annotations

import pytest

from tokenyard.tools.bench.compare import FASTER, MACHINE, SAME, SLOWER, compare
from tokenyard.tools.bench.report import Figure, Measured, Report
from tokenyard.tools.bench.timing import Timed


def report(ranks: int = 2, spread: float = 0.01, **medians: float) -> Report:
    figures = [
        Figure(way, way != "memcpy", Timed(one, one * (1 - spread), one * (1 + spread), 9, 1))
        for way, one in medians.items()
    ]
    return Report("dispatch", {"ranks": ranks}, [Measured("8 tokens", "memcpy", None, figures)])


@pytest.mark.parametrize(
    "after, verdict",
    [
        (report(memcpy=1.0, dispatch=2.0), SAME),
        (report(memcpy=1.0, dispatch=2.08), SAME),  # beyond the noise, and less than 5 %
        (report(memcpy=1.0, dispatch=2.4), SLOWER),
        (report(memcpy=1.0, dispatch=2.4, spread=0.3), SAME),  # within the noise
        (report(memcpy=1.0, dispatch=1.5), FASTER),
        (report(memcpy=1.3, dispatch=2.6), MACHINE),
        (report(memcpy=1.3, dispatch=4.0), SLOWER),
        (report(memcpy=0.5, dispatch=1.0), MACHINE),
    ],
)
def test_verdicts(after: Report, verdict: str) -> None:
    changes = compare([report(memcpy=1.0, dispatch=2.0)], [after])
    assert [one.verdict for one in changes if one.ours] == [verdict]


def test_only_what_both_measured_is_compared() -> None:
    before, after = report(memcpy=1.0, dispatch=2.0), report(memcpy=1.0, combine=2.0)
    assert [one.way for one in compare([before], [after])] == ["memcpy"]
    with pytest.raises(ValueError, match="no figure in common"):
        compare([before], [report(ranks=4, memcpy=1.0)])
