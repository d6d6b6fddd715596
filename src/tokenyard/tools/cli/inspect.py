"""`tokenyard inspect`: what a recorded routing says of a router's balance and its traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json

if TYPE_CHECKING:
    import numpy as np

    from tokenyard.observe.routing.report import Report

_BAR = 32  # columns of the longest
_MOST_ROWS = 16
_SHADES, _SPARKS = " ░▒▓█", "▁▂▃▄▅▆▇█"
_MARKS = {"ok": "+", "note": "-", "warn": "!", "bad": "!"}


def inspect(
    files: Annotated[list[Path], typer.Argument(help="A recording, or the parts of one.")],
    ranks: Annotated[int | None, typer.Option(help="Spread it over so many ranks.")] = None,
    nodes: Annotated[int | None, typer.Option(help="On so many nodes.")] = None,
    layer: Annotated[str | None, typer.Option(help="One layer, by its name or number.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of rows, for bytes.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a picture.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of one file.")] = None,
    as_json: Json = False,
) -> None:
    """Show the balance, the traffic and the copies of a routing that tokenyard.record has noted.

    Without --ranks it is shown as it ran. With it, tokens and experts are dealt out again, in
    consecutive blocks: what the same routing would do to a cluster of another size.

    Examples:

        tokenyard inspect routing.pt
        tokenyard inspect routing.pt --ranks 64 --nodes 8 --hidden 7168
        tokenyard inspect routing.pt --layer 3 --png load.png --html routing.html
    """
    from tokenyard.observe.routing import load, page, picture
    from tokenyard.observe.routing.report import report_of

    with output.mistakes((ValueError, OSError)):
        report = report_of(load(*files), ranks=ranks, nodes=nodes, layer=layer, hidden=hidden)
        if png is not None:
            picture.draw(report, png)
        if html is not None:
            page.write(report, html)
    output.show(report.as_dict(), as_json, lambda console: _draw(console, report))
    for path in (png, html):
        if path is not None and not as_json:
            print(f"written: {path}")


def _draw(console: Console, report: Report) -> None:
    total = report.total
    console.print(Text(report.title, style="bold"))
    for finding in report.findings:
        mark = output.level(finding.level, _MARKS[finding.level])
        console.print(output.hanging(Text.assemble(mark, " ", finding.text), 2))
    console.print()
    ranks = list(range(len(total.rank_load)))
    if len(ranks) > _MOST_ROWS:
        ranks.sort(key=lambda rank: -total.rank_load[rank])
    console.print(_bars("rank", total.rank_load, None, ranks))
    console.print()
    if len(report.each) == 1:
        busiest = (-total.load).argsort(kind="stable")[:_MOST_ROWS].tolist()
        console.print(_bars("expert", total.load, total.places.rank_of_expert, busiest))
    else:
        columns, rows = report.table_of_layers()
        title = "layers: the busiest by the mean"
        console.print(output.table(columns, rows, title=title, right=(2, 4)))
    console.print()
    _heat_map(console, report)
    if len(total.step) > 1:
        console.print()
        ratios = total.rank_imbalance
        console.print(f"imbalance of ranks over steps, {ratios.min():.2f} to {ratios.max():.2f}")
        console.print(_sparks(ratios))


def _bars(what: str, loads: np.ndarray, homes: np.ndarray | None, shown: Any) -> Any:
    mean, largest = loads.mean() or 1.0, loads.max() or 1
    rows = []
    for number in list(shown)[:_MOST_ROWS]:
        ratio = loads[number] / mean
        bar = Text("█" * round(_BAR * loads[number] / largest))
        bar.stylize("red" if ratio > 1.3 else "blue")
        home = [] if homes is None else [int(homes[number])]
        rows.append([number, *home, int(loads[number]), f"{ratio:.2f} x", bar])
    columns = [what, *([] if homes is None else ["rank"]), "rows", "by the mean", ""]
    left = len(loads) - len(rows)
    of = f", {len(rows)} of {len(loads)}" if left else ""
    title = f"load of {what}s" if homes is None and not left else f"busiest {what}s{of}"
    return output.table(columns, rows, title=title)


def _heat_map(console: Console, report: Report) -> None:
    """A line for each sender, two columns for each receiver; of many ranks several in one."""
    import numpy as np

    from tokenyard.observe.routing.charts import blocks

    total = report.total
    each = total.traffic * total.row_bytes / max(1, len(total.step))
    columns, block = blocks(each, _MOST_ROWS, np.mean)
    cells = blocks(columns.T, _MOST_ROWS, np.mean)[0].T
    largest = float(cells.max()) or 1.0
    of = "" if block == 1 else f", mean of {block} x {block} ranks"
    console.print(
        "traffic of a step, from rank (down) to rank (across): █ is "
        f"{output.bytes_text(round(largest))}{of}"
    )
    for line, row in enumerate(cells.tolist()):
        shades = "".join(2 * _SHADES[round(value / largest * (len(_SHADES) - 1))] for value in row)
        console.print(Text.assemble(f"{line * block:>3} ", (shades, "blue")))


def _sparks(values: np.ndarray, columns: int = 72) -> str:
    """One character a step, or for several the largest."""
    block = -(-len(values) // columns)
    tallest = [float(values[n : n + block].max()) for n in range(0, len(values), block)]
    low, high = min(1.0, *tallest), max(tallest)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round((v - low) / span * (len(_SPARKS) - 1))] for v in tallest)
