"""examples/finetune_lora.py: two ranks lose what one process loses, and save one adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="peft is not installed")

from safetensors.torch import load_file

from tests.cases.clock import scaled

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_lora.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.docs
@pytest.mark.timeout(400)
def test_the_script(tmp_path: Path) -> None:
    def run(launch: list[str], name: str, *flags: str) -> list[float]:
        given = ["--steps", "8", "--save", name, "--losses", f"{name}.txt"]
        done = subprocess.run(
            [sys.executable, *launch, str(SCRIPT), *given, *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=scaled(250),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(line) for line in (tmp_path / f"{name}.txt").read_text().split()]

    pytest.importorskip("matplotlib")
    one = run([], "one")
    two = run(TORCHRUN, "two", "--plot", "lora.png", "--beside", "one.txt")
    assert len(one) == 8
    assert one[-1] < one[0] - 0.5
    assert two == pytest.approx(one, abs=1e-5)
    assert (tmp_path / "lora.png").read_bytes()[:4] == b"\x89PNG"
    got, want = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("two", "one")
    )
    assert got.keys() == want.keys()
    for key, weight in want.items():
        assert (got[key] - weight).abs().max() < 1e-5, key
