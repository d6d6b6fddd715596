"""What README and CONTRIBUTING say to type, typed in environments that have nothing else.

Needs a package index, and torch's CPU build there: pip fetches some hundred megabytes.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.pages import ROOT, consoles_of
from tools import pins

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]

README = ROOT / "README.md"
(CONTRIBUTING,) = re.findall(
    r"^From a clone to green tests:\n\n((?:    .*\n)+)",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE,
)
TORCH = f"pip install torch=={pins.read()['gate']['torch']}"


def bash(script: str, limit: float) -> str:
    """What a script prints in a clone, started where no environment is in force."""
    of_others = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in of_others},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(limit),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with what the first line of both installs. It is only copied from."""
    venv = tmp_path_factory.mktemp("empty") / ".venv"
    bash(
        f"python3 -m venv {venv} && . {venv}/bin/activate && {TORCH} && mv {venv} {venv}.torch", 400
    )
    return venv


def empty(venv: Path) -> str:
    """Commands that enter such an environment, anew. Its programs know its path."""
    return f"rm -rf {venv} && cp -al {venv}.torch {venv} && . {venv}/bin/activate\n"


def test_the_blocks_install_the_torch_that_ci_has() -> None:
    lines = CONTRIBUTING.splitlines()
    (block,) = consoles_of(README)
    assert len(lines) == 3
    for line in lines[1].strip(), block.commands[0].line:
        assert line.startswith(f"{TORCH} && pip install ")


def test_readme(with_torch: Path) -> None:
    (block,) = consoles_of(README)
    script = "\n".join(command.line for command in block.commands)
    said = bash(empty(with_torch) + script, 600)
    assert said.count("combine gave back the right sums: True") == 4
    assert "Successfully installed" in said


@pytest.mark.parametrize(
    "how",
    ["--collect-only -q", pytest.param("", marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
def test_contributing(with_torch: Path, how: str) -> None:
    """From a clone to green tests: in the gate as far as every test is found."""
    make, install, run = (line.strip() for line in CONTRIBUTING.splitlines())
    assert make == "python3 -m venv .venv && . .venv/bin/activate"
    said = bash("\n".join([empty(with_torch), install, f"{run} {how}"]), 7000)
    assert re.search(r"\d{4,}(/\d+)? (tests collected|passed)", said), said[-2000:]
