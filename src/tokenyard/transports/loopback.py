"""R virtual ranks as threads of one process: the same engine with no process, port or GPU.

Choose it for tests and to see what a routing costs: it counts the bytes on every link. It checks
what a real engine would answer with a hang or a crash (counts that do not match), and names the
rank that did not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.errors import PeerDied, PeerTimeout, name_ranks


class LoopbackWorld:
    """What the virtual ranks of one run share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes_sent: dict[str, Tensor] = {}  # by stage: [R, R] int64, from rank i to rank j
        self._posts: list[list[Tensor]] = [[] for _ in range(size)]
        self._meeting = threading.Condition()
        self._arrived: set[int] = set()
        self._round = 0
        self._dead: set[int] = set()

    def group(self, rank: int) -> LoopbackGroup:
        return LoopbackGroup(self, rank)

    def leave(self, rank: int) -> None:
        """The rank's thread is gone; whoever waits for it is told."""
        with self._meeting:
            self._dead.add(rank)
            self._meeting.notify_all()

    def meet(self, rank: int, stage: str, timeout: float) -> None:
        """Wait until all ranks are here."""
        deadline = time.monotonic() + timeout
        with self._meeting:
            this_round = self._round
            self._arrived.add(rank)
            if len(self._arrived) == self.size:
                self._arrived.clear()
                self._round += 1
                self._meeting.notify_all()
            while self._round == this_round:
                gone = tuple(sorted(self._dead - self._arrived))
                if gone:
                    raise PeerDied(
                        f"{stage}: {name_ranks(gone)} ended, on rank {rank}",
                        ranks=gone,
                        stage=stage,
                    )
                if not self._meeting.wait(max(0.0, deadline - time.monotonic())):
                    late = tuple(sorted(set(range(self.size)) - self._arrived))
                    raise PeerTimeout(
                        f"{stage}: {timeout:g} s passed; no word from {name_ranks(late)}, "
                        f"on rank {rank}",
                        ranks=late,
                        stage=stage,
                    )

    def post(self, stage: str, rank: int, parcels: list[Tensor]) -> None:
        """Lay out what goes to each rank."""
        self._posts[rank] = parcels
        weights = torch.tensor([parcel.numel() for parcel in parcels])
        with self._meeting:
            if stage not in self.bytes_sent:
                self.bytes_sent[stage] = torch.zeros(self.size, self.size, dtype=torch.int64)
            self.bytes_sent[stage][rank] += weights

    def mail(self, rank: int) -> list[Tensor]:
        """What every rank has laid out for this one."""
        return [parcels[rank] for parcels in self._posts]


class LoopbackGroup:
    """Stands where a torch.distributed group would: `Buffer(group)`."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world = world
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.world.size

    def communicator(self, timeout: float) -> LoopbackCommunicator:
        return LoopbackCommunicator(self.world, self._rank, timeout)


class LoopbackCommunicator:
    name = "loopback"
    device = torch.device("cpu")

    def __init__(self, world: LoopbackWorld, rank: int, timeout: float) -> None:
        self._world = world
        self._timeout = timeout
        self.rank, self.size = rank, world.size

    def all_to_all(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> None:
        world = self._world
        world.post(stage, self.rank, list(rows_NB.split(list(counts))))
        world.meet(self.rank, stage, self._timeout)
        parcels = world.mail(self.rank)
        sent = [len(parcel) for parcel in parcels]
        assert sent == list(out_counts), f"rank {self.rank} expects {out_counts} rows, gets {sent}"
        torch.cat(parcels, out=out_NB)
        world.meet(self.rank, stage, self._timeout)  # nobody's rows are let go before all were read

    def leave_word(self) -> None: ...

    def close(self) -> None: ...
