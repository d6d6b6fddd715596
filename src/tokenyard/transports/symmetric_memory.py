"""Memory of all ranks that each of them can address, and how long one waits for another in it.

A *block* is as large on every rank, and its addresses by rank are all that kernels need. There are
two providers: segments that processes of one machine share, and torch's symmetric memory, in which
GPUs see each other. Kernels cannot tell them apart.
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
from tokenyard.shm.node import Mapped, Team
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import NOTHING


class SymmetricBlock(NamedTuple):
    """Zeros when it is made."""

    addresses: tuple[int, ...]  # by rank, as this rank sees them
    own: Tensor  # [bytes] uint8


class PeerMemory(Protocol):
    device: torch.device

    def make(self, num_bytes: int, stage: str) -> SymmetricBlock:
        """All ranks together, with the same number."""

    def wait(self, look: Callable[[Tensor, int, int], None], num_flags: int, stage: str) -> None:
        """Let look(missing, first, patience) find that no flag is missing."""

    def check(self, stage: str) -> None:
        """Raise if a wait has ended without its flags, where that is not known at once."""

    def tell(self, error: PeerError) -> None:
        """Tell the other ranks who is at fault, if there is a way."""

    def dead_ranks(self) -> tuple[int, ...]:
        """Those that can be seen to have died without asking anybody."""

    def close(self) -> None: ...


class SharedSegments:
    """Of processes on one machine, for kernels that run in Triton's interpreter.

    A wait is over when `wait` returns; it looks whether peers live meanwhile.
    """

    device = torch.device("cpu")

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        # The team's own kernels are not used: its words go through the communicator here.
        self._team = Team(communicator, _NoSignals(), timeout)
        self._communicator = communicator
        self._mapped: list[Mapped] = []

    def make(self, num_bytes: int, stage: str) -> SymmetricBlock:
        error, words = None, NOTHING
        try:
            own = self._team.keep(num_bytes)
            words = own.told
        except SharedMemoryError as problem:
            error = problem
        told = list(zip(*self._communicator.gather(words, stage)))
        shared_rows.check(np.array(told)[:, :1], [error], stage, self._team.rank)
        self._mapped += self._team.map_all(told, Mapped(own.array(), own.address), stage)
        addresses = [one.address for one in self._mapped[-len(told) :]]
        # No peer may close its segment, nor write to it, before all have mapped it.
        self._communicator.gather([0], stage)
        return SymmetricBlock(tuple(addresses), rows(own.array(), 0, 1, num_bytes, torch.uint8)[0])

    def wait(self, look: Callable[[Tensor, int, int], None], num_flags: int, stage: str) -> None:
        missing = torch.zeros(1, dtype=torch.int32)

        def step() -> int:
            look(missing, int(missing), 1)
            return num_flags - int(missing)

        self._team.wait_until(step, lambda: (int(missing),), stage)

    def check(self, stage: str) -> None:
        pass

    def tell(self, error: PeerError) -> None:
        self._team.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._team.dead_ranks()

    def close(self) -> None:
        self._team.close()


class _NoSignals:
    """In place of kernels for a team that nobody signals in."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: this team has no signals")


class TorchSymmetricMemory:
    """Of GPUs that see each other's memory: torch.distributed._symmetric_memory.

    A wait is work of the stream and takes none of the host's time. If it ends without its flags,
    it leaves the missing rank in host memory, and the next call raises PeerTimeout. No GPU has run
    this yet.
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
        """The counter is not waited for: it is what the last wait that has ended has left."""
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
    counter = torch.full((1,), -1, dtype=torch.int32)
    if device.type != "cuda":
        return counter
    return counter.pin_memory()  # no GPU has run this


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # no GPU has run this
