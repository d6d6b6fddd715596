"""Random programs on real processes and on virtual ranks: 42 in the gate, 6,000 at night (or
`python -m tests.fuzz`, which shows each step of a program that fails).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.run import run

pytestmark = [pytest.mark.processes, pytest.mark.faults]

FIRST = {2: (0, 10), 3: (34, 44), 4: (67, 77)}  # seeds, by the number of processes


def check(seeds: range, num_ranks: int, virtual: bool = False) -> None:
    ran = run(seeds, num_ranks, (), virtual)
    failures = [failure for *_, failure in ran if failure is not None]
    assert not failures, "\n\n".join(map(str, failures[:3]))


@pytest.mark.timeout(600)  # kernels are compiled, where nobody has done so yet
@pytest.mark.parametrize(
    "num_ranks, seeds",
    [(ranks, range(first, first + 6)) for ranks in FIRST for first in FIRST[ranks]],
    ids=str,
)
def test_programs(num_ranks: int, seeds: range) -> None:
    check(seeds, num_ranks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_programs_on_virtual_ranks(num_ranks: int) -> None:
    check(range(100 * num_ranks, 100 * num_ranks + 3), num_ranks, virtual=True)


@pytest.mark.slow
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_many_programs_on_virtual_ranks(num_ranks: int) -> None:
    check(range(30_000 + num_ranks, 31_000 + num_ranks, 7), num_ranks, virtual=True)


@pytest.mark.slow
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_very_many_programs(num_ranks: int) -> None:
    check(range(100 + num_ranks, 5100 + num_ranks, 3), num_ranks)


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_many_programs_between_guard_pages() -> None:
    """In a process of its own: the server that forks ranks has the environment it began with."""
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "500", "--seed", "20000"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TOKENYARD_GUARD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
