"""Pictures of plans, replays and placements. They need matplotlib (the extra `viz`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenyard.planner.cost import Plan
from tokenyard.planner.simulate import Replay

COLOURS = {"overhead": "#8c8c8c", "node": "#2a9d8f", "network": "#d1495b"}
BEFORE, AFTER = "#b0b0b0", "#1f77b4"


def _figure(height: float = 4.2, rows: int = 1) -> tuple[Any, list[Any]]:
    # Not pyplot, which keeps what it draws and looks for a window.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, height), layout="constrained")
    axes = list(figure.subplots(rows, 1, squeeze=False, sharex=rows > 1)[:, 0])
    for axis in axes:
        _plain(axis)
    return figure, axes


def _plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6")
    axis.set_axisbelow(True)


def draw_sweep(plans: Sequence[Plan]) -> Any:
    """Time of a layer's exchange against ranks; a mark's colour is the link that binds."""
    figure, (axis,) = _figure()
    ranks = [made.num_ranks for made in plans]
    axis.plot(ranks, [made.seconds * 1e3 for made in plans], color="#404040", label="all stages")
    names = [stage.name for stage in plans[0].stages]
    for name, style in zip(reversed(names), ("--", ":", "-.")):
        stages = [next(one for one in made.stages if one.name == name) for made in plans]
        axis.plot(ranks, [one.seconds * 1e3 for one in stages], style, color="#909090", label=name)
    for link, colour in COLOURS.items():
        bound = [made for made in plans if made.bound_by == link]
        axis.plot(
            [made.num_ranks for made in bound],
            [made.seconds * 1e3 for made in bound],
            "o",
            color=colour,
            label=f"bound by {link}" if bound else None,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(number) for number in ranks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("ranks")
    axis.set_ylabel("ms a layer")
    first = plans[0]
    axis.set_title(
        f"{first.model.name} on {first.cluster.name}, {first.work.num_tokens} tokens a rank, "
        f"{first.work.mode.replace('_', ' ')} mode",
        fontsize=11,
    )
    axis.legend(frameon=False, fontsize=9)
    return figure


def draw_stages(made: Plan) -> Any:
    """Each stage of one plan, coloured by the link that binds it."""
    figure, (axis,) = _figure(height=2.6)
    for stage in reversed(made.stages):
        axis.barh(stage.name, stage.seconds * 1e3, color=COLOURS[stage.bound_by])
        text = f" {stage.seconds * 1e6:,.0f} us, bound by {stage.bound_by}"
        axis.text(stage.seconds * 1e3, stage.name, text, va="center", fontsize=9)
    axis.set_xlim(right=1.45 * max(stage.seconds for stage in made.stages) * 1e3)
    axis.grid(visible=False)
    axis.set_xlabel("ms")
    axis.set_title(
        f"{made.model.name} on {made.num_ranks} ranks of {made.cluster.name}", fontsize=11
    )
    return figure


def draw_replay(before: Replay, after: Replay) -> Any:
    """Time and imbalance step by step; changes of the placement are marked."""
    figure, axes = _figure(height=5.2, rows=2)
    for axis, name, scale in zip(axes, ("seconds", "imbalance"), (1e3, 1.0)):
        for replay, colour, label in ((before, BEFORE, "even"), (after, AFTER, "rebalanced")):
            values = np.array(getattr(replay, name)) * scale
            axis.plot(values, color=colour, label=label, linewidth=1.2)
        for step in after.changes:
            axis.axvline(step + 0.5, color="#d1495b", linewidth=0.7, alpha=0.5)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("ms a layer")
    axes[1].set_ylim(bottom=1)
    axes[1].set_ylabel("imbalance (busiest / mean)")
    axes[1].set_xlabel("step; red lines: the placement changed")
    axes[0].legend(frameon=False, fontsize=9, ncols=2)
    axes[0].set_title(f"A recorded routing on {before.num_ranks} ranks", fontsize=11)
    return figure


def draw_balance(before_RR: np.ndarray, after_RR: np.ndarray) -> Any:
    """What ranks send to ranks before and after, and what each rank gets, the busiest first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 7.4), layout="constrained")
    panels = [["loads", "loads"], ["before", "after"]]
    axes: dict[str, Any] = figure.subplot_mosaic(panels, height_ratios=(3, 4))
    axis = axes.pop("loads")
    _plain(axis)
    before_R, after_R = (_by_mean(one.sum(0)) for one in (before_RR, after_RR))
    place = np.arange(len(after_R))
    axis.bar(place, np.sort(before_R)[::-1], width=0.9, color=BEFORE, label="before")
    axis.step(place, np.sort(after_R)[::-1], where="mid", color=AFTER, label="after")
    axis.set_xlabel("ranks, the busiest first")
    axis.set_ylabel("load / mean")
    axis.legend(frameon=False, fontsize=9)
    worst = f"busiest {before_R.max():.2f} -> {after_R.max():.2f} of the mean"
    axis.set_title(f"Load of {len(after_R)} ranks: {worst}", fontsize=11)
    image = _draw_traffic(axes, {"before": _by_mean(before_RR), "after": _by_mean(after_RR)})
    figure.colorbar(image, ax=list(axes.values()), label="traffic / mean")
    return figure


def _by_mean(values: np.ndarray) -> np.ndarray:
    return values / (float(values.mean()) or 1.0)


def _draw_traffic(axes: dict[str, Any], traffic: dict[str, np.ndarray]) -> Any:
    """Heat maps on one scale, which is returned. A triangle marks the busiest receiver."""
    most = max(float(sent_RR.max()) for sent_RR in traffic.values())
    for name, sent_RR in traffic.items():
        axis, got_R = axes[name], _by_mean(sent_RR.sum(0))
        image = axis.imshow(sent_RR, cmap="Blues", vmin=0, vmax=most, interpolation="nearest")
        busiest = int(got_R.argmax())
        above = axis.get_xaxis_transform()
        axis.plot(busiest, 1.02, "v", color="#d1495b", clip_on=False, transform=above)
        title = f"{name}: rank {busiest} gets {got_R[busiest]:.2f} of the mean"
        axis.set_title(title, fontsize=10, pad=14)
        axis.set(xlabel="to rank", ylabel="from rank")
        for side in (axis.xaxis, axis.yaxis):
            side.get_major_locator().set_params(integer=True)
    return image


def save(figure: Any, path: Path) -> None:
    """A PNG, or an SVG, as the file's name says."""
    figure.savefig(path, dpi=130)


def as_svg(figure: Any) -> str:
    """The picture as a part of an HTML page."""
    written = io.StringIO()
    figure.savefig(written, format="svg")
    text = written.getvalue()
    return text[text.index("<svg") :]
