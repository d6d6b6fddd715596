"""The command as such: help, version, mistakes, JSON, and what it loads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import tokenyard
from tests.cases.programs import run_python
from tests.cases.source import imported
from tokenyard.tools.cli import output, plain
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app

RUNNER = CliRunner()


def leaves() -> list[list[str]]:
    """The words of every command, those of groups included."""
    found = []
    for name, where in COMMANDS.items():
        module, attribute = where.split(":")
        command = getattr(importlib.import_module(f"tokenyard.tools.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            found += [[name, one.name or ""] for one in command.registered_commands]
        else:
            found.append([name])
    return found


def test_help_names_every_command() -> None:
    said = RUNNER.invoke(make_app(COMMANDS), [])
    assert said.exit_code == 0
    assert all(f" {name} " in said.output for name in COMMANDS)


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_every_command_has_examples_and_json(words: list[str]) -> None:
    said = RUNNER.invoke(make_app(COMMANDS), [*words, "--help"], env={"COLUMNS": "200"})
    assert said.exit_code == 0
    assert "Examples:" in said.output
    assert f"tokenyard {' '.join(words)}" in said.output.split("Examples:")[1]
    assert "--json" in said.output


@pytest.mark.parametrize("words", leaves(), ids=" ".join)
def test_an_unknown_option_is_told_in_one_line(words: list[str]) -> None:
    said = RUNNER.invoke(make_app(COMMANDS), [*words, "--nonsense"])
    path = f"tokenyard {' '.join(words)}"
    assert said.exit_code == 2
    assert said.stderr.startswith(f"{path}: No such option: --nonsense ")
    assert said.stderr.endswith(f"(see `{path} --help`)\n")
    assert said.stderr.count("\n") == 1
    assert said.stdout == ""


def test_an_unknown_command_is_told_in_one_line() -> None:
    said = RUNNER.invoke(make_app(COMMANDS), ["warmup"])
    assert said.exit_code == 2
    assert "No such command 'warmup'" in said.stderr
    assert said.stderr.count("\n") == 1


def test_errors_of_ours_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(dtypes: str, kinds: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(plain, "compile_each", broken)
    said = RUNNER.invoke(make_app(COMMANDS), ["warm-up"])
    assert isinstance(said.exception, ZeroDivisionError)


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(dtypes: str, kinds: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plain, "compile_each", interrupted)
    said = RUNNER.invoke(make_app(COMMANDS), ["warm-up"])
    assert (said.exit_code, said.stdout, said.stderr) == (130, "", "")


def test_warm_up() -> None:
    said = RUNNER.invoke(make_app(COMMANDS), ["warm-up", "--kinds", "local", "--json"])
    assert said.exit_code == 0
    assert list(json.loads(said.stdout)["kinds"]) == ["local"]
    assert "1 of 1: local, " in said.stderr


@pytest.mark.parametrize(
    "option, value, want",
    [
        ("--kinds", "locl", "tokenyard: kind is 'locl', want all or some of direct,ring,"),
        ("--dtypes", "bfloat", "tokenyard: dtype is 'bfloat', want some of bfloat16,"),
        ("--dtypes", "int8", "tokenyard: dtype is torch.int8, want one that combine can sum"),
    ],
)
def test_what_cannot_be_warmed_up(option: str, value: str, want: str) -> None:
    said = RUNNER.invoke(make_app(COMMANDS), ["warm-up", option, value])
    assert said.exit_code == 2
    assert said.stderr.startswith(want)
    assert said.stderr.count("\n") == 1


def test_help_loads_no_torch() -> None:
    """A start takes a fraction of a second, not the seconds that torch takes."""
    code = (
        "import sys, atexit; sys.argv = ['tokenyard', '--version']\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'numba' in sys.modules))\n"
        "from tokenyard.tools.cli.app import main; main()"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tokenyard {tokenyard.__version__}\nFalse False\n"


def without_typer(folder: Path, *words: str) -> tuple[int, str, str]:
    """The command where typer is not installed, so far as the program can find out."""
    (folder / "hide.py").write_text(
        "import importlib.util as util, sys\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'typer' else find(name, *rest)\n"
        "from tokenyard.tools.cli.app import main\n"
        "main(sys.argv[1:])\n"
    )
    done = run_python(str(folder / "hide.py"), *words)
    return done.returncode, done.stdout, done.stderr


def test_without_typer_it_says_what_to_install(tmp_path: Path) -> None:
    code, said, told = without_typer(tmp_path, "doctor")
    assert (code, said) == (2, "")
    assert told == "tokenyard: this command needs typer and rich: pip install typer rich\n"


def test_warm_up_needs_no_typer(capsys: pytest.CaptureFixture[str]) -> None:
    imports = set(imported(Path(plain.__file__)))
    assert not {"typer", "rich"} & {name.split(".")[0] for name in imports}
    plain.main(["warm-up", "--kinds", "local", "--json"])
    assert list(json.loads(capsys.readouterr().out)["kinds"]) == ["local"]
    with pytest.raises(SystemExit) as ended:
        plain.main(["warm-up", "--kinds", "nothing"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("tokenyard warm-up: kind is 'nothing', want all or")


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    made = output.table(["part", "bytes"], [["[rows]", 5], ["slots", 1000]])
    output.console().print(made)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["part    bytes", "[rows]      5", "slots    1000"]


def test_lines_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    made = output.hanging("one two three four five six seven eight nine ten", 4).plain
    assert made == "one two three four\n    five six seven\n    eight nine ten"
    assert output.hanging("short", 4).plain == "short"
