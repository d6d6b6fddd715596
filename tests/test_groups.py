"""The group of this run, however it was started."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import tokenyard
from tests.cases.processes import Pools
from tests.cases.programs import run_python

ALONE = """
import torch.distributed as dist
import tokenyard
group = tokenyard.local_group()
assert group is tokenyard.local_group() is dist.group.WORLD
print(group.rank(), group.size(), dist.get_backend())
"""


def test_a_process_without_a_launcher_is_alone_and_leaves_quietly() -> None:
    done = run_python("-c", ALONE, limit=60)
    assert (done.stdout, done.stderr, done.returncode) == ("0 1 gloo\n", "", 0)


def use_the_default_group(group: Any) -> bool:
    return tokenyard.local_group() is dist.group.WORLD


@pytest.mark.processes
def test_the_default_group_is_taken_where_there_is_one(processes: Pools) -> None:
    assert processes(2).run(use_the_default_group) == [True, True]


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4 proc"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpiexec has started 2 processes"),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 processes"),
        ({"RANK": "1"}, "RANK is set alone, want RANK and WORLD_SIZE, or neither"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set alone, want RANK and WORLD_SIZE, or neither"),
    ],
    ids=["mpirun", "mpiexec", "srun", "rank alone", "size alone"],
)
def test_one_of_several_processes_is_no_group_of_one(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=said):
        tokenyard.local_group()


def test_a_batch_script_without_srun_is_alone() -> None:
    """sbatch sets the number of tasks that it was asked for; the script runs once."""
    alone = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    done = run_python("-c", ALONE, limit=60, **alone)
    assert (done.stdout, done.returncode) == ("0 1 gloo\n", 0), done.stderr
