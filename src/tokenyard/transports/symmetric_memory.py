"""Symmetric memory: blocks that all ranks have and can address, and waits for flags in them.

A *block* has the same size on every rank, and its addresses by rank are all that kernels need.
There are two providers: segments that processes of one machine share (`SharedSegments`), and
torch's symmetric memory, in which GPUs see each other (`TorchSymmetricMemory`). Kernels cannot tell
them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator
from tokenyard.errors import PeerError, PeerTimeout, SharedMemoryError, name_ranks
from tokenyard.shm import shared_rows
from tokenyard.shm.attached import Mapped
from tokenyard.shm.node import SharedNode
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import NOTHING


class SymmetricBlock(NamedTuple):
    """Memory of all ranks, as many bytes on each. It holds zeros when it is made."""

    addresses: tuple[int, ...]  # by rank, as this rank sees them
    own: Tensor  # [bytes] uint8


class PeerMemory(Protocol):
    device: torch.device

    def make(self, num_bytes: int, stage: str) -> SymmetricBlock:
        """Make memory on all ranks, which call this together with the same number."""

    def wait(self, look: Callable[[Tensor, int, int], None], num_flags: int, stage: str) -> None:
        """Wait until look(missing, first, patience), which sets `missing`, finds none missing."""

    def check(self, stage: str) -> None:
        """Raise if an earlier wait has ended without its flags, where `wait` cannot know that."""

    def tell(self, error: PeerError) -> None:
        """Tell the other ranks who is at fault, if that is possible."""

    def dead_ranks(self) -> tuple[int, ...]:
        """The ranks that this one can see to have died, without asking anybody."""

    def close(self) -> None: ...


class SharedSegments:
    """Memory of processes on one machine, for kernels that run in Triton's interpreter.

    `wait` returns when the flags are there; meanwhile it looks whether peers live.
    """

    device = torch.device("cpu")

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        # The node's mailbox is not used: messages go through the communicator here.
        self._node = SharedNode(communicator, _NoSignals(), timeout)
        self._communicator = communicator
        self._mapped: list[Mapped] = []

    def make(self, num_bytes: int, stage: str) -> SymmetricBlock:
        error, told = None, NOTHING
        try:
            own = self._node.keep(num_bytes, "symmetric")
            told = own.told
        except SharedMemoryError as problem:
            error = problem
        told_R3 = np.array(self._communicator.gather(told, stage), np.int64).T
        shared_rows.check(told_R3[:, :1], [error], stage, self._node.rank)
        mapped = self._node.attached.all_ranks(told_R3.tolist(), own, stage)
        self._mapped += mapped
        addresses = tuple(one.address for one in mapped)
        # No peer may close its segment, nor write to it, before all have mapped it.
        self._communicator.gather([0], stage)
        return SymmetricBlock(addresses, rows(own.array(), 0, 1, num_bytes, torch.uint8)[0])

    def wait(self, look: Callable[[Tensor, int, int], None], num_flags: int, stage: str) -> None:
        missing = torch.zeros(1, dtype=torch.int32, device="cpu")

        def step() -> int:
            look(missing, int(missing), 1)
            return num_flags - int(missing)

        self._node.liveness.wait_until(step, lambda: (int(missing),), stage)

    def check(self, stage: str) -> None:
        pass

    def tell(self, error: PeerError) -> None:
        self._node.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._node.liveness.dead_ranks()

    def close(self) -> None:
        self._node.close()


def _no_signals(incoming: int, size: int, epoch: int, first: int, patience: int) -> int:
    assert size == 0, "this node has no signals"
    return size


class _NoSignals:
    """Kernels of a node in which nobody signals."""

    meet: Callable[..., int] = staticmethod(_no_signals)
    post: Callable[..., int] = staticmethod(_no_signals)
    await_signals: Callable[..., int] = staticmethod(_no_signals)


class TorchSymmetricMemory:
    """Memory of GPUs that see each other's: torch.distributed._symmetric_memory.

    The stream waits for flags, not the host. If a wait ends without its flags, it leaves the
    missing rank in host memory, and the next call raises PeerTimeout. No GPU has run this yet.
    """

    LOOKS_A_SECOND = 1_000_000  # about: a look crosses NVLink, or PCIe

    def __init__(self, group: Any, device: torch.device, timeout: float) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.device = device
        self._symmetric, self._group, self._timeout = symmetric, group, timeout
        self._rank = torch.distributed.get_rank(group)
        self._kept: list[Any] = []
        self._missing = _host_counter(device)
        self._flags = -1  # of the last wait

    def make(self, num_bytes: int, stage: str) -> SymmetricBlock:
        own = self._symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        own.zero_()
        _synchronise(self.device)  # or a peer's first flag might be overwritten
        handle = self._symmetric.rendezvous(own, self._group)
        self._kept.append((own, handle))
        return SymmetricBlock(tuple(handle.buffer_ptrs), own)

    def wait(self, look: Callable[[Tensor, int, int], None], num_flags: int, stage: str) -> None:
        self._flags = num_flags
        look(self._missing, 0, int(self._timeout * self.LOOKS_A_SECOND))

    def check(self, stage: str) -> None:
        """Reads the counter without waiting: it says how the last wait that has ended went."""
        missing = int(self._missing)
        if 0 <= missing < self._flags:
            raise PeerTimeout(
                f"{stage}: {self._timeout:g} s passed; no word from {name_ranks([missing])}, "
                f"on rank {self._rank}",
                ranks=(missing,),
                stage=stage,
            )

    def tell(self, error: PeerError) -> None:
        pass

    def dead_ranks(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self._kept.clear()


def _host_counter(device: torch.device) -> Tensor:
    """-1, in memory that the host reads and the device writes."""
    counter = torch.full((1,), -1, dtype=torch.int32, device="cpu")
    if device.type != "cuda":
        return counter
    return counter.pin_memory()  # no GPU has run this


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # no GPU has run this
