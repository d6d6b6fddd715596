"""Ctrl-C at any moment: all ranks end soon, say little, and leave nothing behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases.clock import scaled

ROOT = Path(__file__).parents[2]
EXAMPLES = ("quickstart.py", "deepep_style.py", "train_moe.py")
SOON, SCREEN = 3.0, 50  # seconds, lines
LONGEST = 12.0  # seconds after which Ctrl-C comes at the latest


def interrupt(draw: random.Random, folder: Path) -> str:
    """Start an example as a shell would, and press Ctrl-C. What went wrong, or nothing."""
    num_ranks, example = draw.choice((1, 2, 4)), draw.choice(EXAMPLES)
    is_cold, delay = draw.random() < 0.5, draw.uniform(0.1, LONGEST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = os.environ | {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if is_cold:
        settings["NUMBA_CACHE_DIR"] = str(folder)
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(num_ranks):
        together: Any = {"process_group": ranks[0].pid if ranks else 0}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / example)],
                env=settings | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                **together,
            )
        )
    time.sleep(scaled(delay))
    begin = time.monotonic()
    if any(rank.poll() is None for rank in ranks):
        os.killpg(ranks[0].pid, signal.SIGINT)
    late, said = [], []
    for number, process in enumerate(ranks):
        try:
            said.append(
                process.communicate(timeout=max(0.1, begin + scaled(20) - time.monotonic()))[1]
            )
        except subprocess.TimeoutExpired:
            process.kill()
            said.append(process.communicate()[1])
            late.append(number)
    seconds = time.monotonic() - begin
    what = f"{example} on {num_ranks} ranks, {'cold' if is_cold else 'warm'}, after {delay:.2f} s"
    longest = max(len(text.splitlines()) for text in said)
    turns = [path.name for path in folder.rglob("*.turn")]
    if late or seconds > scaled(SOON) or longest > SCREEN or turns:
        end = "\n".join(text[-1500:] for text in said)
        return f"{what}: {seconds:.1f} s, late {late}, {longest} lines, left {turns}\n{end}"
    return ""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs process_group= of Popen")
@pytest.mark.parametrize(
    "tries",
    [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])],
)
@pytest.mark.timeout(300)
def test_ctrl_c(tmp_path: Path, tries: int) -> None:
    draw = random.Random(tries)
    wrong = [text for number in range(tries) if (text := interrupt(draw, tmp_path / str(number)))]
    assert not wrong, f"{len(wrong)} of {tries}:\n" + "\n\n".join(wrong[:5])
