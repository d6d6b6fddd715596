"""How a transport is found: by name, or the best that the ranks can use.

`_TRANSPORTS` is the one place where a transport is entered: its name, how it is opened, and what it
needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

from tokenyard.comm.base import Communicator
from tokenyard.kernels.base import RowKernels, SharingKernels
from tokenyard.shm.node import SharedNode
from tokenyard.shm.segment import why_not
from tokenyard.topology import Topology
from tokenyard.transports.base import Transport
from tokenyard.transports.collective import CollectiveTransport
from tokenyard.transports.direct import DirectTransport
from tokenyard.transports.hierarchical import HierarchicalTransport
from tokenyard.transports.ring import RingKernels, RingTransport
from tokenyard.transports.symmetric import PutKernels, SymmetricTransport
from tokenyard.transports.symmetric_memory import PeerMemory, SharedSegments, TorchSymmetricMemory

_log = logging.getLogger("tokenyard")


class Opening(NamedTuple):
    """What a transport is opened with: by all ranks together, and with the same values."""

    communicator: Communicator
    kernels: Any  # a kernel set that the transport can use
    topology: Topology
    timeout: float
    num_bytes: int
    num_channels: int
    label: str  # one that no other Buffer of the group has


def _open_direct(opening: Opening) -> Transport:
    kernels = cast(SharingKernels, opening.kernels)
    node = SharedNode(opening.communicator, opening.kernels, opening.timeout)
    return DirectTransport(node, kernels, opening.topology.node_of_rank)


def _open_ring(opening: Opening) -> Transport:
    kernels = cast(RingKernels, opening.kernels)
    nodes, sizes = opening.topology.node_of_rank, (opening.num_bytes, opening.num_channels)
    with ExitStack() as undo:
        node = undo.enter_context(SharedNode(opening.communicator, kernels, opening.timeout))
        made = RingTransport(node, kernels, nodes, *sizes)
        undo.pop_all()
    return made


def _open_collective(opening: Opening) -> Transport:
    own = opening.communicator.own(f"{opening.label}/rows")
    return CollectiveTransport(own, opening.kernels, opening.topology.node_of_rank)


def _open_hierarchical(opening: Opening) -> Transport:
    communicator, kernels, topology, timeout, _, _, label = opening
    return HierarchicalTransport(communicator, kernels, topology, timeout, label)


def _open_symmetric(opening: Opening) -> Transport:
    if not opening.kernels.puts_rows:
        raise OSError("the kernel set has no put (take triton)")
    communicator = opening.communicator.own(f"{opening.label}/words")
    peers: PeerMemory
    if communicator.device.type == "cuda":
        group = cast(Any, communicator).group()  # no GPU has run this
        device, timeout = communicator.device, opening.timeout
        peers = TorchSymmetricMemory(group, device, timeout)  # no GPU has run this
    else:
        peers = SharedSegments(communicator, opening.timeout)
    kernels = cast(PutKernels, opening.kernels)
    return SymmetricTransport(communicator, peers, kernels, opening.topology.node_of_rank)


class _Entry(NamedTuple):
    open: Callable[[Opening], Transport]  # raises OSError on all ranks if one of them cannot
    shares_memory: bool = False  # of kernels that signal, by ranks of one machine
    spans_machines: bool = False
    listed: bool = True  # among those that users are told of


_TRANSPORTS = {
    "direct": _Entry(_open_direct, shares_memory=True),
    "ring": _Entry(_open_ring, shares_memory=True),
    "collective": _Entry(_open_collective, spans_machines=True),
    "hierarchical": _Entry(_open_hierarchical, shares_memory=True, spans_machines=True),
    # No GPU has run it yet. Whether ranks see each other's memory is found out when it is opened.
    "symmetric": _Entry(_open_symmetric, spans_machines=True, listed=False),
}


def available() -> tuple[str, ...]:
    """The transports that every kernel set for CPU tensors can use where ranks share a machine."""
    return tuple(name for name, entry in _TRANSPORTS.items() if entry.listed)


def check_name(name: str, where: str = "") -> None:
    if name not in ("auto", *_TRANSPORTS):
        known = ", ".join(available())
        raise ValueError(f"{where}unknown transport {name!r}; available: auto, {known}")


def why_not_shared(kernels: RowKernels) -> str | None:
    """Why this rank cannot share memory with others of its machine; None if it can."""
    if not kernels.shares_memory:
        return "the kernel set has no signals (take numba)"
    return why_not()


def open_transport(
    name: str, opening: Opening, *, several_machines: bool, alone: str | None
) -> Transport:
    """All ranks together, with the same name. `alone` says why a rank cannot share memory at all.

    If the name is "auto", ranks that cannot share memory take the collective transport.
    """
    communicator, topology = opening.communicator, opening.topology
    chosen, why, cause = name, None, None
    if name == "auto":
        chosen = "hierarchical" if topology.num_nodes > 1 else "direct"
    entry = _TRANSPORTS[chosen]
    if entry.shares_memory:
        why = alone
    if several_machines and not entry.spans_machines:
        why = why or "ranks are on several machines"
    if name == "auto" and communicator.name == "loopback":
        why = "virtual ranks are threads, whose bytes are counted"
    if why is None:
        try:
            made = entry.open(opening)
            if name == "auto":
                nodes = f"{topology.num_nodes} node{'s' * (topology.num_nodes > 1)}"
                _log.info("transport: %s, since ranks are on %s", chosen, nodes)
            return made
        except OSError as error:
            why, cause = str(error), error
    if name != "auto":
        raise ValueError(f"transport {name!r} cannot be used: {why}") from cause
    level = logging.INFO if cause is None else logging.WARNING
    _log.log(level, "transport: collective over %s, since %s", communicator.name, why)
    return _open_collective(opening)
