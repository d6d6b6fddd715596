"""Every optimiser that we know: its checkpoint on other ranks, as docs/guide/optimisers.md says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.cases.nn import optimiser_table as table
from tests.cases.nn import optimisers as jobs
from tests.cases.processes import Pools


def test_the_table_has_every_optimiser_of_torch() -> None:
    names = [line.split("`")[1].split("(")[0] for line in table.lines_of_page()]
    assert names == [*jobs.torch_optimisers(), *jobs.OTHERS]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("torch.optim.AdamW", table.WORKS),
        pytest.param("torch.optim.SGD", table.WORKS, marks=pytest.mark.slow),
        ("torch.optim.Adafactor", table.TOGETHER),
    ],
)
def test_two_ranks_to_three(processes: Pools, tmp_path: Path, name: str, want: str) -> None:
    assert table.outcome(name, processes, 2, (3,), str(tmp_path)) == want


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", [*jobs.torch_optimisers(), *jobs.OTHERS])
def test_a_row_of_the_table(processes: Pools, tmp_path: Path, name: str) -> None:
    package = name.split(".", maxsplit=1)[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = table.outcome(name, processes, table.SAVED_ON, table.LOADED_ON, str(tmp_path))
    assert table.line(name, found) in table.lines_of_page()
