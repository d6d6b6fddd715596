"""Communicators: the ranks of a group, over torch.distributed, over MPI, or as threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenyard.comm.base import Communicator, Exchange, Move

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Communicator", "Exchange", "Move", "connect"]


def connect(group: ProcessGroup | Any, timeout: float) -> Communicator:
    """The communicator of a torch.distributed group, of MPI's, or of a virtual one."""
    if hasattr(group, "communicator"):
        return group.communicator(timeout)
    # Imported here: some builds of torch have no torch.distributed, and virtual ranks need none.
    from tokenyard.comm.torch_dist import TorchCommunicator

    return TorchCommunicator(group, timeout)
