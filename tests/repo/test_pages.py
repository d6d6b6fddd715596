"""What the pages of docs/ show runs: every block of Python as it stands, and every command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cases import pages
from tests.cases.clock import scaled
from tests.cases.pages import PAGES, ROOT, Console, consoles_of, python_of, runs_alone

pytestmark = pytest.mark.docs

TOGETHER = [page for page in PAGES if python_of(page) and not runs_alone(page)]
PARTS = sorted({page.parent.name for page in TOGETHER})
ALONE = [page for page in PAGES if python_of(page) and runs_alone(page)]
CONSOLES = [console for page in PAGES for console in consoles_of(page)]


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, "COLUMNS": "120", "TOKENYARD_PROGRESS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(250),
        check=False,
    )


def write(page: Path, folder: Path) -> str:
    script = folder / f"{page.parent.name}_{page.stem}.py"
    script.write_text(python_of(page))
    return str(script)


@pytest.mark.parametrize("page", ALONE, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    if page.stem == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    done = run([sys.executable, write(page, tmp_path)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_examples_of_a_folder_run_in_one_process(part: str, tmp_path: Path) -> None:
    """A process of its own would cost every page some seconds of imports and kernels."""
    scripts = [write(page, tmp_path) for page in TOGETHER if page.parent.name == part]
    done = run([sys.executable, pages.__file__, *scripts], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def is_run_here(console: Console) -> bool:
    return not console.note.startswith(("not run", "run by"))


def marked(console: Console) -> object:
    marks = [pytest.mark.slow] if console.note.startswith("slow") else []
    return pytest.param(console, id=console.name, marks=marks)


@pytest.mark.parametrize("console", [marked(one) for one in CONSOLES if is_run_here(one)])
def test_commands_do_what_is_shown(console: Console, tmp_path: Path) -> None:
    """They end as they should, and most words that are shown are said."""
    for place, command in enumerate(console.commands):
        done = run(as_python(command.line), tmp_path)
        is_last = place == len(console.commands) - 1
        ends = int(console.note.split()[1]) if is_last and "exit" in console.note else 0
        said = done.stdout + done.stderr
        assert done.returncode == ends, f"{command.line}: {said}"
        shown = pages.words(command.shown)
        missing = shown - pages.words(said)
        assert len(missing) <= len(shown) / 5, f"{command.line} says no {sorted(missing)}: {said}"


def as_python(line: str) -> list[str]:
    """A command as it runs without being installed."""
    words = shlex.split(line)
    if words[0] == "tokenyard":
        return [sys.executable, "-m", "tokenyard", *words[1:]]
    assert words[:3] == ["python", "-m", "tokenyard"], f"{line}: say in a comment who runs it"
    return [sys.executable, *words[1:]]


@pytest.mark.parametrize("console", CONSOLES, ids=lambda console: console.name)
def test_what_is_not_run_here_says_why(console: Console) -> None:
    assert console.commands, f"{console.name} shows no command"
    if console.note.startswith("run by "):
        assert (ROOT / console.note.split()[2]).exists(), console.note
    elif not is_run_here(console):
        assert console.note.startswith("not run: "), console.note
        assert len(console.note) > 15, console.note


def test_commands_are_read_with_their_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- exit 2 -->\n```console\n$ tokenyard size \\\n    --ranks 4  # four\nfirst 12\n"
        "$ tokenyard doctor\n```\n"
    )
    (console,) = consoles_of(page)
    assert console.note == "exit 2"
    assert [shlex.split(command.line) for command in console.commands] == [
        ["tokenyard", "size", "--ranks", "4"],
        ["tokenyard", "doctor"],
    ]
    assert pages.words(console.commands[0].shown) == {"first"}


def test_every_operation_has_a_page() -> None:
    assert {"align", "fp8", "low_latency", "permute", "rearrange"} <= {page.stem for page in PAGES}


def test_pages_show_what_they_say() -> None:
    """By an example that asserts something, or by a command."""
    # These are read, or made by a test of their own.
    told = {"index", "gpu", "transformers_models", "performance", "support"}
    for page in PAGES:
        is_told = page.parent.name in ("internals", "reference") or page.stem in told
        shows = "assert" in python_of(page) or consoles_of(page)
        assert is_told or shows, f"{page.name} shows nothing that is run"
