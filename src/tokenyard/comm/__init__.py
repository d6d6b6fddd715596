"""Communicators: the ranks of a group, over torch.distributed or as threads of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenyard.comm.base import Communicator, Move

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Communicator", "Move", "connect"]


def connect(group: ProcessGroup | Any, timeout: float) -> Communicator:
    """The communicator of a torch.distributed group, or of a virtual one (tokenyard.testing)."""
    if hasattr(group, "communicator"):
        return group.communicator(timeout)
    # torch.distributed is not there on every build of torch, and virtual ranks do without.
    from tokenyard.comm.torch_dist import TorchCommunicator

    return TorchCommunicator(group, timeout)
