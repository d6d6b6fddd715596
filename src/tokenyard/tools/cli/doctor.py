"""`tokenyard doctor`: what this machine offers, what a Buffer chooses here, what would help."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Start no ranks.")] = False,
    as_json: Json = False,
) -> None:
    """Look at this machine: what ranks find here, what a Buffer would choose, what would help.

    Versions, cores and memory nodes, shared memory, limits, the network of gloo, GPUs; then two
    ranks open a Buffer and tell what they took and why. Run it where ranks will run, in their
    container and as their user. The exit code is 1 if something cannot work.

    Examples:

        tokenyard doctor
        tokenyard doctor --quick --json
    """
    from tokenyard.tools.doctor import PARTS, examine

    with output.progress("looking at", len(PARTS) + (not quick)) as step:
        found = examine(with_trial=not quick, on_part=step)
    counts = {name: sum(one.level == name for one in found) for name in ("ok", "warn", "bad")}

    def draw(console: Console) -> None:
        part = ""
        for one in found:
            if one.part != part:
                console.print(Text(one.part, style="bold"))
                part = one.part
            line = Text("  ").append_text(output.level(one.level, f"{one.level:<4} "))
            console.print(output.hanging(line.append(one.what), 7))
            if one.advice:
                console.print(output.hanging(Text(f"       -> {one.advice}"), 10))
        console.print(f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['bad']} bad")

    output.show({"counts": counts, "findings": [one._asdict() for one in found]}, as_json, draw)
    raise typer.Exit(1 if counts["bad"] else 0)
