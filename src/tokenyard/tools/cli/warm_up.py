"""`tokenyard warm-up`: compile kernels ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenyard.tools.cli import output, plain
from tokenyard.tools.cli.output import Json


def warm_up(
    dtypes: Annotated[str, typer.Option(help="Of rows, separated by commas.")] = "bfloat16",
    kinds: Annotated[str, typer.Option(help="Of calls, separated by commas.")] = "all",
    as_json: Json = False,
) -> None:
    """Compile kernels and keep them on disk, for images and CI.

    Kinds are direct, ring, collective, nodes, by_expert, low_latency and local. NUMBA_CACHE_DIR
    names another folder than the package's own. What is on disk already is not compiled again.

    Examples:

        tokenyard warm-up
        tokenyard warm-up --kinds direct,low_latency --dtypes bfloat16,float32
    """
    taken: dict[str, float] = {}
    total = None if kinds == "all" else kinds.count(",") + 1
    with output.mistakes(), output.progress("compiling kernels", total) as step:
        for _, _, kind, seconds in plain.compile_each(dtypes, kinds):
            taken[kind] = seconds
            step(kind)
    told = plain.warmed(taken)
    output.show(
        told,
        as_json,
        lambda console: console.print(f"kernels are ready, after {told['seconds']} s"),
    )
