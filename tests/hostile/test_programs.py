"""Ranks are started from any kind of program: a script without a guard, standard input, `python -c`
and a notebook.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.lanes import at_night

PROGRAM = """
from typing import NamedTuple

import torch

import tokenyard
from tokenyard.testing import run_processes


class Result(NamedTuple):
    rank: int
    out: torch.Tensor


SCALE = 3.0
ROUTED = {
    "topk_idx": torch.arange(4).view(2, 2), "topk_weights": torch.ones(2, 2), "num_experts": 4
}


def weigh(rows):
    return rows * SCALE


def job(group, x):
    with tokenyard.Buffer(group) as buffer:
        got = buffer.dispatch(x, **ROUTED)
        return Result(buffer.rank, buffer.combine(weigh(got.recv_x), got.handle).x)


results = run_processes(job, 2, torch.ones(2, 8), timeout=%d)
assert all(isinstance(result, Result) for result in results)
with tokenyard.Buffer(tokenyard.local_group()) as buffer:
    alone = buffer.dispatch(torch.ones(2, 8), **ROUTED)
print([(result.rank, result.out.sum().item()) for result in results], len(alone.recv_x))
"""
SAID = "[(0, 48.0), (1, 48.0)] 2"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM % scaled(100))
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", at_night(["a script", "standard input", "python -c"], gate=("standard input",))
)
def test_programs(kind: str, program: Path) -> None:
    given = {
        "a script": [str(program)],
        "standard input": [],
        "python -c": ["-c", program.read_text()],
    }
    done = subprocess.run(
        [sys.executable, *given[kind]],
        input=program.read_text() if kind == "standard input" else "",
        capture_output=True,
        text=True,
        cwd=program.parent,
        timeout=scaled(200),
        check=False,
    )
    assert done.stdout.strip() == SAID, done.stderr


@pytest.mark.timeout(300)
def test_a_notebook(program: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(text) for text in program.read_text().split("\n\n\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=scaled(200), kernel_name="python3").execute()
    said = [output.text for output in cells[-1].outputs if output.get("name") == "stdout"]
    assert "".join(said).strip() == SAID
