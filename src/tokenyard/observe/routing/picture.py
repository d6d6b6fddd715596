"""The picture of a recording, by matplotlib (extra `viz`): loads, traffic, imbalance over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.observe.routing.charts import ABOVE, HOT, INK, LINE, MAIN
from tokenyard.observe.routing.report import Report

_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
}


def draw(report: Report, path: Path) -> None:
    """Write a PNG."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a PNG needs matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7.6), dpi=150, layout="constrained")
        figure.suptitle(
            f"{report.title}\n{report.findings[0].text}", fontsize=11.5, x=0.01, ha="left"
        )
        (loads, ranks), (traffic, steps) = figure.subplots(2, 2)
        if len(report.each) > 1:
            _layers(figure, loads, report)
        else:
            _experts(loads, report)
        _ranks(ranks, report)
        _traffic(figure, traffic, report)
        _steps(steps, report)
        figure.savefig(path, format="png")


def _bars(axes: Any, loads: np.ndarray, what: str) -> None:
    """Draw each load divided by the mean load; those above ABOVE stand out."""
    mean = loads.mean() or 1.0
    ratios = loads / mean
    colours = [HOT if ratio > ABOVE else MAIN for ratio in ratios]
    axes.bar(range(len(loads)), ratios, color=colours, width=0.8)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlabel=what, ylabel="load by the mean", xlim=(-0.6, len(loads) - 0.4))
    axes.set_ylim(0, max(1.25, 1.08 * ratios.max()))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _experts(axes: Any, report: Report) -> None:
    _bars(axes, report.total.load, "expert")
    axes.set_title("Load of experts")


def _ranks(axes: Any, report: Report) -> None:
    _bars(axes, report.total.rank_load, "rank")
    axes.set_title("Load of ranks")


def _layers(figure: Any, axes: Any, report: Report) -> None:
    loads = np.array([one.load / (one.load.mean() or 1.0) for one in report.each])
    image = _heat(axes, loads)
    axes.set_title("Load of experts, by layer")
    axes.set(xlabel="expert", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="load by the mean")


def _heat(axes: Any, values: np.ndarray) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("page", ["white", MAIN])
    return axes.imshow(values, aspect="auto", cmap=shades, vmin=0, interpolation="nearest")


def _traffic(figure: Any, axes: Any, report: Report) -> None:
    traffic, unit = report.total.traffic_of_a_step
    image = _heat(axes, traffic)
    axes.set_title("Traffic of a step")
    axes.set(xlabel="to rank", ylabel="from rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label=unit)
    if len(traffic) <= 8:
        for (row, column), value in np.ndenumerate(traffic):
            dark = value > 0.6 * traffic.max()
            axes.text(
                column,
                row,
                f"{value:.3g}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else INK,
            )


def _steps(axes: Any, report: Report) -> None:
    total = report.total
    marker = "o" if len(total.step) < 2 else None
    lines = {"experts": (total.expert_imbalance, HOT), "ranks": (total.rank_imbalance, MAIN)}
    for name, (values, colour) in lines.items():
        axes.plot(total.step, values, color=colour, label=name, linewidth=1.6, marker=marker)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_title("Imbalance over steps")
    axes.set(xlabel="step", ylabel="busiest by the mean")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="lower right", ncols=2)
