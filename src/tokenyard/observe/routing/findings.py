"""What a person should know of a routing, in sentences: which experts, which rank, how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenyard.observe.routing.figures import Figures, imbalance

_EVEN, _SKEWED = 1.1, 1.3  # the busiest rank by the mean: balanced up to, skewed above
_HOT = 2.0  # an expert by the mean
_MOST_NAMED = 5


class Finding(NamedTuple):
    level: str  # ok, note, warn or bad
    text: str


def findings(each: Sequence[Figures], total: Figures) -> list[Finding]:
    """The most important first."""
    told = [_rank_load(total)]
    told += _worst_layer(each)
    told += _hot_experts(each)
    told += _idle_experts(each)
    told += _by_step(total)
    told += _copies(total)
    return told


def _rank_load(figures: Figures) -> Finding:
    loads = figures.rank_load
    if not loads.sum():
        return Finding("bad", "Nobody was chosen: all expert ids are -1.")
    if len(loads) == 1:
        return Finding(
            "note", "There is one rank, which has every expert: ask for more by --ranks."
        )
    busiest, ratio = int(loads.argmax()), _ratio(loads)
    share = 100 * loads[busiest] / loads.sum()
    if ratio <= _EVEN:
        return Finding(
            "ok", f"Ranks are balanced: the busiest, {busiest}, has {ratio:.2f} x the mean."
        )
    word = "Skewed" if ratio > _SKEWED else "Slightly skewed"
    return Finding(
        "bad" if ratio > _SKEWED else "warn",
        f"{word}: rank {busiest} computes {ratio:.2f} x the mean ({share:.0f} % of all rows on one "
        f"of {len(loads)} ranks). The others wait for it.",
    )


def _worst_layer(each: Sequence[Figures]) -> list[Finding]:
    if len(each) < 2 or each[0].places.num_ranks == 1:
        return []
    ratios = [_ratio(one.rank_load) for one in each]
    worst = int(np.argmax(ratios))
    if ratios[worst] <= _SKEWED:
        return []
    figures = each[worst]
    return [
        Finding(
            "bad",
            f"The worst layer is {figures.names[0]}: rank {int(figures.rank_load.argmax())} has "
            f"{ratios[worst]:.2f} x the mean there.",
        )
    ]


def _hot_experts(each: Sequence[Figures]) -> list[Finding]:
    """Experts with much more than the mean, and more than chance gives."""
    hot = []
    for figures in each:
        mean = figures.load.mean()
        bar = max(_HOT * mean, mean + 4 * mean**0.5)
        for expert in np.flatnonzero(figures.load > bar).tolist():
            hot.append((figures.load[expert] / mean, expert, figures))
    if not hot:
        return []
    hot.sort(key=lambda one: -one[0])
    named = [
        f"{expert}{_of_layer(each, figures)} ({ratio:.1f} x the mean, "
        f"on rank {int(figures.places.rank_of_expert[expert])})"
        for ratio, expert, figures in hot[:_MOST_NAMED]
    ]
    more = f", and {len(hot) - _MOST_NAMED} more" if len(hot) > _MOST_NAMED else ""
    word = "Hot expert" if len(hot) == 1 else "Hot experts"
    return [
        Finding("bad" if hot[0][0] > 2 * _HOT else "warn", f"{word}: {', '.join(named)}{more}.")
    ]


def _idle_experts(each: Sequence[Figures]) -> list[Finding]:
    idle = [(one, e) for one in each for e in np.flatnonzero(one.load == 0).tolist()]
    if not idle:
        return []
    named = ", ".join(f"{expert}{_of_layer(each, one)}" for one, expert in idle[:_MOST_NAMED])
    more = f", and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
    word = "An expert was" if len(idle) == 1 else f"{len(idle)} experts were"
    return [Finding("warn", f"{word} never chosen: {named}{more}.")]


def _by_step(figures: Figures) -> list[Finding]:
    """What a step feels, and whether it gets better."""
    ratios = figures.rank_imbalance
    if len(ratios) < 2 or figures.places.num_ranks == 1:
        return []
    mean, worst = ratios.mean(), int(ratios.argmax())
    told = [
        Finding(
            "note",
            f"In a step the busiest rank has {mean:.2f} x the mean on average, and "
            f"{ratios[worst]:.2f} x in step {figures.step[worst]}.",
        )
    ]
    evened, borrowed = figures.balanced
    if mean - evened.mean() > _EVEN - 1:
        told.append(
            Finding(
                "note",
                f'With Buffer(balance="exact") it would have {evened.mean():.2f} x on average: '
                f"ranks of a node would borrow {100 * borrowed:.0f} % of pairs from each other.",
            )
        )
    quarter = len(ratios) // 4
    if quarter >= 2:
        first, last = ratios[:quarter].mean(), ratios[-quarter:].mean()
        if abs(last - first) > 0.1 * first:
            word, level = ("grows", "warn") if last > first else ("falls", "note")
            told.append(
                Finding(
                    level,
                    f"Imbalance {word}: from {first:.2f} in the first quarter of steps to "
                    f"{last:.2f} in the last.",
                )
            )
    return told


def _copies(figures: Figures) -> list[Finding]:
    rows = figures.rows
    if not rows["per_expert"] or figures.places.num_ranks == 1:
        return []
    told = [
        Finding(
            "note",
            f"A token goes to {rows['per_rank'] / figures.num_tokens:.2f} ranks for its "
            f"{rows['per_expert'] / figures.num_tokens:.2f} experts: sent once a rank, "
            f"{_saved(rows['per_rank'], rows['per_expert'])} of the rows are saved.",
        )
    ]
    abroad = figures.rows_between_nodes
    if abroad["per_rank"]:
        told.append(
            Finding(
                "note",
                "Between nodes, once a node saves "
                f"{_saved(abroad['per_node'], abroad['per_rank'])} of the rows of once a rank.",
            )
        )
    return told


def _ratio(loads: np.ndarray) -> float:
    return float(imbalance(loads[None])[0])


def _saved(few: int, many: int) -> str:
    return f"{100 * (1 - few / many):.0f} %"


def _of_layer(each: Sequence[Figures], figures: Figures) -> str:
    return "" if len(each) == 1 else f" of {figures.names[0]}"
