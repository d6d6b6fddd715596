"""examples/train_moe.py: the number of ranks changes nothing but rounding."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.nn import training as jobs
from tests.cases.processes import Pools

pytestmark = pytest.mark.processes


def check(processes: Pools, num_steps: int, timeout: float) -> None:
    ((want_losses, want_grads),) = processes(1).run(jobs.run, num_steps, timeout=timeout)
    assert want_losses[-1] < want_losses[0] - 1
    for num_ranks in (2, 4):
        results = processes(num_ranks).run(jobs.run, num_steps, timeout=timeout)
        assert set().union(*(grads for _, grads in results)) == set(want_grads)
        for losses, grads in results:
            assert losses == pytest.approx(want_losses, abs=1e-4)
            for name, grad in grads.items():
                want = want_grads[name]
                assert (grad - want).norm() <= 1e-6 * want.norm(), name


def test_losses_and_gradients_are_those_of_one_rank(processes: Pools) -> None:
    check(processes, num_steps=12, timeout=scaled(110))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_steps(processes: Pools) -> None:
    check(processes, num_steps=200, timeout=scaled(400))


def test_a_checkpoint_goes_on_on_more_ranks(processes: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    processes(2).run(jobs.run_and_save, 3, path)
    ((want, _),) = processes(1).run(jobs.run, 6)
    for num_ranks in (1, 4):
        for losses in processes(num_ranks).run(jobs.load_and_run, 6, path):
            assert losses == pytest.approx(want[3:], abs=1e-4)


@pytest.mark.slow
@pytest.mark.docs
def test_the_script(tmp_path: Path) -> None:
    """As its first lines say: with torchrun and without, saved and loaded."""

    def run(launch: list[str], *flags: str) -> str:
        done = subprocess.run(
            [sys.executable, *launch, str(jobs.SCRIPT), *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=scaled(250),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pytest.importorskip("matplotlib")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run(torchrun, "--steps", "2", "--save", "checkpoint")
    assert re.search(r"loss 5\.\d+ at step 1, 5\.\d+ at step 2", out)
    out = run([], "--steps", "3", "--load", "checkpoint", "--plot", "loss.png")
    assert re.search(r"loss [45]\.\d+ at step 3, [45]\.\d+ at step 3", out)
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
