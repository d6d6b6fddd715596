"""The typer application: how commands are found, and how mistakes are told.

A user's mistake, be it an option that does not exist or a value that the library refuses, is one
line on standard error and exit code 2. Ctrl-C exits with 130. Anything else that is raised is an
error of ours, and shows its traceback.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tokenyard import __version__
from tokenyard.tools.cli.output import Mistake

_HELP = """Expert parallelism for Mixture-of-Experts models, anywhere PyTorch runs.

Every command has --help with examples, and --json for programs. Exit codes: 0 all is well, 1 the
command found a fault, 2 it was asked wrongly."""


class Group(TyperGroup):
    """Tells mistakes in one line, also those that typer itself finds."""

    def main(self, *args: Any, **given: Any) -> Any:
        given["standalone_mode"] = False  # else typer prints errors its own way
        try:
            code = super().main(*args, **given)
        except Mistake as mistake:
            _tell(f"tokenyard: {mistake}")
            code = 2
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except Exception as error:
            # typer brings a click of its own from 0.25 on, so its errors are known by their form.
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                path = getattr(getattr(error, "ctx", None), "command_path", "tokenyard")
                said = " ".join(error.format_message().split()).rstrip(".")
                _tell(f"{path}: {said} (see `{path} --help`)")
            code = 2
        sys.exit(code if isinstance(code, int) else 0)


def make_app(commands: Mapping[str, str]) -> typer.Typer:
    app = typer.Typer(
        name="tokenyard",
        help=_unwrapped(_HELP),
        cls=Group,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
        add_completion=False,
        pretty_exceptions_enable=False,
        invoke_without_command=True,
    )
    app.callback()(_root)
    for name, where in commands.items():
        module, attribute = where.split(":")
        command = getattr(importlib.import_module(f"tokenyard.tools.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            for one in command.registered_commands:
                one.help = one.help or _unwrapped(one.callback.__doc__)
            app.add_typer(command, name=name)
        else:
            app.command(name, help=_unwrapped(command.__doc__))(command)
    return app


def _unwrapped(docstring: str | None) -> str:
    """Text whose paragraphs are one line each, as the terminal breaks them; examples, which are
    indented, keep their lines.

    >>> _unwrapped("One.\\n\\n    Two\\n    lines.\\n\\n        a\\n        b")
    'One.\\n\\nTwo lines.\\n\\n    a\\n\\n    b'
    """
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(
        one.replace("\n", "\n\n" if one.startswith("    ") else " ") for one in paragraphs
    )


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tokenyard {__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
