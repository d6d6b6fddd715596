"""README and examples, run as a new user would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.package import SOURCE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def installed() -> Iterator[dict[str, str]]:
    """An environment in which tokenyard is what `pip install .` makes, not this checkout. Kernels
    that this checkout has compiled come with it: tests/kernels has what is cold.
    """
    with tempfile.TemporaryDirectory() as site:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            site,
            str(ROOT),
        ]
        subprocess.run(pip, check=True, timeout=scaled(250), stdout=subprocess.DEVNULL)
        for kernel in SOURCE.glob("tokenyard/**/__pycache__/*.nb[ci]"):
            place = Path(site, kernel.relative_to(SOURCE))
            place.parent.mkdir(exist_ok=True)
            shutil.copy2(kernel, place)
        yield {**os.environ, "PYTHONPATH": site, "OMP_NUM_THREADS": "1"}


def run(command: list[str], env: dict[str, str]) -> str:
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            command,
            env=env,
            cwd=elsewhere,
            capture_output=True,
            text=True,
            timeout=scaled(250),
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(num_ranks: int, script: Path, env: dict[str, str]) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run([*launch, "--nproc-per-node", str(num_ranks), str(script)], env)


def test_first_snippet_is_the_quickstart() -> None:
    assert SNIPPETS[0] == (ROOT / "examples" / "quickstart.py").read_text()
    assert len(SNIPPETS[0].splitlines()) <= 15


def test_the_package_is_the_installed_one(installed: dict[str, str]) -> None:
    code = "import tokenyard, pathlib; print(pathlib.Path(tokenyard.__file__).parent)"
    home = Path(run([sys.executable, "-c", code], installed).strip())
    assert str(home).startswith(installed["PYTHONPATH"])


@pytest.mark.parametrize("num_ranks", at_night([1, 4], gate=(4,)))
def test_quickstart(installed: dict[str, str], num_ranks: int) -> None:
    out = torchrun(num_ranks, ROOT / "examples" / "quickstart.py", installed)
    got = re.findall(r"rank (\d): (\d+) rows, \[([\d, ]+)\] by expert", out)
    assert sorted(rank for rank, _, _ in got) == [str(r) for r in range(num_ranks)]
    pairs = sum(int(count) for _, _, counts in got for count in counts.split(","))
    assert pairs == num_ranks * 4 * 2  # 4 tokens a rank chose 2 experts each
    assert out.count("combine gave back the right sums: True") == num_ranks


@pytest.mark.parametrize(
    "how", at_night(["file", "text", "without a network"], gate=("without a network",))
)
def test_quickstart_without_a_launcher(installed: dict[str, str], how: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py")]
    if how == "text":
        command = [sys.executable, "-c", SNIPPETS[0]]
    elif how == "without a network":
        command = ["unshare", "--net", "--map-root-user", *command]
    out = run(command, installed)
    assert re.search(r"rank 0: 4 rows, \[[\d, ]+\] by expert", out)
    assert "rank 0: combine gave back the right sums: True" in out


def test_deepep_style(installed: dict[str, str]) -> None:
    out = torchrun(4, ROOT / "examples" / "deepep_style.py", installed)
    assert len(re.findall(r"rank \d: \d+ rows, largest error of combine", out)) == 4


def test_decoding(installed: dict[str, str]) -> None:
    out = torchrun(2, ROOT / "examples" / "decoding.py", installed)
    said = r"rank (\d): (\d+) tokens in 200 steps, \d+ us .*? prepared, .*?; the same bits: True"
    made = {rank: int(tokens) for rank, tokens in re.findall(said, out)}
    assert made.keys() == {"0", "1"}
    assert made["0"] > made["1"] > 0  # whose sequences end sooner


def test_the_page_of_the_first_run_shows_the_quickstart() -> None:
    page = (ROOT / "docs" / "start" / "first_run.md").read_text()
    assert SNIPPETS[0] in page


def test_a_stranger_reads_it_in_a_minute() -> None:
    assert len(README.splitlines()) <= 100
    assert len(SNIPPETS) == 1
    assert README.count("\n|---") == 1
    assert README.count("![") == 1


@pytest.mark.slow
def test_trace_moe_names_the_slow_rank(installed: dict[str, str]) -> None:
    out = torchrun(4, ROOT / "examples" / "trace_moe.py", installed)
    named = dict(re.findall(r"rank (\d): .* most of it for rank (\d)", out))
    assert sorted(named) == ["0", "1", "2", "3"]
    assert {named[rank] for rank in "013"} == {"2"}
