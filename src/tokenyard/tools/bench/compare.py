"""What changed between two runs, beyond the noise of their rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenyard.tools.bench.report import Report
from tokenyard.tools.bench.timing import Timed

LEAST = 1.05  # a change by less is not told, however quiet the rounds were
SAME, FASTER, SLOWER, MACHINE = "same", "faster", "slower", "with the machine"


@dataclass(frozen=True)
class Change:
    """One way of one case in both runs."""

    bench: str
    case: str
    way: str
    ours: bool
    before: Timed
    after: Timed
    verdict: str

    @property
    def ratio(self) -> float:
        """How many times as long it takes now."""
        return self.after.median / self.before.median

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def moved(before: Timed, after: Timed) -> str:
    """Slower or faster if the middle halves of the rounds do not meet, and medians differ enough.

    >>> old = Timed(median=1.0, low=0.9, high=1.1, rounds=9, calls=1)
    >>> moved(old, Timed(median=1.3, low=1.2, high=1.4, rounds=9, calls=1))
    'slower'
    >>> moved(old, Timed(median=1.3, low=1.0, high=1.6, rounds=9, calls=1))
    'same'
    """
    if after.low > before.high and after.median > LEAST * before.median:
        return SLOWER
    if after.high < before.low and before.median > LEAST * after.median:
        return FASTER
    return SAME


def compare(before: Sequence[Report], after: Sequence[Report]) -> list[Change]:
    """Every way that both runs measured with the same parameters, in the order of the second.

    Where a way of ours moved no more than the memcpy or the torch code beside it, "with the
    machine" is the verdict: the machine was busier, or is another one.

    Raises ValueError where the runs have nothing in common.
    """
    old = {(key, way): (timed, base) for key, way, _, timed, base in _figures(before)}
    changes = []
    for key, way, ours, timed, base in _figures(after):
        if (key, way) not in old:
            continue
        was, base_was = old[key, way]
        verdict = moved(was, timed)
        if ours and verdict != SAME and base is not None and base_was is not None:
            machine = base.median / base_was.median
            alone = timed.median / was.median / machine
            if alone < LEAST if verdict == SLOWER else alone > 1 / LEAST:
                verdict = MACHINE
        changes.append(Change(key[0], key[2], way, ours, was, timed, verdict))
    if not changes:
        raise ValueError(
            "the two runs have no figure in common: want the same benchmarks and parameters"
        )
    return changes


Key = tuple[str, str, str]  # benchmark, parameters, case


def _figures(
    reports: Sequence[Report],
) -> Iterator[tuple[Key, str, bool, Timed, Timed | None]]:
    """Every figure, with that of the base beside it where the base is not ours."""
    for report in reports:
        # More rounds, or more numbers of tokens, measure the same.
        given = {k: v for k, v in report.parameters.items() if k not in ("rounds", "tokens")}
        for case in report.measured:
            theirs = {one.way for one in case.figures if not one.ours}
            base = case.of(case.base) if case.base in theirs else None
            for one in case.figures:
                key = (report.bench, repr(sorted(given.items())), case.label)
                yield key, one.way, one.ours, one.timed, base
