"""R virtual ranks as threads of one process: the same engine with no process, port or GPU.

Choose it for tests and to see what a routing costs: it counts the bytes on every link. It checks
what a real engine would answer with a hang or a crash (counts that do not match), and names the
rank that did not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenyard.errors import PeerDied, PeerError, PeerTimeout, name_ranks
from tokenyard.transports.base import Move


class LoopbackWorld:
    """What the virtual ranks of one run share, or some of them."""

    def __init__(
        self, size: int, members: Sequence[int] | None = None, whole: LoopbackWorld | None = None
    ) -> None:
        """Of all ranks; or of these members of a whole."""
        self.size = size
        self.members = range(size) if members is None else members
        self._whole = self if whole is None else whole
        self._parts: dict[str, LoopbackWorld] = {}
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
            parts = list(self._parts.values())
        for part in parts:
            if self.members[rank] in part.members:
                part.leave(part.members.index(self.members[rank]))

    def part(self, members: Sequence[int], name: str) -> LoopbackWorld:
        """The same for all who ask under one name."""
        with self._meeting:
            if name not in self._parts:
                self._parts[name] = LoopbackWorld(len(members), tuple(members), self)
            return self._parts[name]

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
                gone = self._names(self._dead - self._arrived)
                if gone:
                    raise PeerDied(
                        f"{stage}: {name_ranks(gone)} ended, on rank {self.members[rank]}",
                        ranks=gone,
                        stage=stage,
                    )
                if not self._meeting.wait(max(0.0, deadline - time.monotonic())):
                    late = self._names(set(range(self.size)) - self._arrived)
                    raise PeerTimeout(
                        f"{stage}: {timeout:g} s passed; no word from {name_ranks(late)}, "
                        f"on rank {self.members[rank]}",
                        ranks=late,
                        stage=stage,
                    )

    def post(self, stage: str, rank: int, parcels: list[Tensor]) -> None:
        """Lay out what goes to each rank."""
        self._posts[rank] = parcels
        weights = torch.tensor([parcel.numel() for parcel in parcels])
        self._whole.count(stage, self.members[rank], list(self.members), weights)

    def count(self, stage: str, rank: int, to: list[int], weights: Tensor) -> None:
        with self._meeting:
            if stage not in self.bytes_sent:
                with torch.inference_mode(False):  # whatever the mode of later calls
                    self.bytes_sent[stage] = torch.zeros(self.size, self.size, dtype=torch.int64)
            self.bytes_sent[stage][rank, to] += weights

    def mail(self, rank: int) -> list[Tensor]:
        """What every rank has laid out for this one."""
        return [parcels[rank] for parcels in self._posts]

    def _names(self, ranks: set[int]) -> tuple[int, ...]:
        return tuple(sorted(self.members[rank] for rank in ranks))


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
        self.members = world.members

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

    def start(
        self,
        out_NB: Tensor,
        rows_NB: Tensor,
        out_counts: Sequence[int],
        counts: Sequence[int],
        stage: str,
    ) -> Move:
        return lambda: self.all_to_all(out_NB, rows_NB, out_counts, counts, stage)

    def part(self, members: Sequence[int], name: str) -> LoopbackCommunicator:
        part = self._world.part(members, name)
        return LoopbackCommunicator(part, list(members).index(self.rank), self._timeout)

    def watch(self, look: Callable[[str], None]) -> None:
        """Who is waited for here is seen to end."""

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return PeerDied(f"{stage}: {error}, on rank {self.rank}", ranks=(), stage=stage)

    def leave_word(self, error: PeerError | None = None) -> None: ...

    def close(self) -> None: ...
