"""`tokenyard selftest`: does this installation give the specification's bits?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json

if TYPE_CHECKING:
    from tokenyard.testing.conformance import Verdict

_LEVELS = {"ok": "ok", "failed": "bad", "not here": "warn"}


def selftest(
    ranks: Annotated[int, typer.Option(help="Processes to start, 1 to 64.")] = 2,
    engine: Annotated[
        str, typer.Option(help="gloo; or mpi, for the processes that mpiexec has started.")
    ] = "gloo",
    as_json: Json = False,
) -> None:
    """Check every transport that runs here against the specification, bit for bit.

    Ranks are processes of this machine; hierarchical takes them for two nodes. Each transport makes
    normal and low-latency calls, with several routings and dtypes. The exit code is 1 if one of
    them is wrong. A transport that cannot run here is named with the reason, and is no failure.

    Examples:

        tokenyard selftest
        tokenyard selftest --ranks 4 --json
        mpiexec -n 4 tokenyard selftest --engine mpi
    """
    from tokenyard import validate
    from tokenyard.testing import conformance

    group = None
    with output.mistakes():
        validate.require(engine in ("gloo", "mpi"), f"engine is {engine!r}, want gloo or mpi")
        if engine == "mpi":
            group = _launched()
            ranks = group.size()
        todo = conformance.checks(ranks)
    verdicts = conformance.run(ranks) if group is None else conformance.run_here(group)
    if group is not None and group.rank() != 0:
        states = [one.state for one in verdicts]
        raise typer.Exit(conformance.FAILED in states)
    found: list[conformance.Verdict] = []
    with output.progress("checking", len(todo)) as step:
        for verdict in verdicts:
            found.append(verdict)
            step(f"{verdict.check.transport}, {verdict.check.mode}")
    failed = sum(one.state == conformance.FAILED for one in found)
    checks = [
        {
            "transport": one.check.transport,
            "mode": one.check.mode,
            "state": one.state,
            "calls": one.calls,
            "seconds": round(one.seconds, 2),
            "detail": one.detail,
        }
        for one in found
    ]

    def draw(console: Console) -> None:
        console.print(_table(found))
        good = sum(one.state == conformance.OK for one in found)
        console.print(f"\n{good} of {len(found)} give the specification's bits, {failed} wrong")

    output.show({"ranks": ranks, "ok": not failed, "checks": checks}, as_json, draw)
    raise typer.Exit(1 if failed else 0)


def _launched() -> Any:
    """All ranks of MPI's world."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI beneath it
        raise ValueError(f"{error}, want mpi4py: pip install 'tokenyard[mpi]'") from error
    from tokenyard.comm.mpi import MpiGroup  # wants mpi4py

    return MpiGroup(MPI.COMM_WORLD)


def _table(found: Sequence[Verdict]) -> Table:
    rows = [
        [
            output.level(_LEVELS[one.state], one.state),
            one.check.transport,
            one.check.mode,
            one.calls,
            f"{one.seconds:.1f} s",
            one.detail,
        ]
        for one in found
    ]
    return output.table(["", "transport", "mode", "calls", "time", ""], rows, right=(4,))
