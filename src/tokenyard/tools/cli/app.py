"""Where the command begins: `tokenyard`, or `python -m tokenyard`.

`COMMANDS` is the one place where a command is entered. Its module is imported at every start, so it
imports torch and rooms of tokenyard only inside its functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

# "module:name" in this folder, where the name is a function or a typer.Typer with commands.
COMMANDS = {
    "inspect": "inspect:inspect",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
    "selftest": "selftest:selftest",
    "size": "size:size",
    "plan": "planning:plan",
    "simulate": "planning:simulate",
    "balance": "planning:balance",
    "merge-traces": "merge_traces:merge_traces",
    "warm-up": "warm_up:warm_up",
}


def main(given: Sequence[str] | None = None) -> None:
    """Run the command of these words, by default the process's own, and exit."""
    words = list(sys.argv[1:] if given is None else given)
    if find_spec("typer") is None or find_spec("rich") is None:
        from tokenyard.tools.cli import plain

        plain.main(words)
        return
    from tokenyard.tools.cli.group import make_app

    make_app(COMMANDS)(words, prog_name="tokenyard")
