"""What is to be shown of a recording: the figures of its layers, apart and together, and words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenyard.observe.routing.figures import Figures, figures_of, imbalance, together
from tokenyard.observe.routing.file import LayerRouting
from tokenyard.observe.routing.findings import Finding, findings


@dataclass(frozen=True, kw_only=True, eq=False)
class Report:
    each: list[Figures]  # of one layer each
    total: Figures  # of all of them
    missing_ranks: int  # how many have left no notes

    @property
    def findings(self) -> list[Finding]:
        told = findings(self.each, self.total)
        if self.missing_ranks:
            lost = (
                f"The notes of {self.missing_ranks} ranks are missing: their tokens are not here."
            )
            told.insert(0, Finding("warn", lost))
        return told

    @property
    def title(self) -> str:
        names = self.total.names
        places, steps = self.total.places, len(self.total.step)
        what = names[0] if len(names) == 1 else f"{len(names)} layers"
        return (
            f"{what}: {_many(steps, 'step')}, {_many(self.total.num_tokens, 'token')}, "
            f"{len(self.total.load)} experts on {_many(places.num_ranks, 'rank')}, "
            f"{_many(places.num_nodes, 'node')}"
        )

    def table_of_layers(self) -> tuple[list[str], list[list[str]]]:
        """The columns, and a row for each layer: the busiest load / the mean, over all steps."""
        columns = ["layer", "ranks", "busiest rank", "experts", "busiest expert", "evenness"]
        rows = [
            [
                one.names[0],
                f"{imbalance(one.rank_load[None])[0]:.2f} x",
                str(one.rank_load.argmax()),
                f"{imbalance(one.load[None])[0]:.2f} x",
                str(one.load.argmax()),
                f"{one.evenness:.3f}",
            ]
            for one in self.each
        ]
        return columns, rows

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "findings": [finding._asdict() for finding in self.findings],
            "together": self.total.as_dict(),
            "layers": [one.as_dict() for one in self.each],
        }


def report_of(
    layers: Sequence[LayerRouting],
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    layer: str | None = None,
    hidden: int | None = None,
) -> Report:
    """The report at so many ranks and nodes: all layers, or one by its name or its number from 0.

    Raises ValueError where that cannot be.
    """
    if hidden is not None and hidden < 1:
        raise ValueError(f"hidden is {hidden}, want at least 1")
    shown = list(layers) if layer is None else [_choose(layers, layer)]
    if not any(len(one.topk_idx) for one in shown):
        raise ValueError("the recording has no tokens, want dispatches while it is on")
    each = [figures_of(one, ranks, nodes, hidden) for one in shown]
    return Report(
        each=each,
        total=each[0] if len(each) == 1 else together(each),
        missing_ranks=max(one.num_ranks - len(one.ranks) for one in shown),
    )


def _choose(layers: Sequence[LayerRouting], wanted: str) -> LayerRouting:
    for one in layers:
        if one.name == wanted:
            return one
    if wanted.isdigit() and int(wanted) < len(layers):
        return layers[int(wanted)]
    names = ", ".join(one.name for one in layers)
    raise ValueError(f"there is no layer {wanted!r}, want one of these, or its number: {names}")


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
