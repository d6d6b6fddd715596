"""Ranks that a real mpiexec starts, of Open MPI and of MPICH: `run` is as Processes.run, for a list
of jobs. They come from wheels, each in an environment of its own (.ci/mpi-env).
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import tokenyard
from tests.cases.clock import scaled

ROOT = Path(__file__).parents[2]
MPI = Path(os.environ.get("TOKENYARD_MPI", ROOT / ".ci" / "mpi")).resolve()
LIBRARIES = ("openmpi", "mpich")
# More ranks than cores, also for root.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
Job = tuple[Any, ...]  # job, *args: what each rank runs is job(group, *args)


def why_not(library: str) -> str:
    """Why it cannot be run here; "" if it can."""
    if (MPI / library / "bin" / "mpiexec").exists():
        return ""
    return f"{library} is not at hand: .ci/mpi-env DIRECTORY GATE, and TOKENYARD_MPI=DIRECTORY"


def mpiexec(
    library: str,
    num_ranks: int,
    *words: str,
    options: Sequence[str] = (),
    limit: float = 250,
    program: str = "",
) -> subprocess.CompletedProcess[str]:
    """Its Python, or another program, under mpiexec with these words: what it printed and said."""
    programs = MPI / library / "bin"
    # Ranks have no launcher but this one.
    known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        known.pop(name, None)
    what = [program or programs / "python", *words]
    with tempfile.TemporaryDirectory() as own:  # for what killed ranks of Open MPI leave
        places = {"TMPDIR": own, "OMPI_MCA_btl_sm_backing_directory": own}
        return subprocess.run(
            [programs / "mpiexec", *options, "-n", str(num_ranks), *what],
            env=known | _OPEN_MPI | {"OMP_NUM_THREADS": "1"} | places,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=scaled(limit),
            check=False,
        )


def run(
    library: str,
    num_ranks: int,
    jobs: Sequence[Job],
    options: Sequence[str] = (),
    limit: float = 250,
    gone: Sequence[int] = (),
) -> list[list[Any]]:
    """By job what each rank has returned, in ranks that end at the latest with the limit. Raises
    AssertionError with what a rank raised. Of those `gone` nothing is expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "jobs").write_bytes(pickle.dumps(jobs))
        words = ("-m", __name__, folder, str(scaled(limit)), str(int(bool(gone))))
        done = mpiexec(library, num_ranks, *words, options=options, limit=limit + 30)
        by_rank = []
        for rank in range(num_ranks):
            if rank in gone:
                by_rank.append([None] * len(jobs))
                continue
            path = Path(folder, f"rank-{rank}")
            assert path.exists(), done.stdout + done.stderr
            error, answers = torch.load(path, weights_only=False)
            assert not error, f"rank {rank}: {error}\n{done.stderr}"
            by_rank.append(answers)
    return [list(answers) for answers in zip(*by_rank)]


def _rank(folder: str, limit: str, others_die: str) -> None:
    faulthandler.dump_traceback_later(float(limit), exit=True)
    torch.set_num_threads(1)
    group: Any = tokenyard.local_group()
    answers: list[Any] = []
    error = ""
    try:
        for job, *args in pickle.loads(Path(folder, "jobs").read_bytes()):
            answers.append(_call(job, group, args))
    except BaseException:
        error = traceback.format_exc()
    torch.save((error, answers), Path(folder, f"rank-{group.rank()}"))
    faulthandler.cancel_dump_traceback_later()
    if others_die == "1":
        os._exit(0)  # MPI_Finalize of Open MPI 5.0 may wait for ranks that have died


def _call(job: Callable[..., Any], group: Any, args: Sequence[Any]) -> Any:
    """A copy of what the job returns: results lie in memory that the next job may take again."""
    file = io.BytesIO()
    torch.save(job(group, *args), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
