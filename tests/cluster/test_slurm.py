"""Ranks that Slurm starts: a real slurmctld and slurmd of one node, on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.programs import free_port

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

RANK = """
import torch, tokenyard
group = tokenyard.local_group()
with tokenyard.Buffer(group) as buffer:
    print(buffer.all_gather(torch.tensor([[group.rank()]]))[0].tolist(), repr(buffer), flush=True)
"""
BATCH = """#!/bin/sh
#SBATCH --ntasks 2
#SBATCH --output {folder}/out
"{python}" -c "import tokenyard; print('alone', tokenyard.local_group().size())"
srun --mpi=none "{python}" {folder}/rank.py
"""
CONFIG = """ClusterName=box
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={other_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
NodeName={host} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with rank.py, in which SLURM_CONF is; ends what it started."""
    programs = "munged", "slurmctld", "slurmd", "srun"
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and {', '.join(missing) or 'all of Slurm'}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "rank.py").write_text(RANK)
    places = {"host": socket.gethostname().split(".")[0], "folder": folder}
    told = CONFIG.format(**places, port=free_port(), other_port=free_port())
    (folder / "slurm.conf").write_text(told)
    socket_, log = folder / "munge", folder / "munged.log"
    munge = ["munged", "-F", f"--key-file={key}", f"--socket={socket_}", f"--log-file={log}"]
    munge += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/seed", "--force"]
    settings = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, env=settings, stderr=subprocess.DEVNULL))
            await_(socket_.exists)  # that of munged
        await_(lambda: "idle" in run(folder, "sinfo", "-h", "-o", "%T"))
        yield folder
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(scaled(30))


def await_(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + scaled(60)
    while not is_there():
        assert time.monotonic() < deadline, "a daemon of Slurm has not come"
        time.sleep(0.05)


def run(folder: Path, *command: str) -> str:
    settings = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    done = subprocess.run(
        command,
        env=settings,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    return done.stdout + done.stderr


SAID = [f"[[0], [1]] <tokenyard.Buffer rank {rank} of 2 on 1 node, direct>" for rank in range(2)]


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_tasks_of_a_step_are_ranks(slurm: Path, mpi: str) -> None:
    command = "srun", f"--mpi={mpi}", "-n", "2", sys.executable, str(slurm / "rank.py")
    assert sorted(run(slurm, *command).splitlines()) == SAID


def test_a_batch_script_is_alone_and_its_step_is_not(slurm: Path) -> None:
    script = slurm / "job.sh"
    script.write_text(BATCH.format(folder=slurm, python=sys.executable))
    said = run(slurm, "sbatch", "-W", "--export=ALL", str(script))
    assert sorted((slurm / "out").read_text().splitlines()) == [*SAID, "alone 1"], said
