"""Segments of other ranks, mapped into this process.

A rank names a segment by what `Segment.told` says; this process maps it when it is first named, and
keeps it mapped. A rank that gives a segment back to the system says so in its control segment, and
the others unmap it before they next use memory of that rank. The segment's identity decides: a
descriptor number that is used again is never taken for the old segment.
"""

from __future__ import annotations

from array import array as words
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tokenyard.comm.base import Communicator
from tokenyard.errors import SharedMemoryError
from tokenyard.shm.control import DROPS, NUM_DROPS, Control, ControlLayout
from tokenyard.shm.liveness import Liveness
from tokenyard.shm.pool import KEPT
from tokenyard.shm.processes import Gone, within
from tokenyard.shm.segment import Segment, attach
from tokenyard.wire import call as at


class Mapped(NamedTuple):
    """A peer's segment in this process. Its address is good for as long as `array` lives."""

    array: np.ndarray
    address: int


class AttachedSegments:
    def __init__(
        self, processes: Sequence[int], controls: Sequence[Control], liveness: Liveness
    ) -> None:
        self._processes, self._controls, self._liveness = processes, controls, liveness
        self._mapped: list[dict[int, Mapped]] = [{} for _ in processes]  # by identity
        # How many segments each rank had given back, and the last that were mapped: for compiled
        # calls, which map nothing.
        self._seen_drops = np.zeros(len(processes), np.int64)
        self._known = np.zeros((len(processes), at.NUM_KNOWN, at.KNOWN_WORDS), np.int64)
        self._next_known = [0] * len(processes)
        heads = [control.address + 8 * DROPS for control in controls]
        self._drops = np.array(heads, np.int64)

    def memory(self, rank: int, told: Sequence[int], stage: str) -> Mapped:
        """The segment of a peer that it told of."""
        fd, size, identity = told
        if int(self._controls[rank].head[DROPS]) != self._seen_drops[rank]:
            self._unmap_dropped(rank)
        mapped = self._mapped[rank].get(identity)
        if mapped is None:

            def wait(step: Callable[[], int]) -> None:
                self._liveness.wait_for_one(rank, step, stage)

            try:
                array = attach(self._processes[rank], fd, size, identity, wait)
            except Gone as error:
                raise self._liveness.lost(rank, stage) from error
            except SharedMemoryError as error:
                me, (them,) = self._liveness.me, self._liveness.names([rank])
                what = f"{stage}: rank {me} cannot map the memory of rank {them}: {error}"
                raise SharedMemoryError(what) from error
            mapped = self._mapped[rank][identity] = Mapped(array, int(array.ctypes.data))
        return mapped

    def has(self, rank: int, identity: int) -> bool:
        """Whether a peer's segment is mapped, and was not given back as far as this rank knows."""
        return identity in self._mapped[rank]

    def make_known(self, rank: int, told: Sequence[int], stage: str) -> None:
        """Map a peer's segment for compiled calls, in place of the one that was known longest."""
        mapped, next_one = self.memory(rank, told, stage), self._next_known[rank]
        self._known[rank, next_one] = told[2], mapped.address, mapped.array.size
        self._next_known[rank] = (next_one + 1) % at.NUM_KNOWN

    def hold(self) -> list[dict[int, Mapped]]:
        """What keeps all segments mapped that are mapped now."""
        return [mapped.copy() for mapped in self._mapped]

    def tell_calls(self, table: words[int]) -> None:
        """Tell a compiled call which segments are mapped (`wire.call`)."""
        table[at.DROPS] = int(self._drops.ctypes.data)
        table[at.SEEN_DROPS] = int(self._seen_drops.ctypes.data)
        table[at.KNOWN] = int(self._known.ctypes.data)

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
        control, mapped, seen = (
            self._controls[rank],
            self._mapped[rank],
            int(self._seen_drops[rank]),
        )
        drops = int(control.head[DROPS])
        if drops - seen > NUM_DROPS:  # Nobody knows which. A block that calls use is needed yet.
            used = self._known[rank, :, 0].tolist()
            mapped = self._mapped[rank] = {
                one: its for one, its in mapped.items() if one in used and its.array.size <= KEPT
            }
        for number in range(max(seen, drops - NUM_DROPS), drops):
            mapped.pop(int(control.drops[number % NUM_DROPS]), None)
        self._known[rank] = 0
        self._seen_drops[rank] = drops


def attach_controls(
    processes: Sequence[int],
    told: Sequence[Sequence[int]],
    layout: ControlLayout,
    communicator: Communicator,
    timeout: float,
) -> list[Control]:
    """The control segments of all ranks. Raises OSError, with whose this rank cannot map."""
    controls = []
    for other, (fd, _, identity) in enumerate(told):
        try:
            array = attach(processes[other], fd, layout.num_bytes, identity, within(timeout))
        except (OSError, SharedMemoryError) as error:
            me, them = (communicator.members[one] for one in (communicator.rank, other))
            raise OSError(f"rank {me} cannot attach the memory of rank {them}: {error}") from error
        controls.append(Control(array, layout))
    return controls
