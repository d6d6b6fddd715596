"""How a Buffer begins: its ranks connect, and agree on who is where and on the options.

Only then are the transport and the engines built, so that bad options on one rank raise on all.
"""

from __future__ import annotations

import logging
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard import kernels as kernel_sets
from tokenyard import validate
from tokenyard.comm import connect
from tokenyard.comm.base import Communicator
from tokenyard.comm.clocks import clocks_ahead
from tokenyard.comm.process_table import ProcessWatch, this_process
from tokenyard.engine.agreement import Agreement, Call, Terms
from tokenyard.engine.engine import Engine
from tokenyard.engine.mismatch import STAGES
from tokenyard.errors import PeerError, SharedMemoryError
from tokenyard.groups import LAUNCHED, local_group
from tokenyard.low_latency.engine import LowLatency
from tokenyard.low_latency.shared import SharedSlots
from tokenyard.low_latency.stepwise import StepwiseSlots
from tokenyard.replicas import Replicas, place_words
from tokenyard.runtime import observers, variables
from tokenyard.runtime.streams import streams_for
from tokenyard.shm import guard
from tokenyard.topology import Placement, Topology
from tokenyard.transports import (
    Opening,
    Probe,
    Transport,
    check_name,
    open_transport,
    why_not_attached,
    why_not_shared,
)
from tokenyard.types import Origin, digest

_log = logging.getLogger("tokenyard")
_MOST_BYTES = 2**50
_BESIDE_A_BALANCE = (
    "a Buffer has a balance, want neither low_latency_mode nor Replicas with it: slots of the "
    "low-latency mode, and copies, stay where they are"
)
_NO_COPIES = "placement is Replicas, want the rank of each expert: ElasticBuffer knows no copies"


def take_group(group: Any, comm: Any = None) -> Any:
    """What a Buffer is opened on: the group, or else the MPI communicator, or what was launched.
    Raises ValueError if it is none. Local: without a group there is nobody to tell.
    """
    wanted = "want group=, a torch.distributed process group, or comm=, an mpi4py communicator"
    if group is LAUNCHED:
        group = local_group() if comm is None else None
    if group is None and comm is not None:
        if not _is_of_mpi(comm):
            raise ValueError(f"comm is {validate.kind(comm)}, {wanted}")
        group = comm
    if hasattr(group, "communicator"):  # a virtual one
        return group
    if _is_of_mpi(group):
        from tokenyard.comm.mpi import MpiGroup  # wants mpi4py

        return MpiGroup(group)
    if group is None:
        raise ValueError(
            "group is None, as the default group is before init_process_group and after "
            f"destroy_process_group, {wanted}"
        )
    # Not at the top: torch.distributed is not there on every build of torch.
    import torch.distributed as dist

    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group is GroupMember.NON_GROUP_MEMBER: this process is none of its ranks, " + wanted
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is {validate.kind(group)}, {wanted}")
    try:
        dist.get_backend(group)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "group was destroyed (destroy_process_group), or is unknown to torch.distributed, "
            + wanted
        ) from error
    return group


def _is_of_mpi(group: Any) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")  # importing it would start MPI
    return mpi is not None and isinstance(group, mpi.Comm)


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What a Buffer was made with, unchecked."""

    transport: str
    kernels: str
    ranks_per_node: int | Sequence[int] | None
    timeout: float | None
    placement: Tensor | Replicas | None
    num_nvl_bytes: int
    num_rdma_bytes: int
    num_channels: int
    low_latency_mode: bool
    enable_shrink: bool
    balance: float | str | None = None
    takes_replicas: bool = True

    def seconds(self) -> float:
        """The timeout; without one that of TOKENYARD_TIMEOUT, for programs that cannot be edited on
        machines where a rank may come late. Raises ValueError.
        """
        given: Any = self.timeout
        name = "TOKENYARD_TIMEOUT" if given is None else "timeout"
        if given is None:
            given = variables.read(name)
            with suppress(ValueError):
                given = float(given)
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        validate.require(
            is_number and 0 < given <= 1e6,
            f"{name} is {given!r}, want seconds above 0, at most 1e6",
        )
        return given

    def check(
        self, num_ranks: int, device: torch.device
    ) -> tuple[kernel_sets.Kernels, Placement | None]:
        """The kernel set and the placement that they name. Raises ValueError if one is wrong."""
        self.seconds()
        if self.ranks_per_node is not None:
            validate.ranks_per_node(self.ranks_per_node, num_ranks)
        sets = ", ".join(kernel_sets.available())
        validate.require(
            isinstance(self.kernels, str),
            f"kernels is {validate.kind(self.kernels)}, want a name: auto, {sets}",
        )
        kernel_set = kernel_sets.pick(self.kernels, device.type)
        validate.require(
            not (self.low_latency_mode and self.kernels == "triton" and device.type == "cpu"),
            "kernels is 'triton' with low_latency_mode, want auto, numba or reference: the set has "
            "no steps of the mode",
        )
        check_name(self.transport)
        for name in ("num_nvl_bytes", "num_rdma_bytes"):
            validate.integer(name, getattr(self, name), at_least=0, at_most=_MOST_BYTES)
        for name in ("low_latency_mode", "enable_shrink"):
            validate.switch(name, getattr(self, name))
        if self.balance is not None:
            validate.balance(self.balance)
            validate.require(not self.low_latency_mode, _BESIDE_A_BALANCE)
        if self.placement is None:
            return kernel_set, None
        placement = validate.placement(self.placement, num_ranks, device, self.no_copies)
        return kernel_set, placement

    @property
    def no_copies(self) -> str:
        """Why experts can have no copies here, now and after a rebalance; "" if they can."""
        if self.balance is not None:
            return _BESIDE_A_BALANCE
        return "" if self.takes_replicas else _NO_COPIES

    def digest(self, placement: Placement | None) -> int:
        """A digest of the options that must be the same on all ranks."""
        where = place_words(placement)
        rings = (self.num_nvl_bytes, self.num_channels) if self.transport == "ring" else None
        nodes = self.ranks_per_node
        if isinstance(nodes, Sequence):
            nodes = list(nodes)
        slots = (self.low_latency_mode, self.enable_shrink, self.balance)
        return digest(repr((self.transport, rings, nodes, where, slots)))


def open_engine(group: Any, options: Options) -> tuple[Engine, LowLatency | None]:
    """The engines of a new Buffer. Bad options on one rank raise on all of them."""
    timeout = 30.0
    with suppress(ValueError):  # which `check` tells all ranks
        timeout = options.seconds()
    communicator = connect(group, timeout)
    first = Agreement(_Meeting(communicator))
    met = _meet(communicator, first, options)
    with ExitStack() as undo:
        undo.callback(communicator.close)
        built, failure = None, None
        try:
            built = _build(communicator, met, options, undo)
        except PeerError:
            raise
        except Exception as error:
            failure = error
        # A rank may close its Buffer at once, but not before all are connected to it.
        first.confirm("Buffer", failure)
        assert built is not None
        undo.pop_all()
    return built


class _Met(NamedTuple):
    """What a rank knows of the others when all have met."""

    kernel_set: kernel_sets.Kernels
    placement: Placement | None
    told_RW: np.ndarray  # by rank: a number of its Buffer, 1 if it can share no memory, its
    # machine, the three words of its Probe, and from 6 on those of its process
    topology: Topology
    alone: str | None  # why ranks share no memory, if they do not

    @property
    def machines(self) -> list[int]:
        return self.told_RW[:, 2].tolist()

    @property
    def processes_RW(self) -> np.ndarray:
        return self.told_RW[:, 6:]


class _Meeting(Transport):
    """Where ranks meet before they have a transport: each tells all the same."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        return self._communicator.tell_all(message_RM[0], stage)


def _meet(communicator: Communicator, first: Agreement, options: Options) -> _Met:
    rank, size = communicator.rank, communicator.size
    probe: Probe | None = None
    try:
        try:
            guard.begin_from_environment()
            for tell in observers.opening:
                tell()
            kernel_set, placement = options.check(size, communicator.device)
            call = Call(stage=STAGES.index("Buffer"), options=options.digest(placement))
            probe, own_reason = _try_probe(kernel_set)
            probed = (0, -1, 0) if probe is None else probe.words
            sharing = own_reason is not None, _machine(), *probed
            mine = np.array((secrets.randbits(62), *sharing, *this_process()), np.int64)
            terms = Terms(call, payload=np.tile(mine, (size, 1)))
        except Exception as error:
            first.reject("Buffer", error)
        told_RW = first.meet("Buffer", terms).payload
        alone = None
        if told_RW[:, 1].any():
            culprit = int(told_RW[:, 1].argmax())
            alone = own_reason if culprit == rank else f"rank {culprit} cannot share memory"
        watch = ProcessWatch(rank, told_RW[:, 2], told_RW[:, 6:])
        communicator.settle(str(told_RW[0, 0]), watch)
        if options.ranks_per_node is not None:
            topology = _given(options.ranks_per_node, size)
        elif alone is not None:
            topology = Topology.from_marks(told_RW[:, 2].tolist())
        else:
            marks = _find_nodes(communicator, told_RW[:, 2:6], options.seconds())
            topology = Topology.from_marks(marks)
    finally:
        if probe is not None:
            probe.close()
    return _Met(kernel_set, placement, told_RW, topology, alone)


def _build(
    communicator: Communicator, met: _Met, options: Options, undo: ExitStack
) -> tuple[Engine, LowLatency | None]:
    rank, machines, topology = communicator.rank, met.machines, met.topology
    shared_id, own_id = int(met.told_RW[0, 0]), int(met.told_RW[rank, 0])
    opened = open_transport(
        options.transport,
        Opening(
            communicator=communicator,
            kernels=met.kernel_set,
            topology=topology,
            timeout=options.seconds(),
            num_bytes=options.num_nvl_bytes,
            num_channels=options.num_channels,
            label=str(shared_id),
        ),
        several_machines=len(set(machines)) > 1,
        alone=met.alone,
    )
    # Others may have opened their Buffers when this rank fails, and wait for it in a call.
    undo.enter_context(opened)
    agreement, streams = Agreement(opened, shared_id), streams_for(communicator.device)
    agreement.clocks_R = clocks_ahead(opened, machines)
    where, processes = place_words(met.placement), met.processes_RW.tobytes()
    place = repr((processes, machines, topology.node_of_rank, where, opened.name))
    origin = Origin(shared_id, rank, digest(place), tuple(topology.node_of_rank))
    slack = _slack(options.balance, met.alone, topology, rank)
    beside = agreement, topology, met.placement, origin, own_id, streams, slack, options.no_copies
    engine = Engine(opened, communicator, met.kernel_set, *beside)
    if not options.low_latency_mode:
        return engine, None
    made = StepwiseSlots if opened.node is None else SharedSlots
    if opened.node is None and options.enable_shrink:
        raise ValueError(
            f"enable_shrink is True on transport {opened.name!r}, want ranks that share memory "
            "(direct or ring): nobody can be left out of a collective"
        )
    bound = options.enable_shrink, options.num_rdma_bytes
    return engine, made(engine, met.kernel_set, *bound)


def _try_probe(kernel_set: kernel_sets.Kernels) -> tuple[Probe | None, str | None]:
    """Memory by which peers find out whether they can use this rank's, or why there is none."""
    reason = why_not_shared(kernel_set)
    if reason is not None:
        return None, reason
    try:
        return Probe(), None
    except SharedMemoryError as error:
        _log.warning("ranks cannot share memory, which is the fast way on one machine: %s", error)
        return None, str(error)


def _slack(balance: Any, alone: str | None, topology: Topology, rank: int) -> float | None:
    """The slack of a balance, where ranks can share the memory that experts lie in."""
    if balance is None or topology.num_ranks == 1:
        return None
    if alone is None and topology.num_nodes == topology.num_ranks:
        alone = "each is alone on its node"
    if alone is None:
        return validate.balance(balance)
    if rank == 0:
        _log.warning("balance=%r has no effect, since ranks share no memory: %s", balance, alone)
    return None


def _given(ranks_per_node: int | Sequence[int], num_ranks: int) -> Topology:
    if isinstance(ranks_per_node, Sequence):
        return Topology.of_sizes(ranks_per_node)
    return Topology.even(num_ranks, ranks_per_node)


def _find_nodes(communicator: Communicator, told_RW: np.ndarray, timeout: float) -> list[int]:
    """For each rank the lowest rank of its machine whose memory it can use. That is the rank itself
    where containers hide the processes of a machine from each other. `told` holds each rank's
    machine, and the words of its Probe.
    """
    rank, told = communicator.rank, told_RW.tolist()
    machine, mark, why = told[rank][0], rank, []
    for other, (there, *words) in enumerate(told[:rank]):
        if there == machine:
            # Half the time, so that all come to the exchange in time to see who is missing there.
            reason = why_not_attached(timeout / 2, *words)
            if reason is None:
                mark = other
                break
            why.append((other, reason))
    if mark == rank and why:  # one rank of a node says so
        first, reason = why[0]
        _log.warning(
            "rank %d is on the machine of rank %d and cannot use its memory, so they count as two "
            "nodes: %s",
            rank,
            first,
            reason,
        )
    # When all ranks have answered, all have looked, and probes may be closed.
    return communicator.gather([mark], "Buffer (find nodes)")[0]


def _machine() -> int:
    """A digest of the kernel's boot id: equal on ranks of one machine, and on no others. Raises
    OSError if it could not be read just now, rather than let a rank count as another machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return digest(file.read())
    except (FileNotFoundError, PermissionError):  # another system, or a locked one
        return digest(socket.gethostname())
