"""docs/performance.md's tables and picture, made of benchmarks/results/*.json.

`python -m tools.results` prints the tables, `python -m tools.results --write` puts them into the
page and draws docs/pictures/results.svg (that needs matplotlib). tests/repo/test_results.py fails
while the page has other tables. `python benchmarks/take_results.py` takes results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.tools.bench.catalogue import BENCHMARKS
from tokenyard.tools.bench.picture import BESIDE, OURS, seconds_text
from tokenyard.tools.bench.report import Measured, Report, load

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "results.svg"
BEGIN, END = "<!-- results: python -m tools.results --write -->", "<!-- end of the results -->"


@dataclass(frozen=True)
class Results:
    """One file: all reports of one commit on one machine."""

    note: str
    reports: list[Report]

    @property
    def machine(self) -> dict[str, Any]:
        return self.reports[0].machine


def all_results() -> list[Results]:
    """The oldest first."""
    found = []
    for path in RESULTS.glob("*.json"):
        found.append(Results(json.loads(path.read_text()).get("note", ""), load(path)))
    return sorted(found, key=lambda one: str(one.machine["taken"]))


def newest(found: list[Results]) -> list[Results]:
    """Of each processor the last."""
    return list({str(one.machine["processor"]): one for one in found}.values())


def command_of(report: Report) -> str:
    """That which measures the same again: what differs from the defaults is given."""
    words = ["tokenyard bench", report.bench]
    usual = BENCHMARKS[report.bench]
    defaults = usual.shape.named(usual.takes)
    for name, value in report.parameters.items():
        if value != defaults.get(name):
            given = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name.replace('_', '-')} {given}")
    return " ".join(words)


def tables() -> str:
    """Markdown: each processor's newest results, a table with its command for each benchmark."""
    lines: list[str] = []
    for one in newest(all_results()):
        machine = one.machine
        loads = [float(report.machine["load"]) for report in one.reports]
        lines += [f"### {machine['processor']}, {machine['cores']} cores", ""]
        lines += [
            f"Taken at {machine['taken']}, commit {machine['commit']}, {machine['system']}, Python "
            f"{machine['python']}, torch {machine['torch']}, numba {machine['numba']}. Before each "
            f"benchmark the machine's load was {min(loads):g} to {max(loads):g}.",
            "",
        ]
        if one.note:
            lines += [f"These figures were {one.note}.", ""]
        for report in one.reports:
            lines += [*_table(report), ""]
    return "\n".join(lines).rstrip()


def _table(report: Report) -> Iterator[str]:
    yield f"`{command_of(report)}`"
    yield ""
    yield "| case | way | median | quartiles | times the base |"
    yield "|---|---|---|---|---|"
    for case in report.measured:
        for figure in case.figures:
            timed = figure.timed
            way = f"**{figure.way}**" if figure.ours else figure.way
            spread = _between(seconds_text(timed.low), seconds_text(timed.high))
            ratio = f"{case.ratio(figure):.2f}" if figure.way != case.base else "base"
            cells = (case.label, way, seconds_text(timed.median), spread, ratio)
            yield f"| {' | '.join(cells)} |"


def _between(low: str, high: str) -> str:
    """
    >>> _between("5.2 ms", "5.7 ms"), _between("990 us", "1.2 ms")
    ('5.2-5.7 ms', '990 us-1.2 ms')
    """
    (first, unit), (_, other) = low.split(), high.split()
    return f"{first}-{high}" if unit == other else f"{low}-{high}"


def page_with_tables(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _main_way(case: Measured) -> tuple[str, float, str] | None:
    """Our first way, how many times as long as its base it takes, and the base."""
    ours = next(one for one in case.figures if one.ours)
    others = [one.way for one in case.figures if not one.ours]
    base = others[-1] if others and case.base == ours.way else case.base
    beside = case.of(base)
    return None if beside is None else (ours.way, ours.timed.median / beside.median, base)


def draw(path: Path) -> None:
    """A dot for each result: our first way of each case, beside its base; older ones are grey."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tokenyard"  # the same results make the same file
    found = all_results()
    rows: dict[str, list[tuple[float, bool]]] = {}
    for results in found:
        for report in results.reports:
            for case in report.measured:
                way = _main_way(case)
                if way is not None:
                    label = f"{report.bench}, {case.label}: of {way[2]}"
                    rows.setdefault(label, []).append((way[1], results in newest(found)))
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(rows)), layout="constrained", facecolor="white")
    axis = figure.subplots()
    for place, dots in enumerate(reversed(list(rows.values()))):
        for ratio, is_new in dots:
            axis.plot(ratio, place, "o", color=OURS if is_new else BESIDE, markersize=6)
    axis.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
    axis.set_xscale("log")
    axis.axvline(1.0, color="#444444", linewidth=1)
    axis.grid(axis="x", color="#e0e0e0", linewidth=0.6)
    axis.set_xlabel("time of tokenyard as a multiple of what it is measured beside", fontsize=9)
    axis.set_title("left of the line tokenyard is faster", fontsize=9, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page_with_tables(PAGE.read_text()))
        draw(PICTURE)
    else:
        print(tables())


if __name__ == "__main__":
    main()
