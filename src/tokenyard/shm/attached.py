"""Segments of other ranks, mapped into this process.

A rank names a segment by what `Segment.told` says; this process maps it when it is first named, and
keeps it mapped. A rank that gives a segment back to the system says so in its control segment, and
the others unmap it before they next use memory of that rank. The segment's identity decides: a
descriptor number that is used again is never taken for the old segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenyard.errors import SharedMemoryError
from tokenyard.shm.control import DROPS, NUM_DROPS, Control, ControlLayout
from tokenyard.shm.liveness import Liveness
from tokenyard.shm.segment import Gone, Segment, attach


class Mapped(NamedTuple):
    """A peer's segment in this process. Its address is good for as long as `array` lives."""

    array: np.ndarray
    address: int


class AttachedSegments:
    def __init__(
        self, pids: Sequence[int], controls: Sequence[Control], liveness: Liveness
    ) -> None:
        self._pids, self._controls, self._liveness = pids, controls, liveness
        self._mapped: list[dict[int, Mapped]] = [{} for _ in pids]  # by identity
        self._seen_drops = [0] * len(pids)  # how many segments each rank had given back

    def memory(self, rank: int, told: Sequence[int], stage: str) -> Mapped:
        """The segment of a peer that it told of."""
        fd, size, identity = told
        if int(self._controls[rank].head[DROPS]) != self._seen_drops[rank]:
            self._unmap_dropped(rank)
        mapped = self._mapped[rank].get(identity)
        if mapped is None:
            try:
                array = attach(self._pids[rank], fd, size, identity)
            except Gone as error:
                raise self._liveness.lost(rank, stage) from error
            except SharedMemoryError as error:
                me, (them,) = self._liveness.me, self._liveness.names([rank])
                what = f"{stage}: rank {me} cannot map the memory of rank {them}: {error}"
                raise SharedMemoryError(what) from error
            mapped = self._mapped[rank][identity] = Mapped(array, int(array.ctypes.data))
        return mapped

    def memory_at(
        self, rank: int, told: Sequence[int], begin: int, num_bytes: int, stage: str
    ) -> Mapped:
        """So many bytes of a peer's segment, from where it says that they begin."""
        array, address = self.memory(rank, told, stage)
        if not 0 <= begin <= array.size - num_bytes:
            raise self._liveness.stray(rank, stage)
        return Mapped(array, address + begin)

    def all_ranks(self, told: Sequence[Sequence[int]], own: Segment, stage: str) -> list[Mapped]:
        """The segments that all ranks told of; `own` is this rank's."""
        return [
            Mapped(own.array(), own.address)
            if rank == self._liveness.rank
            else self.memory(rank, one, stage)
            for rank, one in enumerate(told)
        ]

    def say_dropped(self, segment: Segment) -> None:
        """This rank gives a segment back. Peers find out when they next use memory of this rank."""
        control = self._controls[self._liveness.rank]
        control.drops[int(control.head[DROPS]) % NUM_DROPS] = segment.identity
        control.head[DROPS] += 1

    def _unmap_dropped(self, rank: int) -> None:
        """Unmap the segments that a peer has given back. Calls that use one hold its array."""
        control, mapped, seen = self._controls[rank], self._mapped[rank], self._seen_drops[rank]
        drops = int(control.head[DROPS])
        if drops - seen > NUM_DROPS:
            mapped.clear()
        for number in range(max(seen, drops - NUM_DROPS), drops):
            mapped.pop(int(control.drops[number % NUM_DROPS]), None)
        self._seen_drops[rank] = drops


def attach_controls(
    pids: Sequence[int],
    told: Sequence[Sequence[int]],
    layout: ControlLayout,
    rank: int,
    members: Sequence[int],
) -> list[Control]:
    """The control segments of all ranks. Raises OSError, with whose cannot be mapped by `rank`."""
    controls = []
    for other, (fd, _, identity) in enumerate(told):
        try:
            array = attach(pids[other], fd, layout.num_bytes, identity)
        except (OSError, SharedMemoryError) as error:
            me, them = members[rank], members[other]
            raise OSError(f"rank {me} cannot attach the memory of rank {them}: {error}") from error
        controls.append(Control(array, layout))
    return controls
