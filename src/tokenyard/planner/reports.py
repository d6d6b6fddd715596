"""What the planner found, as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokenyard.planner.balance import Rebalancing
from tokenyard.planner.cost import Plan
from tokenyard.planner.page import Report, Table
from tokenyard.planner.simulate import Replay


def size_text(number: float) -> str:
    """
    >>> size_text(512), size_text(7168), size_text(3.2e9)
    ('512 B', '7.2 kB', '3.2 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def of_plan(made: Plan) -> Report:
    cluster, work = made.cluster, made.work
    stages = [
        [
            stage.name,
            round(stage.seconds * 1e6),
            stage.bound_by,
            *(size_text(stage.bytes[link]) for link in ("itself", "node", "network")),
        ]
        for stage in made.stages
    ]
    total = [["a layer", round(made.seconds * 1e6), made.bound_by, "", "", ""]]
    memory = [[part, size_text(number)] for part, number in made.memory.items()]
    return Report(
        title=f"{made.model.name} on {made.num_ranks} ranks of {cluster.name}, "
        f"{work.num_tokens} tokens a rank, {work.mode.replace('_', ' ')} mode",
        tables=[
            Table(
                title="Stages, and the bytes of the busiest rank",
                columns=["stage", "us", "bound by", "to itself", "in the node", "network"],
                rows=stages + total,
            ),
            Table(title="Memory of a rank", columns=["part", "bytes"], rows=memory),
        ],
        notes=[
            *made.notes,
            f"the busiest rank gets {made.imbalance:.2f} times the rows of the average",
            f"{cluster.name}: {cluster.source}",
        ],
    )


def of_sweep(plans: Sequence[Plan]) -> Report:
    first = plans[0]
    names = [stage.name for stage in first.stages]
    rows = [
        [
            made.num_ranks,
            *(round(stage.seconds * 1e6) for stage in made.stages),
            round(made.seconds * 1e6),
            made.bound_by,
        ]
        for made in plans
    ]
    return Report(
        title=f"{first.model.name} on {first.cluster.name}, {first.work.num_tokens} tokens a rank, "
        f"{first.work.mode.replace('_', ' ')} mode",
        tables=[
            Table(
                title="Time of a layer's exchange, us",
                columns=["ranks", *names, "a layer", "bound by"],
                rows=rows,
            )
        ],
        notes=[f"{first.cluster.name}: {first.cluster.source}"],
    )


def of_replays(replays: Mapping[str, Replay], what: str) -> Report:
    """Replays of the same steps, by what is done there."""
    rows = []
    for name, replay in replays.items():
        seconds = np.array(replay.seconds) * 1e6
        rows.append(
            [
                name,
                round(float(seconds.mean())),
                round(float(np.percentile(seconds, 99))),
                round(float(np.mean(replay.imbalance)), 3),
                round(float(np.mean(replay.work)), 3),
                max(replay.bound_by, key=lambda link: replay.bound_by[link]),
                len(replay.changes),
                replay.moved,
            ]
        )
    columns = ["placement", "us a step", "99th", "rows", "pairs", "bound by", "changes", "moves"]
    notes = ["rows and pairs: those of the busiest rank / mean; experts compute pairs"]
    table = Table(title=f"{len(replay.seconds)} steps", columns=columns, rows=rows)
    return Report(title=f"{what} on {replay.num_ranks} ranks", tables=[table], notes=notes)


def of_changes(changes: Sequence[Rebalancing], what: str) -> Report:
    rows = [
        [
            number,
            round(change.before, 3),
            round(change.after, 3),
            max(change.placement.num_copies),
            len(change.moves),
        ]
        for number, change in enumerate(changes)
    ]
    columns = ["layer", "imbalance before", "after", "most copies", "moves"]
    table = Table(title="Load of the busiest rank / mean", columns=columns, rows=rows)
    return Report(title=what, tables=[table])
