"""Ctrl-C at any moment: all ranks end soon, say little, and leave nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cases.clock import scaled
from tests.cases.package import cold
from tests.cases.programs import launched

ROOT = Path(__file__).parents[2]
EXAMPLES = ("quickstart.py", "deepep_style.py", "train_moe.py")
LONGEST = 12.0  # seconds after which Ctrl-C comes at the latest
# Torch's own import loses a Ctrl-C now and then (`python -c "import torch"`, 2 of 25 tries), so the
# clock starts after it, and after that of its compiler, which tokenyard.nn imports.
RUN = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
import torch, torch._dynamo
print("ready", flush=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interrupt(draw: random.Random, folder: Path, soon: float) -> str:
    """Start an example as a shell would, and press Ctrl-C. What went wrong, or nothing."""
    num_ranks, example = draw.choice((1, 2, 4)), draw.choice(EXAMPLES)
    is_cold, delay = draw.random() < 0.5, draw.uniform(0.1, LONGEST)
    ranks = start(example, num_ranks, cold(folder) if is_cold else {})
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    begin = time.monotonic()
    if any(process.poll() is None for process in ranks):
        os.killpg(ranks[0].pid, signal.SIGINT)
    late, said = [], []
    for number, process in enumerate(ranks):
        left = max(0.1, begin + scaled(20) - time.monotonic())
        try:
            said.append(process.communicate(timeout=left)[1])
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[1])
            late.append(number)
    seconds = time.monotonic() - begin
    what = f"{example} on {num_ranks} ranks, {'cold' if is_cold else 'warm'}, after {delay:.2f} s"
    left_over = [path.name for path in folder.rglob("*.turn")]
    with suppress(ProcessLookupError):
        os.killpg(ranks[0].pid, signal.SIGKILL)
        left_over.append("a process")
    if late or seconds > soon or left_over:
        end = "\n".join(text[-1500:] for text in said)
        return f"{what}: {seconds:.1f} s, late {late}, left {left_over}\n{end}"
    return ""


def start(example: str, num_ranks: int, settings: dict[str, str]) -> list[subprocess.Popen[str]]:
    """All ranks, in one process group, as those of a shell's job are."""
    ranks: list[subprocess.Popen[str]] = []
    for launch in launched(num_ranks):
        together: Any = {"process_group": ranks[0].pid if ranks else 0}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RUN, str(ROOT / "examples" / example)],
                env=os.environ | settings | launch,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **together,
            )
        )
    return ranks


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs process_group= of Popen")
@pytest.mark.parametrize(
    ("tries", "soon"),
    [
        (2, scaled(15)),  # on a machine that does other things as well
        pytest.param(200, scaled(3), marks=[pytest.mark.slow, pytest.mark.timeout(7200)]),
    ],
    ids=["few", "many"],  # the same at a second try, whose limits are longer
)
@pytest.mark.timeout(300)
def test_ctrl_c(tmp_path: Path, tries: int, soon: float) -> None:
    draw = random.Random(tries)
    wrong = []
    for number in range(tries):
        folder = tmp_path / str(number)
        if text := interrupt(draw, folder, soon):
            wrong.append(text)
        shutil.rmtree(folder, ignore_errors=True)
    assert not wrong, f"{len(wrong)} of {tries}:\n" + "\n\n".join(wrong[:5])
