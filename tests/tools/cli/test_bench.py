"""`tokenyard bench`: options, files, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tokenyard.runtime import limits
from tokenyard.tools.bench import running
from tokenyard.tools.bench.report import Figure, Measured, Report, save
from tokenyard.tools.bench.timing import Timed
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app

ALIGN = ["bench", "align", "--tokens", "4,8", "--experts", "8", "--topk", "2", "--rounds", "2"]


def tokenyard(*words: str) -> Result:
    return CliRunner().invoke(make_app(COMMANDS), words)


def kept(path: Path, dispatch: float) -> str:
    figures = [
        Figure(way, way != "memcpy", Timed(median, median, median, 9, 1))
        for way, median in {"memcpy": 1.0, "dispatch": dispatch}.items()
    ]
    save(path, [Report("dispatch", {}, [Measured("8 tokens", "memcpy", None, figures)])])
    return str(path)


def test_a_benchmark_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said = tokenyard(*ALIGN, "--save", str(report))
    assert said.exit_code == 0, said.output
    assert "4 tokens, blocks of 64" in said.stdout
    assert "of torch" in said.stdout
    assert "moe_align_block_size" in said.stdout
    assert json.loads(report.read_text())["parameters"]["tokens"] == [4, 8]
    again = tokenyard("bench", "compare", str(report), str(report))
    assert (again.exit_code, again.stdout) == (0, "4 of 4 figures did not change\n")


def test_json_is_all_that_standard_output_holds() -> None:
    said = tokenyard(*ALIGN, "--json")
    assert json.loads(said.stdout)["bench"] == "align"


@pytest.mark.parametrize(
    "words, text",
    [
        (["bench", "align", "--tokens", "many"], "--tokens is 'many', want numbers separated"),
        (["bench", "align", "--tokens", "0"], "tokens is 0, want at least 1"),
        (["bench", "few", "--ranks", "0"], "ranks is 0, want at least 1"),
        (["bench", "align", "--save", "/nowhere/a.json"], "there is no folder /nowhere"),
        (["bench", "compare", "none.json", "none.json"], "cannot read none.json: No such file"),
        (["bench", "align", "--ranks", "2"], "No such option: --ranks"),
    ],
)
def test_mistakes_are_told_in_one_line(words: list[str], text: str) -> None:
    said = tokenyard(*words)
    assert said.exit_code == 2
    assert text in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_too_little_memory_is_said_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available", lambda: 24 << 30)
    monkeypatch.setattr(running, "Processes", None)  # nobody is started
    said = tokenyard("bench", "dispatch", "--ranks", "8", "--tokens", "64,4096")
    assert said.exit_code == 2
    assert re.fullmatch(
        r".*dispatch of 4096 tokens on each of 8 ranks takes about 3\d\.\d GiB, 24\.0 GiB are "
        r"free: lower ranks, tokens or hidden\n",
        said.stderr,
    )


def test_compare_can_fail(tmp_path: Path) -> None:
    before, after = kept(tmp_path / "a.json", 2.0), kept(tmp_path / "b.json", 3.0)
    assert tokenyard("bench", "compare", before, after).exit_code == 0
    said = tokenyard("bench", "compare", before, after, "--fail-slower")
    assert said.exit_code == 1
    assert "slower" in said.stdout
    assert tokenyard("bench", "compare", after, before, "--fail-slower").exit_code == 0
    found = json.loads(tokenyard("bench", "compare", before, after, "--json").stdout)
    assert [one["verdict"] for one in found] == ["same", "slower"]
