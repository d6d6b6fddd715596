"""How a Buffer begins: ranks connect, and agree on who is where before anything else is built."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard import kernels as kernel_sets
from tokenyard import validate
from tokenyard.comm import connect
from tokenyard.comm.process_table import ProcessId, ProcessWatch, this_process
from tokenyard.engine.agreement import STAGES, Agreement, Call, Terms
from tokenyard.engine.stages import Engine
from tokenyard.errors import PeerError, SharedMemoryError
from tokenyard.low_latency.engine import LowLatency
from tokenyard.runtime.streams import streams_for
from tokenyard.topology import Placement, Topology
from tokenyard.transports import (
    CollectiveTransport,
    Opening,
    Probe,
    check_name,
    open_transport,
    why_not_attached,
    why_not_shared,
)
from tokenyard.types import digest

_log = logging.getLogger("tokenyard")
_MOST_BYTES = 2**50


def check_group(group: Any, comm: Any) -> None:
    """Raises what can be said of a group that is none. Local: there is nobody to tell."""
    wanted = "want group=, a torch.distributed process group"
    if hasattr(group, "communicator"):  # a virtual one
        return
    if group is None and comm is not None:
        raise ValueError(f"comm= (an MPI communicator) is given, {wanted}")
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


def open_engine(
    group: Any,
    *,
    num_nvl_bytes: int,
    num_rdma_bytes: int,
    num_channels: int,
    transport: str,
    kernels: str,
    ranks_per_node: int | Sequence[int] | None,
    timeout: float,
    placement: Tensor | None,
    low_latency_mode: bool,
    enable_shrink: bool,
) -> tuple[Engine, LowLatency | None]:
    """The engines of a new Buffer. Bad options on one rank raise on all of them."""
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    sane = is_number and 0 < timeout <= 1e6
    communicator = connect(group, timeout if sane else 30.0)
    rank, size, device = communicator.rank, communicator.size, communicator.device
    # The first meeting needs no fast kernels, and must take place even if `kernels` is wrong.
    plain = kernel_sets.load("reference")
    meeting = CollectiveTransport(communicator, plain, node_of_rank=[0] * size)
    first = Agreement(meeting)
    probe: Probe | None = None
    own_reason: str | None = None

    def prepare() -> tuple[kernel_sets.Kernels, Placement | None]:
        validate.require(sane, f"timeout is {timeout!r}, want seconds above 0, at most 1e6")
        if ranks_per_node is not None:
            validate.ranks_per_node(ranks_per_node, size)
        sets = ", ".join(kernel_sets.available())
        validate.require(
            isinstance(kernels, str),
            f"kernels is {validate.kind(kernels)}, want a name: auto, {sets}",
        )
        kernel_set = kernel_sets.pick(kernels, device.type)
        check_name(transport)
        validate.integer("num_nvl_bytes", num_nvl_bytes, at_least=0, at_most=_MOST_BYTES)
        validate.integer("num_rdma_bytes", num_rdma_bytes, at_least=0, at_most=_MOST_BYTES)
        validate.switch("low_latency_mode", low_latency_mode)
        validate.switch("enable_shrink", enable_shrink)
        if placement is None:
            return kernel_set, None
        return kernel_set, Placement(validate.placement(placement, size).to(device), size)

    def terms(made: tuple[kernel_sets.Kernels, Placement | None]) -> Terms:
        kernel_set, placed = made
        where = None if placed is None else placed.rank_of_expert.tolist()
        rings = (num_nvl_bytes, num_channels) if transport == "ring" else None
        nodes = list(ranks_per_node) if isinstance(ranks_per_node, Sequence) else ranks_per_node
        slots = (low_latency_mode, enable_shrink)
        options = digest(repr((transport, rings, nodes, where, slots)))
        nonlocal probe, own_reason
        own_reason = why_not_shared(kernel_set)
        if own_reason is None:
            try:
                probe = Probe()
            except SharedMemoryError as error:
                own_reason = str(error)
        words = (0, -1, 0) if probe is None else probe.words
        mine = (secrets.randbits(62), own_reason is not None, _machine(), *words, *this_process())
        call = Call(stage=STAGES.index("Buffer"), options=options)
        return Terms(call, payload=np.array([mine] * size, np.int64))

    try:
        (kernel_set, placed), agreed = first.agree("Buffer", prepare, terms)
        told = agreed.payload
        shared_id, own_id = int(told[0, 0]), int(told[rank, 0])
        alone = None
        if told[:, 1].any():
            culprit = int(told[:, 1].argmax())
            alone = own_reason if culprit == rank else f"rank {culprit} cannot share memory"
        machines = told[:, 2].tolist()
        processes = [ProcessId(*words) for words in told[:, 6:].tolist()]
        communicator.settle(str(shared_id), ProcessWatch(rank, machines, processes))
        if ranks_per_node is not None:
            topology = _given(ranks_per_node, size)
        else:
            marks = machines if alone is not None else _find_nodes(meeting, told[:, 2:6])
            topology = Topology.from_marks(marks)
    finally:
        if probe is not None:
            probe.close()

    def build(undo: ExitStack) -> tuple[Engine, LowLatency | None]:
        opened = open_transport(
            transport,
            Opening(
                communicator=communicator,
                kernels=kernel_set,
                topology=topology,
                timeout=timeout,
                num_bytes=num_nvl_bytes,
                num_channels=num_channels,
                label=str(shared_id),
            ),
            several_machines=len(set(machines)) > 1,
            alone=alone,
        )
        undo.callback(opened.close)
        agreement, streams = Agreement(opened, shared_id), streams_for(device)
        engine = Engine(
            opened, communicator, kernel_set, agreement, topology, placed, own_id, device, streams
        )
        if not low_latency_mode:
            return engine, None
        return engine, LowLatency(
            opened,
            kernel_set,
            agreement,
            engine.local,
            engine.worker,
            own_id,
            enable_shrink,
            num_rdma_bytes,
            partial(communicator.own, f"{shared_id}/slots"),
        )

    with ExitStack() as undo:
        undo.callback(communicator.close)
        built, failure = None, None
        try:
            built = build(undo)
        except PeerError:
            raise
        except Exception as error:
            failure = error
        # A rank may close its Buffer at once, but not before all are connected to it.
        first.confirm("Buffer", failure)
        assert built is not None
        undo.pop_all()
    return built


def _given(ranks_per_node: int | Sequence[int], num_ranks: int) -> Topology:
    if isinstance(ranks_per_node, Sequence):
        return Topology.of_sizes(ranks_per_node)
    return Topology.even(num_ranks, ranks_per_node)


def _find_nodes(meeting: CollectiveTransport, told_RW: np.ndarray) -> list[int]:
    """For each rank the lowest rank of its machine whose memory it can use: itself at worst, as
    where the ranks of a machine are in containers that hide their processes from each other. Each
    has told its machine, and the words of its Probe.
    """
    rank, told = meeting.rank, told_RW.tolist()
    machine, mark, why = told[rank][0], rank, []
    for other, (there, *words) in enumerate(told[:rank]):
        if there == machine:
            reason = why_not_attached(*words)
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
    # When all have answered, all have looked, and probes may go.
    marks = meeting.exchange(np.full((meeting.size, 1), mark, np.int64), "Buffer (find nodes)")
    return marks[:, 0].tolist()


def _machine() -> int:
    """The same on ranks of one machine, and on no other: a digest of the kernel's boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return digest(file.read())
    except OSError:
        return digest(socket.gethostname())
