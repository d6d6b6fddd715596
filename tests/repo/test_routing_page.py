"""docs/guide/routing.md: its commands, one after the other in one folder, say what it shows."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cases.pages import ROOT, consoles_of, words
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app

PAGE = ROOT / "docs" / "guide" / "routing.md"
STEPS = "20"  # a third of what the page shows


@pytest.mark.slow
@pytest.mark.docs
def test_commands_do_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: starting one for each command would take longer than all of them."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    for console in consoles_of(PAGE):
        for command in console.commands:
            first, *rest = shlex.split(command.line)
            if first == "tokenyard":
                done = CliRunner().invoke(make_app(COMMANDS), rest)
                said = done.output
                assert done.exit_code == (2 if console.note.endswith("exit 2") else 0), said
            else:
                monkeypatch.setattr("sys.argv", [*rest, "--steps", STEPS])
                runpy.run_path(str(ROOT / rest[0]), run_name="__main__")
                said = capsys.readouterr().out
            shown = words(command.shown)
            missing = shown - words(said)
            assert len(missing) <= len(shown) / 5, f"{command.line} says no {missing}: {said}"
    for name in ("routing.png", "routing.html"):
        assert (tmp_path / name).stat().st_size > 10_000
