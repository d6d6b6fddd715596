"""`tokenyard merge-traces`: one trace of what ranks of several machines have left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json


def merge_traces(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces with their parts beside them, or parts.")
    ],
    out: Annotated[Path, typer.Option("--output", help="The file to write.")],
    as_json: Json = False,
) -> None:
    """Make one trace of the parts that ranks of several machines have left, or ranks before death.

    Processes leave their parts beside the file that they name (`run.json.<host>-<pid>.part`), until
    every rank's is there. Copy the folders of all machines to one place; a trace stands for the
    parts beside it. Times are those of rank 0's clock.

    Examples:

        tokenyard merge-traces host-a/run.json host-b/run.json --output all.json
        tokenyard merge-traces run.json.*.part --output all.json
    """
    from tokenyard.observe import tracing

    with output.mistakes((ValueError, OSError)):
        parts = tracing.read_parts(traces)
        tracing.merge_parts(out, parts)
    tracks = [track for part in parts for track in part["tracks"]]
    missing = sorted(tracing.missing_ranks(parts))
    told = {
        "output": str(out),
        "machines": len({part["machine"] for part in parts}),
        "processes": len(parts),
        "ranks": len({track["rank"] for track in tracks}),
        "calls": sum(len(track["calls"]) for track in tracks),
        "missing_ranks": missing,
    }
    if as_json:
        output.show_json(told)
        return
    counts = ", ".join(f"{told[name]} {name}" for name in ("machines", "ranks", "calls"))
    print(f"written: {out} ({counts})")
    if missing:
        print(f"missing: the parts of ranks {', '.join(map(str, missing))}")
