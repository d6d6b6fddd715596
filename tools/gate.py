"""Where the seconds of a gate went, and which tests passed only at the second try.

    python -m tools.gate .ci/reports

`.ci/run` prints this at its end. The folder has `steps`, a line for each step with the second of
its beginning, and what pytest wrote of each run: STEP-1.xml, and STEP-1-again.xml of its second
try. More than five second tries fail: late ranks are rare, and what is not rare is a race.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

MOST_SECOND_TRIES = 5
SLOWEST = 5
_OTHER = ("failure", "error", "skipped")  # what a test that passed has none of


@dataclass(frozen=True)
class Test:
    name: str
    seconds: float
    passed: bool


def tests_of(report: Path) -> list[Test]:
    cases = ElementTree.parse(report).iter("testcase")
    return [
        Test(
            f"{one.get('classname')}::{one.get('name')}",
            float(one.get("time", 0)),
            not any(one.find(kind) is not None for kind in _OTHER),
        )
        for one in cases
    ]


def steps_of(folder: Path) -> dict[str, int]:
    """The seconds of each step; the last one only marks the end."""
    lines = [line.rsplit(" ", 1) for line in (folder / "steps").read_text().splitlines()]
    return {name: int(end) - int(begin) for (name, begin), (_, end) in pairwise(lines)}


def second_tries(folder: Path) -> list[str]:
    reports = sorted(folder.glob("*-again.xml"))
    return [test.name for report in reports for test in tests_of(report) if test.passed]


def table(folder: Path) -> list[str]:
    lines = [f"{'step':<16}{'seconds':>8}{'tests':>8}  slowest, s"]
    for step, seconds in steps_of(folder).items():
        firsts = [one for one in sorted(folder.glob(f"{step}-*.xml")) if "-again" not in one.name]
        tests = sorted((test for one in firsts for test in tests_of(one)), key=lambda t: -t.seconds)
        slowest = [f"{test.seconds:6.1f} {test.name}" for test in tests[:SLOWEST]] or [""]
        lines.append(f"{step:<16}{seconds:>8}{len(tests) or '':>8}  {slowest[0]}".rstrip())
        lines += [f"{'':<34}{one}" for one in slowest[1:]]
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    late = second_tries(folder)
    print("\n".join(table(folder)))
    print(f"\npassed only at the second try: {len(late)}")
    print("\n".join(late))
    if len(late) > MOST_SECOND_TRIES:
        print(f"want at most {MOST_SECOND_TRIES} of these")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
