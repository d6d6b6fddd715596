"""The group of this run: that of its launcher, or one rank where there is no launcher."""

from __future__ import annotations

import atexit
import errno
import os
from typing import TYPE_CHECKING

from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld
from tokenyard.runtime import variables

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_THREADS = (
    "torch.distributed cannot start its threads: raise this user's limit with `ulimit -u`, or the "
    "container's with `docker run --pids-limit`"
)

# Variables that a launcher sets for the processes that it starts together: the number of one of
# them, and how many there are. SLURM_NTASKS is not among them: a plain sbatch script has it too.
_LAUNCHERS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def local_group() -> ProcessGroup | LoopbackGroup:
    """A torch.distributed group for `Buffer`, however the script was started.

    The default group where there is one. Under torchrun, or another launcher that sets RANK and
    WORLD_SIZE, all its ranks over gloo. Else this process alone: plain `python`, or a notebook. A
    group that is made here becomes the default group, and is destroyed when the process ends.
    Raises RuntimeError under a launcher that has started several processes and sets neither.

    For several ranks in one process see `tokenyard.testing.run_virtual`.
    """
    # Not at the top: torch.distributed is not there on every build of torch.
    import torch.distributed as dist

    if not dist.is_initialized():
        if variables.is_set("RANK") and variables.is_set("WORLD_SIZE"):
            try:
                dist.init_process_group("gloo")
            except RuntimeError as error:
                if os.strerror(errno.EAGAIN) in str(error):
                    raise RuntimeError(_NO_THREADS) from error
                raise
        else:
            _check_alone()
            try:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            except RuntimeError:  # no network, not even within the machine
                return LoopbackWorld(1).group(0)
        atexit.register(_destroy)
    group = dist.group.WORLD
    assert group is not None
    return group


def _check_alone() -> None:
    """Raise where this is plainly one of several processes: groups of one would all be right."""
    given = [name for name in ("RANK", "WORLD_SIZE") if variables.is_set(name)]
    if given:
        raise RuntimeError(f"{given[0]} is set alone, want RANK and WORLD_SIZE, or neither")
    for launcher, (rank, size) in _LAUNCHERS.items():
        if variables.read(size) not in ("0", "1"):
            raise RuntimeError(
                f"{launcher} has started {variables.read(size)} processes ({size}) and RANK is not "
                f"set, want for each: RANK=${rank} WORLD_SIZE=${size} MASTER_ADDR=<host of rank 0> "
                "MASTER_PORT=29500 python ..., or a group of your own"
            )


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
