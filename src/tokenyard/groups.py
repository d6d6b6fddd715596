"""The group of this run: that of its launcher, or one rank where there is no launcher."""

from __future__ import annotations

import atexit
import errno
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld
from tokenyard.runtime import network, variables

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenyard.comm.mpi import MpiGroup

_NO_THREADS = (
    "torch.distributed cannot start its threads: raise this user's limit with `ulimit -u`, or the "
    "container's with `docker run --pids-limit`"
)
_PORTS = range(20000, 32000)  # for steps of Slurm: below the ports that the system gives out


class Launcher(NamedTuple):
    """A program that starts several processes, and the variables by which it tells each of them."""

    name: str
    rank: str  # which one this is
    size: str  # how many there are
    hosts: str = ""  # where they are, rank 0 first; "" if no variable says so


# SLURM_NTASKS is not among these: a plain sbatch script has it too.
_LAUNCHERS = (
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE"),
    Launcher("mpiexec of PALS", "PALS_RANKID", "PALS_SIZE"),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    Launcher("LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
)


class _Launched:
    """Stands for the group of `local_group`, where none was given."""

    def __repr__(self) -> str:
        return "local_group()"


LAUNCHED = _Launched()


def local_group() -> ProcessGroup | LoopbackGroup | MpiGroup:
    """A group for `Buffer`, however the script was started.

    torch.distributed's default group where there is one. All ranks over gloo under torchrun, under
    another launcher that sets RANK and WORLD_SIZE, under srun, and in the pods of a
    LeaderWorkerSet; over MPI, without torch.distributed, under mpirun and its like, unless
    MASTER_ADDR is set. Else this process alone: plain `python`, or a notebook. A group over gloo
    that is made here becomes the default group, and is destroyed when the process ends. Raises
    RuntimeError where a launcher has started several processes that cannot find each other.

    For several ranks in one process see `tokenyard.testing.run_virtual`.
    """
    # Not at the top: torch.distributed is not there on every build of torch.
    import torch.distributed as dist

    if not dist.is_initialized():
        if variables.is_set("RANK") and variables.is_set("WORLD_SIZE"):
            variables.number("MASTER_PORT")
            _begin(rank=variables.number("RANK"), world_size=variables.number("WORLD_SIZE", 1))
        elif (place := _find_place()) is not None:
            _begin(**place)
        elif several := _several():
            return _over_mpi(several[0])
        else:
            try:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            except RuntimeError:  # no network, not even within the machine
                return LoopbackWorld(1).group(0)
        atexit.register(_destroy)
    group = dist.group.WORLD
    assert group is not None
    return group


def _begin(**place: Any) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", **place)
    except RuntimeError as error:
        if os.strerror(errno.EAGAIN) in str(error):
            raise RuntimeError(_NO_THREADS) from error
        if why := network.why_not_connected(error):
            raise RuntimeError(why) from error
        raise


def _find_place() -> dict[str, Any] | None:
    """This process's place among those that a launcher started, for init_process_group; None if
    it is alone, or MPI knows its place. Raises where others were plainly started and cannot be
    found: each would be a group of one, and all of these would be right.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if variables.is_set(name)]
    if given:
        raise RuntimeError(f"{given[0]} is set alone, want RANK and WORLD_SIZE, or neither")
    several = _several()
    if several:
        address = next(filter(None, map(_address, several)), None)
        if address is None:
            return None
        rank, size = _numbers(several[0])
        return {"init_method": f"tcp://{address}", "rank": rank, "world_size": size}
    index = variables.read("JOB_COMPLETION_INDEX")
    if index != "0":
        raise RuntimeError(
            f"this is pod {index} of an indexed Job (JOB_COMPLETION_INDEX) and RANK is not set, "
            "want in each pod: RANK=$JOB_COMPLETION_INDEX WORLD_SIZE=<the Job's completions> "
            "MASTER_ADDR=<pod 0> MASTER_PORT=29500 python ..., or a group of your own"
        )
    return None


def _several() -> list[Launcher]:
    """The launcher that started this process and others; twice where one of them uses another."""
    found = [one for one in _LAUNCHERS if variables.number(one.size) > 1]
    # srun sets PMI's variables beside its own; under mpirun srun's are those of its daemons.
    return [one for one in found if _numbers(one) == _numbers(found[0])]


def _over_mpi(launcher: Launcher) -> MpiGroup:
    """All the processes that it started. Raises RuntimeError where MPI does not know them."""
    size = variables.read(launcher.size)
    started = f"{launcher.name} has started {size} processes ({launcher.size})"
    wanted = (
        f"for each: RANK=${launcher.rank} WORLD_SIZE=${launcher.size} MASTER_ADDR=<host of rank 0> "
        "MASTER_PORT=29500 python ..., or a group of your own"
    )
    if launcher.hosts:
        raise RuntimeError(f"{started} and {launcher.hosts} is not set, want {wanted}")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI beneath it
        raise RuntimeError(
            f"{started} and RANK is not set, want mpi4py (pip install 'tokenyard[mpi]'), or "
            + wanted
        ) from error
    from tokenyard.comm.mpi import MpiGroup  # wants mpi4py

    group = MpiGroup(MPI.COMM_WORLD)
    if group.size() != int(size):
        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
        raise RuntimeError(
            f"{started} and mpi4py's MPI ({library}) sees {group.size()}, want the mpirun that "
            "comes with that MPI; of Slurm, srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH"
        )
    return group


def _numbers(launcher: Launcher) -> tuple[int, int]:
    """Which process this is, and of how many."""
    return variables.number(launcher.rank), variables.number(launcher.size)


def _address(launcher: Launcher) -> str | None:
    """Host and port of rank 0: MASTER_ADDR and MASTER_PORT, else what the launcher says."""
    host, port = "", 29500
    if variables.is_set("MASTER_ADDR"):
        host = variables.read("MASTER_ADDR")
    elif launcher.hosts:
        host = _first_host(variables.read(launcher.hosts))
        if launcher.name == "srun":  # steps may share a host
            step = 31 * variables.number("SLURM_JOB_ID") + variables.number("SLURM_STEP_ID")
            port = _PORTS[step % len(_PORTS)]
    if variables.is_set("MASTER_PORT"):
        port = variables.number("MASTER_PORT")
    return f"{host}:{port}" if host else None


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
