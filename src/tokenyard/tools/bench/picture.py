"""A picture of a report: a bar for each way, with the spread of its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenyard.tools.bench.report import Measured, Report

OURS, BESIDE = "#1f77b4", "#b0b0b0"


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(2.345e-6), seconds_text(0.00123), seconds_text(2.0)
    ('2.3 us', '1.23 ms', '2 s')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us" if seconds >= 1e-5 else f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def title_of(report: Report) -> str:
    """What was measured, in one line.

    >>> title_of(Report("few", {"ranks": 2, "tokens": [1], "fp8": False, "hidden": 64}, []))
    'few: 2 ranks, hidden 64'
    """
    parts = []
    for name, value in report.parameters.items():
        if name == "ranks":
            parts.append(f"{value} ranks")
        elif name in ("hidden", "topk", "experts", "intermediate"):
            parts.append(f"{name} {value}")
        elif name == "fp8" and value:
            parts.append("dispatch in FP8")
    if report.transport:
        parts.append(f"transport {report.transport}")
    return f"{report.bench}: {', '.join(parts)}" if parts else report.bench


def draw(report: Report, path: Path) -> None:
    """Write a PNG, or an SVG, as the file's name says. Needs matplotlib."""
    # Not pyplot, which keeps what it draws and looks for a window.
    from matplotlib.figure import Figure

    rows = sum(len(case.figures) for case in report.measured)
    height = 1.2 + 0.26 * rows + 0.45 * len(report.measured)
    figure = Figure(figsize=(9, height), layout="constrained")
    heights = [len(case.figures) + 1 for case in report.measured]
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, case in zip(axes, report.measured):
        _draw_case(axis, case)
    machine = report.machine
    figure.suptitle(title_of(report), fontsize=11)
    figure.supxlabel(
        f"time of a call, median and quartiles; {machine.get('processor', '')}, "
        f"tokenyard {machine.get('tokenyard', '')} {machine.get('commit') or ''}",
        fontsize=8,
    )
    figure.savefig(path, dpi=130)


def _draw_case(axis: Any, case: Measured) -> None:
    figures = sorted(case.figures, key=lambda one: -one.timed.median)
    scale, unit = (1e3, "ms") if figures[0].timed.median >= 1e-3 else (1e6, "us")
    for place, one in enumerate(figures):
        timed = one.timed
        spread = [[(timed.median - timed.low) * scale], [(timed.high - timed.median) * scale]]
        axis.barh(
            place,
            timed.median * scale,
            xerr=spread,
            color=OURS if one.ours else BESIDE,
            error_kw={"elinewidth": 1, "ecolor": "#444444"},
        )
        at = (timed.high * scale, place)
        text = seconds_text(timed.median)
        axis.annotate(text, at, (4, 0), textcoords="offset points", va="center", fontsize=7)
    axis.set_yticks(range(len(figures)), [one.way for one in figures], fontsize=8)
    axis.set_title(f"{case.label}, {unit}", fontsize=9, loc="left")
    axis.margins(x=0.12)
    axis.tick_params(axis="x", labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
