"""`tokenyard bench`: measure this machine, and compare two runs.

Each benchmark of the catalogue becomes a command that takes its parameters, with their defaults.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenyard.tools.bench.catalogue import BENCHMARKS, Benchmark
from tokenyard.tools.bench.shape import Shape
from tokenyard.tools.cli import output
from tokenyard.tools.cli.output import Json, Mistake

if TYPE_CHECKING:
    from rich.console import Console

    from tokenyard.tools.bench.report import Report

_HELP = {
    "ranks": "Processes that exchange tokens.",
    "tokens": "Of each rank, separated by commas.",
    "hidden": "Elements of a token.",
    "topk": "Experts that each token chooses.",
    "experts": "Experts of all ranks.",
    "intermediate": "Elements inside an expert.",
    "transport": "How rows travel; auto takes what a Buffer would.",
    "fp8": "Dispatch in FP8.",
    "cases": "How many of the ten transpositions.",
    "dtype": "Of the tensors.",
    "rounds": "Rounds in which all ways take turns.",
    "slow_rank": "Slow this rank on purpose, to see it named.",
}
# Options that every benchmark has, beside --json.
_OUTPUT = {
    "save": "Write the report to this file, for `bench compare`.",
    "png": "Draw the report into this file (PNG or SVG).",
}

bench = typer.Typer(
    help="Measure dispatch, combine and more beside memcpy, gloo and others, verified first.",
    no_args_is_help=True,
)


def _signature(one: Benchmark) -> inspect.Signature:
    """The signature of the command: the benchmark's parameters, then where results go."""

    def option(name: str, kind: Any, help: str, default: Any) -> inspect.Parameter:
        annotation = Annotated[kind, typer.Option(help=help)]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, keyword, default=default, annotation=annotation)

    made = []
    for name in one.takes:
        default = getattr(one.shape, name)
        if name == "tokens":
            default = ",".join(map(str, default))
        kind: Any = int | None if name == "slow_rank" else type(default)
        made.append(option(name, kind, _HELP[name], default))
    made += [option(name, Path | None, help, None) for name, help in _OUTPUT.items()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    made.append(inspect.Parameter("as_json", keyword, default=False, annotation=Json))
    return inspect.Signature(made)


def _command(one: Benchmark) -> Any:
    def run(**given: Any) -> None:
        save, png, as_json = (given.pop(name) for name in ("save", "png", "as_json"))
        _measure(one, given, save, png, as_json)

    signature = _signature(one)
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: each.annotation for name, each in signature.parameters.items()}
    smaller = "--cases 2" if "cases" in one.takes else "--tokens 32"
    run.__doc__ = f"""{one.summary}

    Results are verified before anything is timed. A figure is the median of the rounds, of the
    slowest rank.

    Examples:

        tokenyard bench {one.name}
        tokenyard bench {one.name} {smaller} --save before.json --png before.png
    """
    return run


for _one in BENCHMARKS.values():
    bench.command(_one.name)(_command(_one))


def _shape(one: Benchmark, given: dict[str, Any]) -> Shape:
    text = given.get("tokens")
    if text is not None:
        try:
            given["tokens"] = tuple(int(number) for number in text.split(","))
        except ValueError:
            raise Mistake(f"--tokens is {text!r}, want numbers separated by commas") from None
    shape = replace(one.shape, **given)
    with output.mistakes():
        shape.check()
    return shape


def _measure(
    one: Benchmark, given: dict[str, Any], save: Path | None, png: Path | None, as_json: bool
) -> None:
    shape = _shape(one, given)
    for path in (save, png):
        if path is not None and not path.absolute().parent.is_dir():
            raise Mistake(f"cannot write {path}: there is no folder {path.parent}")
    from tokenyard.runtime.limits import NoMemory
    from tokenyard.testing import RankFailed
    from tokenyard.tools.bench.report import save as save_reports
    from tokenyard.tools.bench.running import WrongResult, run

    total = shape.cases if "cases" in one.takes else len(shape.tokens)
    try:
        with output.progress(f"bench {one.name}", total if one.name != "fp8" else None) as step:
            report = run(one.name, shape, say=step)
    except WrongResult as wrong:
        print(f"wrong result, so nothing was timed: {wrong}")
        raise typer.Exit(1) from None
    except (ValueError, NoMemory) as error:
        raise Mistake(" ".join(str(error).split())) from None
    except RankFailed as failed:
        said = str(failed).strip().splitlines()[-1]
        if not said.startswith("ValueError: "):
            raise
        raise Mistake(said.removeprefix("ValueError: ")) from None
    except TimeoutError as late:
        raise Mistake(f"{str(late).splitlines()[0]}; measure fewer tokens or rounds") from None
    if save is not None:
        save_reports(save, [report])
    if png is not None:
        _draw(report, png)
    output.show(report.as_dict(), as_json, lambda console: _show(report, console))


def _draw(report: Report, path: Path) -> None:
    from tokenyard.tools.bench.picture import draw

    try:
        draw(report, path)
    except ModuleNotFoundError as error:
        raise Mistake(f"--png needs {error.name}: pip install matplotlib") from None
    except ValueError as error:
        raise Mistake(f"cannot draw {path}: {error}") from None


def _show(report: Report, console: Console) -> None:
    from tokenyard.tools.bench.picture import seconds_text, title_of

    console.print(title_of(report))
    has_bytes = any(case.num_bytes for case in report.measured)
    for case in report.measured:
        rows: list[list[object]] = []
        for figure in case.figures:
            timed = figure.timed
            row: list[object] = [
                output.level("ok", figure.way) if figure.ours else figure.way,
                seconds_text(timed.median),
                f"{seconds_text(timed.low)} to {seconds_text(timed.high)}",
                f"{case.ratio(figure):.2f}",
            ]
            if has_bytes:
                row.append(f"{(case.num_bytes or 0) / timed.median / 1e9:.2f}")
            rows.append(row)
        columns = [case.label, "median", "quartiles", f"of {case.base}"]
        console.print()
        console.print(output.table(columns + ["GB/s"] * has_bytes, rows))
    console.print()
    if report.slow_rank:
        console.print(output.level("warn", report.slow_rank["text"]))
    for name, why in report.absent.items():
        console.print(f"not measured: {name} ({why})")
    machine = report.machine
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before; "
        f"torch {machine['torch']}, tokenyard {machine['tokenyard']} {machine['commit'] or ''}"
    )


@bench.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="A file that --save wrote.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    fail_slower: Annotated[
        bool, typer.Option(help="Exit with 1 if a way of tokenyard's became slower.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what changed between two runs, beyond the noise of their rounds.

    A way became slower or faster if the middle halves of its rounds do not meet, if medians differ
    by 5 % at least, and if what it is measured beside did not move as far.

    Examples:

        tokenyard bench compare before.json after.json
        tokenyard bench compare before.json after.json --fail-slower
    """
    from tokenyard.tools.bench.compare import FASTER, SAME, SLOWER
    from tokenyard.tools.bench.compare import compare as compare_reports
    from tokenyard.tools.bench.picture import seconds_text
    from tokenyard.tools.bench.report import load

    with output.mistakes():
        changes = compare_reports(load(before), load(after))
    styles = {SLOWER: "bad", FASTER: "ok"}
    told = [one for one in changes if one.verdict != SAME]

    def draw(console: Console) -> None:
        rows = [
            [
                one.bench,
                one.case,
                one.way if one.ours else f"{one.way} (not ours)",
                seconds_text(one.before.median),
                seconds_text(one.after.median),
                f"{one.ratio:.2f}",
                output.level(styles.get(one.verdict, "note"), one.verdict),
            ]
            for one in told
        ]
        if rows:
            columns = ["bench", "case", "way", "before", "after", "times", "verdict"]
            console.print(output.table(columns, rows))
        console.print(f"{len(changes) - len(told)} of {len(changes)} figures did not change")

    output.show([one.as_dict() for one in changes], as_json, draw)
    if fail_slower and any(one.ours and one.verdict == SLOWER for one in changes):
        raise typer.Exit(1)
