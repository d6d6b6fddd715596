"""`tokenyard selftest`: does this installation give the specification's bits?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

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
    as_json: Json = False,
) -> None:
    """Check every transport that runs here against the specification, bit for bit.

    Ranks are processes of this machine; hierarchical takes them for two nodes. Each transport makes
    normal and low-latency calls, with several routings and dtypes. The exit code is 1 if one of
    them is wrong. A transport that cannot run here is named with the reason, and is no failure.

    Examples:

        tokenyard selftest
        tokenyard selftest --ranks 4 --json
    """
    from tokenyard.testing import conformance

    with output.mistakes():
        todo = conformance.checks(ranks)
    found: list[conformance.Verdict] = []
    with output.progress("checking", len(todo)) as step:
        for verdict in conformance.run(ranks):
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
