"""The group of this run, however it was started."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import tokenyard
from tests.cases.processes import Pools
from tests.cases.programs import free_port, run_python
from tokenyard import groups
from tokenyard.runtime import network

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
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, "flux run has started 2 processes"),
        ({"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}, "LeaderWorkerSet has started 2 proc"),
        ({"JOB_COMPLETION_INDEX": "2"}, "this is pod 2 of an indexed Job"),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "SLURM_PROCID": "1",  # of the daemons that mpirun starts by srun
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "localhost",
            },
            "mpirun has started 8 processes",
        ),
        ({"RANK": "1"}, "RANK is set alone, want RANK and WORLD_SIZE, or neither"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set alone, want RANK and WORLD_SIZE, or neither"),
    ],
    ids=[
        "mpirun",
        "mpiexec",
        "srun",
        "flux",
        "lws",
        "job",
        "mpirun in a batch script",
        "rank alone",
        "size alone",
    ],
)
def test_one_of_several_processes_is_no_group_of_one(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=said):
        tokenyard.local_group()


LAUNCHERS = [(one.rank, one.size) for one in groups._LAUNCHERS]


@pytest.mark.parametrize("rank, size", LAUNCHERS, ids=[size for _, size in LAUNCHERS])
def test_variables_of_a_launcher_may_be_empty_and_must_be_numbers(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (rank, size, "RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
    assert groups._find_place() is None
    assert groups._several() == []
    monkeypatch.setenv(size, "many")
    with pytest.raises(ValueError, match=f"{size} is 'many', want a whole number"):
        tokenyard.local_group()
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "1st")
    with pytest.raises(ValueError, match=f"{rank} is '1st', want a whole number"):
        tokenyard.local_group()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_variables_of_torchrun_must_be_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for one, value in (given | {name: "none"}).items():
        monkeypatch.setenv(one, value)
    with pytest.raises(ValueError, match=f"{name} is 'none', want a whole number"):
        tokenyard.local_group()


def test_ranks_that_gloo_cannot_connect_are_told_of_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What doctor says of the network of this machine, in the place of torch's error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [...] Connection refused")

    outward = {"lo": ("127.0.0.1", True, True), "eth0": ("10.0.0.7", False, True)}
    monkeypatch.setattr(network, "interfaces", lambda: outward)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "first")
    loopback = [(0, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_: loopback)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("GLOO_SOCKET_IFNAME", "")):
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError) as raised:
        tokenyard.local_group()
    assert str(raised.value) == (
        "gloo could not connect the ranks; this host's name, first, is 127.0.1.1: gloo reaches "
        "ranks of this machine alone; for several machines set GLOO_SOCKET_IFNAME=eth0"
    )


TOGETHER = """
import torch, torch.distributed as dist
import tokenyard
group = tokenyard.local_group()
with tokenyard.Buffer(group) as buffer:
    print(buffer.all_gather(torch.tensor([[group.rank()]]))[0].tolist(), group.size())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "by, rank",
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}, "SLURM_PROCID"),
        ({"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "localhost"}, "LWS_WORKER_INDEX"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "OMPI_COMM_WORLD_RANK"),
    ],
    ids=["srun", "lws", "mpirun"],
)
def test_ranks_that_a_launcher_started_find_each_other(by: dict[str, str], rank: str) -> None:
    """Its variables alone, as plain processes have them here."""
    given = {**by, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    if "SLURM_STEP_NUM_TASKS" not in by:
        given["MASTER_PORT"] = str(free_port())
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(run_python, "-c", TOGETHER, limit=120, **given, **{rank: str(number)})
            for number in range(2)
        ]
        done = [run.result() for run in runs]
    assert [one.stdout for one in done] == ["[[0], [1]] 2\n"] * 2, [one.stderr for one in done]


def test_a_batch_script_without_srun_is_alone() -> None:
    """sbatch sets the number of tasks that it was asked for; the script runs once."""
    alone = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    done = run_python("-c", ALONE, limit=60, **alone)
    assert (done.stdout, done.returncode) == ("0 1 gloo\n", 0), done.stderr
