"""The ranks of one node, which share memory: `SharedNode` holds all that they need for it.

    control    what ranks say to each other in shared memory, and where
    mailbox    messages and signals
    liveness   who is dead, has left or is late; waits with a deadline
    attached   segments of other ranks in this process
    pool       segments of this rank for results

Ranks of other machines cannot be part of a node, and neither can ranks that do not reach each
other's processes: see `processes`.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from tokenyard.comm.base import Communicator, Leaving
from tokenyard.errors import PeerError, SharedMemoryError, name_ranks
from tokenyard.shm import shared_rows
from tokenyard.shm.attached import AttachedSegments, Mapped, attach_controls
from tokenyard.shm.control import Control, ControlLayout
from tokenyard.shm.liveness import Liveness
from tokenyard.shm.mailbox import Mailbox, SignalKernels
from tokenyard.shm.pool import SegmentPool
from tokenyard.shm.processes import own_address
from tokenyard.shm.segment import Segment
from tokenyard.shm.shared_rows import NOTHING
from tokenyard.wire.message import NO_MEMORY

BOX = 128  # int64s of a message that go at once
_STAGE = "Buffer (attach)"


class SharedNode(Leaving):
    def __init__(
        self,
        communicator: Communicator,
        kernels: SignalKernels,
        timeout: float,
        box: int = BOX,
    ) -> None:
        """All ranks of the communicator, on one machine. Raises OSError on all ranks if one of them
        cannot attach the others' memory. Messages of up to `box` integers go at once.
        """
        communicator.waits_elsewhere()
        self.rank, self.size = communicator.rank, communicator.size
        self.signals = kernels
        # By what they are for: segments of this rank, and those of all ranks that are mapped here.
        self._kept: dict[str, list[Segment]] = {}
        self._mapped: dict[str, list[Mapped]] = {}
        layout = ControlLayout(self.size, box)
        self.control_bytes = layout.num_bytes
        with ExitStack() as opened:
            opened.callback(self._close_kept)
            processes, controls = self._open(communicator, layout, timeout, opened)
            self.mailbox = Mailbox(controls, layout, self.liveness, kernels)
            self.attached = AttachedSegments(processes, controls, self.liveness)
            self.pool = SegmentPool(self.attached.say_dropped)
            opened.callback(self.pool.close)
            self._opened = opened.pop_all()

    def _open(
        self, communicator: Communicator, layout: ControlLayout, timeout: float, opened: ExitStack
    ) -> tuple[list[int], list[Control]]:
        """Map all control segments, and watch all processes. A rank that fails must say so to the
        others before it may raise.
        """
        failure: Exception | None = None
        controls: list[Control] = []
        told = NOTHING
        try:
            told = self.keep(layout.num_bytes, "control").told
        except SharedMemoryError as error:
            failure = error
        processes, *named = communicator.gather([own_address(), *told], _STAGE)
        if failure is None:
            try:
                controls = attach_controls(
                    processes, list(zip(*named)), layout, communicator, timeout
                )
                watch = Liveness(communicator, controls, processes, timeout)
                self.liveness = opened.enter_context(watch)
            except OSError as error:
                failure = error
        failed = communicator.gather([int(failure is not None)], _STAGE)[0]
        if any(failed):
            ranks = [communicator.members[rank] for rank, one in enumerate(failed) if one]
            others = f"{name_ranks(ranks)} cannot attach the other ranks' memory"
            raise OSError(others if failure is None else str(failure)) from failure
        return processes, controls

    def keep(self, num_bytes: int, part: str) -> Segment:
        """A segment of this rank, until it is released, or the node is closed. `part` says what it
        is for.
        """
        segment = Segment(num_bytes)
        self._kept.setdefault(part, []).append(segment)
        return segment

    def release(self, part: str) -> None:
        """Give back what was kept for a part, which no rank will use again. Arrays of it stay."""
        self._mapped.pop(part, None)
        for segment in self._kept.pop(part, ()):
            self.attached.say_dropped(segment)
            segment.close()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank shares, by what they are for."""
        held = {part: sum(one.size for one in kept) for part, kept in self._kept.items()}
        return {**held, "results": sum(segment.size for segment in self.pool)}

    def share(self, num_bytes: int, stage: str, part: str) -> np.ndarray:
        """[R] addresses: every rank's segment of this size, until the node is closed. All ranks
        together; if one has no memory, all raise SharedMemoryError.
        """
        arrays = self.share_arrays(num_bytes, stage, part)
        return np.array([array.ctypes.data for array in arrays], np.int64)

    def share_arrays(self, num_bytes: int, stage: str, part: str) -> list[np.ndarray]:
        """Like `share`, but return arrays of bytes, each of which also keeps its memory."""
        error, told = None, NOTHING
        try:
            told = self.keep(num_bytes, part).told
        except SharedMemoryError as problem:
            error = problem
        told_R3 = self.mailbox.exchange(np.array([told] * self.size, np.int64), stage)
        shared_rows.check(told_R3[:, :1], [error], stage, self.rank)
        mapped: list[Mapped] = []
        try:
            mapped = self.attached.all_ranks(told_R3.tolist(), self._kept[part][-1], stage)
            self._mapped.setdefault(part, []).extend(mapped)
        except SharedMemoryError as problem:
            error = problem
        # No rank may close its segment before all have mapped it.
        able_R1 = self.mailbox.exchange(np.full((self.size, 1), NO_MEMORY if error else 0), stage)
        shared_rows.check(able_R1, [error], stage, self.rank)
        return [one.array for one in mapped]

    def tell(self, error: PeerError) -> None:
        self.liveness.tell(error)

    def close(self) -> None:
        self.mailbox.look = None
        self.liveness.close()  # first: peers that miss a segment of this rank see that it has left
        self._opened.close()

    def _close_kept(self) -> None:
        for segment in (one for kept in self._kept.values() for one in kept):
            segment.close()
        self._kept.clear()
