"""Communicators: the ranks of a group, over torch.distributed or as threads of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenyard.comm.base import Communicator, Exchange, Move

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Communicator", "Exchange", "Move", "connect"]


def connect(group: ProcessGroup | Any, timeout: float) -> Communicator:
    """The communicator of a torch.distributed group, or of a virtual one (tokenyard.testing)."""
    if hasattr(group, "communicator"):
        return group.communicator(timeout)
    # Imported here: some builds of torch have no torch.distributed, and virtual ranks need none.
    from tokenyard.comm.torch_dist import TorchCommunicator

    return TorchCommunicator(group, timeout)
