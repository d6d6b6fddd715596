"""How a transport is found: by name, or the best that the ranks can use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tokenyard.transports.base import Communicator, RowKernels, Transport
from tokenyard.transports.collective import CollectiveTransport
from tokenyard.transports.direct import DirectKernels, DirectTransport
from tokenyard.transports.peers import PeerMemory, SharedSegments, TorchSymmetricMemory
from tokenyard.transports.puts import PutKernels, SymmetricTransport
from tokenyard.transports.ring import RingKernels, RingTransport
from tokenyard.transports.symmetric import why_not
from tokenyard.transports.team import Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("tokenyard")
_TRANSPORTS = ("direct", "ring", "collective")
_BY_NAME = ("symmetric",)  # never taken by itself: no GPU has run it yet


class _SharingKernels(DirectKernels, RingKernels, Protocol):
    """What a kernel set for ranks that share memory has."""


def available() -> tuple[str, ...]:
    """Those that every kernel set for CPU tensors can use, where ranks share a machine."""
    return _TRANSPORTS


def check_name(name: str) -> None:
    if name not in ("auto", *_TRANSPORTS, *_BY_NAME):
        raise ValueError(f"unknown transport {name!r}; available: auto, {', '.join(_TRANSPORTS)}")


def connect(group: ProcessGroup | Any, timeout: float) -> Communicator:
    """The communicator of a torch.distributed group, or of a virtual one (tokenyard.testing)."""
    if hasattr(group, "communicator"):
        return group.communicator(timeout)
    # torch.distributed is not there on every build of torch, and virtual ranks do without.
    from tokenyard.transports.torch_group import TorchCommunicator

    return TorchCommunicator(group, timeout)


def why_not_shared(kernels: RowKernels) -> str | None:
    """Why this rank cannot share memory with others of its machine; None if it can."""
    if not hasattr(kernels, "await_signals"):
        return "the kernel set has no signals (take numba)"
    return why_not()


def open_transport(
    name: str,
    communicator: Communicator,
    kernels: RowKernels,
    node_of_rank: Sequence[int],
    apart: str | None,
    *,
    timeout: float,
    num_bytes: int,
    num_channels: int,
) -> Transport:
    """All ranks together, with the same name. `apart` says why they cannot share memory."""
    if name == "symmetric":
        return _open_symmetric(communicator, kernels, node_of_rank, timeout)
    if name in ("direct", "ring") and apart is not None:
        raise ValueError(f"transport {name!r} cannot be used: {apart}")
    if name == "auto" and communicator.name == "loopback":
        apart = "virtual ranks are threads, whose bytes are counted"
    if name == "collective" or apart is not None:
        if name == "auto":
            _log.info("transport: collective over %s, since %s", communicator.name, apart)
        return CollectiveTransport(communicator, kernels, node_of_rank)
    sharing = cast(_SharingKernels, kernels)
    try:
        team = Team(communicator, sharing, timeout)
    except OSError as error:
        if name != "auto":
            raise ValueError(f"transport {name!r} cannot be used: {error}") from error
        _log.warning("transport: collective over %s, since %s", communicator.name, error)
        return CollectiveTransport(communicator, kernels, node_of_rank)
    if name == "auto":
        _log.info("transport: direct, since all ranks share a machine")
    if name == "ring":
        return RingTransport(team, sharing, node_of_rank, num_bytes, num_channels)
    return DirectTransport(team, sharing, node_of_rank)


def _open_symmetric(
    communicator: Communicator,
    kernels: RowKernels,
    node_of_rank: Sequence[int],
    timeout: float,
) -> Transport:
    if not hasattr(kernels, "put"):
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
