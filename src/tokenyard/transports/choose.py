"""How a transport is found: by name, or the best that the ranks can use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

from tokenyard.comm.base import Communicator
from tokenyard.kernels.base import RowKernels
from tokenyard.shm.node import Team
from tokenyard.shm.segment import why_not
from tokenyard.topology import Topology
from tokenyard.transports.base import Transport
from tokenyard.transports.collective import CollectiveTransport
from tokenyard.transports.direct import DirectKernels, DirectTransport
from tokenyard.transports.hierarchical import HierarchicalTransport
from tokenyard.transports.ring import RingKernels, RingTransport
from tokenyard.transports.symmetric import PutKernels, SymmetricTransport
from tokenyard.transports.symmetric_memory import PeerMemory, SharedSegments, TorchSymmetricMemory

_log = logging.getLogger("tokenyard")
_TRANSPORTS = ("direct", "ring", "collective", "hierarchical")
_BY_NAME = ("symmetric",)  # never taken by itself: no GPU has run it yet


class _SharingKernels(DirectKernels, RingKernels, Protocol):
    """What a kernel set for ranks that share memory has."""


def available() -> tuple[str, ...]:
    """Those that every kernel set for CPU tensors can use, where ranks share a machine."""
    return _TRANSPORTS


def check_name(name: str) -> None:
    if name not in ("auto", *_TRANSPORTS, *_BY_NAME):
        raise ValueError(f"unknown transport {name!r}; available: auto, {', '.join(_TRANSPORTS)}")


def why_not_shared(kernels: RowKernels) -> str | None:
    """Why this rank cannot share memory with others of its machine; None if it can."""
    if not kernels.shares_memory:
        return "the kernel set has no signals (take numba)"
    return why_not()


def open_transport(
    name: str,
    communicator: Communicator,
    kernels: RowKernels,
    topology: Topology,
    *,
    several_machines: bool,
    alone: str | None,
    timeout: float,
    num_bytes: int,
    num_channels: int,
    label: str,
) -> Transport:
    """All ranks together, with the same name. `alone` says why a rank cannot share memory at all;
    `label` is one that no other Buffer of the group has.
    """

    if name == "symmetric":
        own = communicator.own(f"{label}/words")
        return _open_symmetric(own, kernels, topology.node_of_rank, timeout)

    def share(chosen: str) -> Transport:
        """Raises OSError on all ranks if some cannot attach the memory of others."""
        sharing = cast(_SharingKernels, kernels)
        if chosen == "hierarchical":
            return HierarchicalTransport(communicator, sharing, topology, timeout, label)
        team, nodes = Team(communicator, sharing, timeout), topology.node_of_rank
        if chosen == "direct":
            return DirectTransport(team, sharing, nodes)
        try:
            return RingTransport(team, sharing, nodes, num_bytes, num_channels)
        except BaseException:
            team.close()
            raise

    chosen, why, cause = name, alone, None
    if name == "auto":
        chosen = "hierarchical" if topology.num_nodes > 1 else "direct"
    if chosen != "hierarchical" and several_machines:
        why = why or "ranks are on several machines"
    if name == "auto" and communicator.name == "loopback":
        why = "virtual ranks are threads, whose bytes are counted"
    if chosen != "collective" and why is None:
        try:
            made = share(chosen)
            if name == "auto":
                nodes = f"{topology.num_nodes} node{'s' * (topology.num_nodes > 1)}"
                _log.info("transport: %s, since ranks are on %s", chosen, nodes)
            return made
        except OSError as error:
            why, cause = str(error), error
    if name not in ("auto", "collective"):
        raise ValueError(f"transport {name!r} cannot be used: {why}") from cause
    if name == "auto":
        level = logging.INFO if cause is None else logging.WARNING
        _log.log(level, "transport: collective over %s, since %s", communicator.name, why)
    own = communicator.own(f"{label}/rows")
    return CollectiveTransport(own, kernels, topology.node_of_rank)


def _open_symmetric(
    communicator: Communicator,
    kernels: RowKernels,
    node_of_rank: Sequence[int],
    timeout: float,
) -> Transport:
    if not kernels.puts_rows:
        raise ValueError(
            "transport 'symmetric' cannot be used: the kernel set has no put (take triton)"
        )
    peers: PeerMemory
    try:
        if communicator.device.type == "cuda":
            group = cast(Any, communicator).group()  # no GPU has run this
            peers = TorchSymmetricMemory(group, communicator.device, timeout)  # no GPU has run this
        else:
            peers = SharedSegments(communicator, timeout)
    except OSError as error:
        raise ValueError(f"transport 'symmetric' cannot be used: {error}") from error
    return SymmetricTransport(communicator, peers, cast(PutKernels, kernels), node_of_rank)
