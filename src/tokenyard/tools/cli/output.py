"""What commands print: tables, JSON, mistakes and progress, all of them in one way.

Results go to standard output, progress to standard error, so that `--json > file` holds JSON alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tokenyard.runtime import variables

# The option that every command has: `as_json: Json = False`.
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

_WIDTH = 100  # columns where no terminal says otherwise
_STYLES = {"ok": "green", "warn": "yellow", "bad": "red", "note": "cyan"}


class Mistake(Exception):
    """A user's mistake: its one line says what is wrong and what is wanted; the exit code is 2."""


@contextmanager
def mistakes(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Errors of these kinds inside are the user's mistakes."""
    try:
        yield
    except kinds as error:
        raise Mistake(" ".join(str(error).split())) from error


def console() -> Console:
    """Standard output as it is now. Rich numbers, links and markup stay plain text."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal or variables.is_set("COLUMNS") else _WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def show(value: Any, as_json: bool, draw: Callable[[Console], None]) -> None:
    """Print the value as JSON, or draw it for a person."""
    if as_json:
        show_json(value)
    else:
        draw(console())


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str | None = None,
    right: Collection[int] = (),
) -> Table:
    """Columns whose cells are numbers stand right, and those of `right`. A `rich.text.Text` keeps
    its style.
    """
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        cells = [row[number] for row in rows]
        is_number = bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)
        made.add_column(
            Text(name), justify="right" if is_number or number in right else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def level(name: str, word: str | None = None) -> Text:
    """A word in the colour of its level: ok, warn, bad or note."""
    return Text(word or name, style=_STYLES[name])


def hanging(text: Text | str, indent: int) -> Text:
    """Text whose lines after the first begin `indent` columns in."""
    screen, text = console(), Text(text) if isinstance(text, str) else text
    first, *rest = text.wrap(screen, screen.width)
    lines = [first]
    if rest:
        for one in rest:
            one.rstrip()
        lines += Text(" ").join(rest).wrap(screen, screen.width - indent)
    for line in lines[1:]:
        line.pad_left(indent)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def bytes_text(number: int) -> str:
    """Bytes for a person: 512 B, 1.5 KiB, 20 MiB.

    >>> bytes_text(512), bytes_text(1536), bytes_text(20 << 20)
    ('512 B', '1.5 KiB', '20.0 MiB')
    """
    if number < 1024:
        return f"{number} B"
    size = float(number)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """For work of more than a second: `step(name)` says that one of `total` parts is done.

    A bar on a terminal; elsewhere a line on standard error for each part.
    """
    if sys.stderr.isatty():
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda name: bar.update(task, advance=1, description=f"{what}: {name}")
        return
    done, since = 0, time.monotonic()

    def say(name: str) -> None:
        nonlocal done, since
        done, now = done + 1, time.monotonic()
        of = "" if total is None else f" of {total}"
        print(f"{done}{of}: {name}, {now - since:.1f} s", file=sys.stderr, flush=True)
        since = now

    yield say
