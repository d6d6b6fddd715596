"""`tokenyard merge-traces`: parts of several machines on one timeline, and a user's mistakes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.cases.pages import ROOT, consoles_of
from tests.cases.traces import part
from tokenyard.runtime.chrome import chrome_trace
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app


def run(*words: str) -> Result:
    return CliRunner().invoke(make_app(COMMANDS), ["merge-traces", *words])


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two machines has a trace of its own rank alone, and that rank's part beside it."""
    monkeypatch.chdir(tmp_path)
    for rank, host in enumerate(("host-a", "host-b")):
        left = part(rank, -1000 * rank, rank)
        Path(host).mkdir()
        Path(host, "run.json").write_text(json.dumps(chrome_trace([left])))
        Path(host, f"run.json.{host}-{rank}.part").write_text(json.dumps(left))


def calls(path: str) -> list[tuple[int, float]]:
    """The process and the begin of every dispatch."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    return [(one["pid"], one["ts"]) for one in events if one["name"] == "dispatch"]


def test_the_command_of_the_page() -> None:
    page = ROOT / "docs" / "guide" / "tracing.md"
    (command,) = [
        one
        for console in consoles_of(page)
        for one in console.commands
        if "merge-traces" in one.line
    ]
    said = run(*shlex.split(command.line)[2:])
    assert said.exit_code == 0, said.stderr
    assert said.stdout == command.shown
    assert calls("all.json") == [(0, 0.0), (1, 0.0)]  # at once, by rank 0's clock


def test_parts_may_be_named_and_those_that_are_missing_are_told() -> None:
    own = "host-b/run.json.host-b-1.part"
    said = run(own, "host-b/run.json", "--output", "b.json")  # the same part twice
    assert said.stdout == (
        "written: b.json (1 machines, 1 ranks, 1 calls)\nmissing: the parts of ranks 0\n"
    )
    assert len(calls("b.json")) == 1
    told = json.loads(run(own, "--output", "b.json", "--json").stdout)
    assert told["missing_ranks"] == [0]
    assert told["processes"] == 1


@pytest.mark.parametrize(
    "words, text",
    [
        (["gone.json", "--output", "all.json"], "gone.json is no part of a trace"),
        (["host-a/run.json", "--output", "no/where.json"], "No such file or directory"),
        (["host-a/run.json"], "Missing option"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], text: str) -> None:
    said = run(*words)
    assert said.exit_code == 2
    assert text in said.stderr
    assert len(said.stderr.splitlines()) == 1
    assert not Path("all.json").exists()


def test_a_trace_whose_parts_are_gone_is_refused() -> None:
    Path("host-a/run.json.host-a-0.part").unlink()
    said = run("host-a/run.json", "host-b/run.json", "--output", "all.json")
    assert said.exit_code == 2
    assert "host-a/run.json is no part of a trace" in said.stderr
    assert "made of parts, which are gone" in said.stderr
