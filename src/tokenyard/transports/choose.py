"""How a transport is found: by name, or the best that the ranks can use."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tokenyard.transports.base import Communicator, PackKernel, Transport
from tokenyard.transports.collective import CollectiveTransport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("tokenyard")
_TRANSPORTS = ("collective",)


def available() -> tuple[str, ...]:
    return _TRANSPORTS


def connect(group: ProcessGroup | Any, timeout: float) -> Communicator:
    """The communicator of a torch.distributed group, or of a virtual one (tokenyard.testing)."""
    if hasattr(group, "communicator"):
        return group.communicator(timeout)
    # torch.distributed is not there on every build of torch, and virtual ranks do without.
    from tokenyard.transports.torch_group import TorchCommunicator

    return TorchCommunicator(group, timeout)


def open_transport(name: str, communicator: Communicator, kernels: PackKernel) -> Transport:
    if name not in ("auto", *_TRANSPORTS):
        raise ValueError(f"unknown transport {name!r}; available: auto, {', '.join(_TRANSPORTS)}")
    if name == "auto":
        _log.info("transport: collective over %s, the only one there is yet", communicator.name)
    return CollectiveTransport(communicator, kernels)
