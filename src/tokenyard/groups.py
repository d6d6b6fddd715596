"""The group of this run: that of its launcher, or one rank where there is no launcher."""

from __future__ import annotations

import atexit
import errno
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld
from tokenyard.runtime import variables

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_THREADS = (
    "torch.distributed cannot start its threads: raise this user's limit with `ulimit -u`, or the "
    "container's with `docker run --pids-limit`"
)
_PORTS = range(20000, 32000)  # of jobs of Slurm: below those that the system gives out


class Launch(NamedTuple):
    """What the variables of a launcher say of this process."""

    by: str
    rank: str  # the variable with its number
    size: str  # that with how many there are
    address: str = ""  # of rank 0, where the launcher tells
    port: int = 0


# Launchers that start several processes: whose number is in one variable, and how many there are in
# the other. SLURM_NTASKS is not among them: a plain sbatch script has it too.
_LAUNCHERS = (
    Launch("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launch("mpiexec", "PMI_RANK", "PMI_SIZE"),
    Launch("mpiexec of PALS", "PALS_RANKID", "PALS_SIZE"),
    Launch("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    Launch("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    Launch("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    Launch("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
)


def local_group() -> ProcessGroup | LoopbackGroup:
    """A torch.distributed group for `Buffer`, however the script was started.

    The default group where there is one. All ranks over gloo under torchrun, under another launcher
    that sets RANK and WORLD_SIZE, under srun, and in the pods of a LeaderWorkerSet. Else this
    process alone: plain `python`, or a notebook. A group that is made here becomes the default
    group, and is destroyed when the process ends. Raises RuntimeError where a launcher has started
    several processes and does not say where the first of them is, as mpirun does.

    For several ranks in one process see `tokenyard.testing.run_virtual`.
    """
    # Not at the top: torch.distributed is not there on every build of torch.
    import torch.distributed as dist

    if not dist.is_initialized():
        if variables.is_set("RANK") and variables.is_set("WORLD_SIZE"):
            _begin()
        elif (launch := _launch()) is not None:
            where = f"tcp://{launch.address}:{launch.port}"
            rank, size = _place(launch)
            _begin(init_method=where, rank=rank, world_size=size)
        else:
            try:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            except RuntimeError:  # no network, not even within the machine
                return LoopbackWorld(1).group(0)
        atexit.register(_destroy)
    group = dist.group.WORLD
    assert group is not None
    return group


def _begin(**where: Any) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", **where)
    except RuntimeError as error:
        if os.strerror(errno.EAGAIN) in str(error):
            raise RuntimeError(_NO_THREADS) from error
        raise


def _launch() -> Launch | None:
    """How this process was started as one of several, with rank 0's address; None if it is alone.
    Raises where it plainly is not alone and the others cannot be found: groups of one would all be
    right.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if variables.is_set(name)]
    if given:
        raise RuntimeError(f"{given[0]} is set alone, want RANK and WORLD_SIZE, or neither")
    several = [one for one in _LAUNCHERS if variables.read(one.size) not in ("0", "1")]
    if several:
        first = several[0]
        # srun sets PMI's variables beside its own; under mpirun srun's are those of its daemons.
        same = [_addressed(one) for one in several if _place(one) == _place(first)]
        found = next((one for one in same if one.address), None)
        if found is not None:
            return found
        raise RuntimeError(
            f"{first.by} has started {variables.read(first.size)} processes ({first.size}) "
            f"and RANK is not set, want for each: RANK=${first.rank} "
            f"WORLD_SIZE=${first.size} MASTER_ADDR=<host of rank 0> MASTER_PORT=29500 "
            "python ..., or a group of your own"
        )
    index = variables.read("JOB_COMPLETION_INDEX")
    if index != "0":
        raise RuntimeError(
            f"this is pod {index} of an indexed Job (JOB_COMPLETION_INDEX) and RANK is not set, "
            "want in each pod: RANK=$JOB_COMPLETION_INDEX WORLD_SIZE=<the Job's completions> "
            "MASTER_ADDR=<pod 0> MASTER_PORT=29500 python ..., or a group of your own"
        )
    return None


def _place(launch: Launch) -> tuple[int, int]:
    """This process's number, and how many there are."""
    return int(variables.read(launch.rank)), int(variables.read(launch.size))


def _addressed(launch: Launch) -> Launch:
    """With where rank 0 is, if variables say so: MASTER_ADDR and MASTER_PORT, or the launcher's."""
    address, port = "", 29500
    if variables.is_set("MASTER_ADDR"):
        address = variables.read("MASTER_ADDR")
    elif launch.by == "srun":
        address = _first_host(variables.read("SLURM_STEP_NODELIST"))
        step = 31 * int(variables.read("SLURM_JOB_ID")) + int(variables.read("SLURM_STEP_ID"))
        port = _PORTS[step % len(_PORTS)]  # steps that share a host each have one of their own
    elif launch.by == "LeaderWorkerSet":
        address = variables.read("LWS_LEADER_ADDRESS")
    if variables.is_set("MASTER_PORT"):
        port = int(variables.read("MASTER_PORT"))
    return launch._replace(address=address, port=port)


def _first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts, whose ranges stand in brackets.

    >>> _first_host("node[003,007-9]-ib,login1"), _first_host("a,b"), _first_host("")
    ('node003-ib', 'a', '')
    """
    head, bracket, rest = hosts.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    numbers, _, tail = rest.partition("]")
    return head + re.split("[,-]", numbers)[0] + _first_host(tail)


def _destroy() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
