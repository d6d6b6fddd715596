"""Messages and signals between the ranks of a node.

A signal is an epoch that only grows, so nothing is ever reset: each rank raises its own line in the
control segment of every other rank, and waits for the lines of all others in its own. A message is
written to a box first and then signalled. Each pair of ranks has two boxes, used in turn. A rank
cannot be two messages ahead of another, since it needs the other's own message to get that far; so
no box is overwritten before it was read.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tokenyard.runtime.threads import has_core_each
from tokenyard.runtime.waits import Waits
from tokenyard.shm.control import Control, ControlLayout
from tokenyard.shm.liveness import Liveness
from tokenyard.wire import call as at
from tokenyard.wire import int64s
from tokenyard.wire.signals import KINDS, MAIL

YIELDS = 100  # of a compiled call, before Python waits on, and of a wait that may be in vain
_PAUSE = 1e-5  # seconds between two looks for ranks that may come soon


class SignalKernels(Protocol):
    """Functions of `kernels.numba.signals`, which says what they are given."""

    meet: Callable[..., int]
    post: Callable[..., int]
    await_signals: Callable[..., int]


class Mailbox:
    def __init__(
        self,
        controls: Sequence[Control],
        layout: ControlLayout,
        liveness: Liveness,
        kernels: SignalKernels,
    ) -> None:
        self._size, self._box = layout.size, layout.box
        self.waits = Waits(layout.size)
        self._liveness, self._kernels = liveness, kernels
        # Loads the kernel of long waits: later this process may have no descriptor left for that.
        kernels.await_signals(0, 0, 0, 0, 0)
        self.patience = 2000 if has_core_each(layout.size) else 20  # looks of a kernel that spins
        # Given the stage, raises if a rank whose message is awaited has gone on to something else.
        self.look: Callable[[str], None] | None = None
        self.epochs = int64s.new(KINDS)  # compiled calls advance them too
        self._tables: list[np.ndarray] = []
        rank, bases = liveness.rank, [control.address for control in controls]
        # By kind of signal: where this rank raises it, and where it waits for the others.
        self._lines = [
            (
                self._table([base + layout.signal(kind, rank) for base in bases]),
                self._table([bases[rank] + layout.signal(kind, r) for r in range(self._size)]),
            )
            for kind in range(KINDS)
        ]
        # By turn: where this rank's messages go, and those that come.
        self._boxes = [
            (
                self._table([base + layout.message(turn, rank) for base in bases]),
                controls[rank].boxes[turn],
            )
            for turn in range(2)
        ]

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Row r of an int64 message goes to rank r; row r of the answer came from it."""
        if message_RM.shape[1] > self._box:
            starts = range(0, message_RM.shape[1], self._box)
            parts = [self.exchange(message_RM[:, at : at + self._box], stage) for at in starts]
            return np.concatenate(parts, axis=1)
        self.epochs[MAIL] += 1
        epoch = self.epochs[MAIL]
        outgoing, incoming = self._lines[MAIL]
        outboxes, inbox = self._boxes[epoch % 2]
        first = self._kernels.post(
            message_RM,
            outboxes,
            outgoing,
            incoming,
            self._size,
            epoch,
            self.patience,
            self.waits.address,
        )
        if first < self._size:
            self._wait_long(incoming, epoch, first, stage, self.look)
        return inbox[:, : message_RM.shape[1]].copy()

    def send(self, message_RM: np.ndarray) -> None:
        """Send a message, and wait for none."""
        self.epochs[MAIL] += 1
        epoch = self.epochs[MAIL]
        (outgoing, incoming), outboxes = self._lines[MAIL], self._boxes[epoch % 2][0]
        self._kernels.post(message_RM, outboxes, outgoing, incoming, self._size, epoch, 0, 0)

    def signal(self, kind: int) -> None:
        """Signal to all ranks, and wait for none."""
        self.epochs[kind] += 1
        self._kernels.meet(*self._lines[kind], self._size, self.epochs[kind], 0)

    def late_ranks(self, kind: int, skip: int) -> list[int]:
        """Those that have signalled less often than this rank, but for ranks whose word is not 0 at
        this address.
        """
        lines, epoch, r = self._lines[kind][1], self.epochs[kind], -1
        late: list[int] = []
        while (r := self._kernels.await_signals(lines, self._size, epoch, r + 1, 1, -1, skip)) < (
            self._size
        ):
            late.append(r)
        return late

    def awaited(self) -> int:
        """The first rank whose message of this exchange has not come; R if all have."""
        return self._kernels.await_signals(
            self._lines[MAIL][1], self._size, self.epochs[MAIL], 0, 1
        )

    def meet(self, kind: int, stage: str) -> None:
        """Signal to all ranks and wait until they have signalled as often: spin, then yield, then
        sleep. Whatever this thread wrote to their memory comes before the signal.
        """
        self.epochs[kind] += 1
        epoch = self.epochs[kind]
        outgoing, incoming = self._lines[kind]
        first = self._kernels.meet(
            outgoing, incoming, self._size, epoch, self.patience, self.waits.address
        )
        if first < self._size:
            self._wait_long(incoming, epoch, first, stage)

    def wait_for(self, kind: int, stage: str) -> None:
        """Wait until all ranks have signalled as often as this one, which has done so before."""
        look = self.look if kind == MAIL else None
        self._wait_long(self._lines[kind][1], self.epochs[kind], 0, stage, look)

    def last_messages(self) -> np.ndarray:
        """[R, box]: what all ranks have sent in the last exchange."""
        return self._boxes[self.num_sent % 2][1].copy()

    def tell_calls(self, table: array[int]) -> None:
        """Tell a compiled call where signals and messages are (`wire.call`)."""
        table[at.PATIENCE], table[at.YIELDS] = self.patience, YIELDS
        table[at.WAITS] = self.waits.address
        table[at.EPOCHS] = int64s.address(self.epochs)
        table[at.OUT_LINES] = self._table([outgoing for outgoing, _ in self._lines])
        table[at.IN_LINES] = self._table([incoming for _, incoming in self._lines])
        table[at.OUT_BOXES] = self._table([outboxes for outboxes, _ in self._boxes])
        table[at.IN_BOXES] = self._table([int(inbox.ctypes.data) for _, inbox in self._boxes])
        table[at.BOX_BYTES] = 8 * self._box

    def meet_soon(self, kind: int, epoch: int, seconds: float) -> bool:
        """Signal that this rank has reached an epoch. Whether all ranks have reached it within so
        many seconds: if not, nobody is to blame.
        """
        outgoing, incoming = self._lines[kind]
        patience = self.patience if seconds else 0
        first = self._kernels.meet(outgoing, incoming, self._size, epoch, patience)
        deadline = time.monotonic() + seconds
        yields = YIELDS
        while first < self._size and time.monotonic() < deadline:
            if yields:  # the others may need this core to get here
                yields -= 1
                os.sched_yield()
            else:
                time.sleep(_PAUSE)
            first = self._kernels.await_signals(incoming, self._size, epoch, first, 20)
        return first == self._size

    @property
    def num_sent(self) -> int:
        """How many messages this rank has sent to each of the others."""
        return self.epochs[MAIL]

    def _wait_long(
        self,
        incoming: int,
        epoch: int,
        first: int,
        stage: str,
        look: Callable[[str], None] | None = None,
    ) -> None:
        begin, last = time.monotonic_ns(), -1

        def step() -> int:
            nonlocal first, last
            first = self._kernels.await_signals(incoming, self._size, epoch, first, 20)
            if first < self._size:
                last = first
                if look is not None:
                    look(stage)
            return self._size - first

        self._liveness.wait_until(step, lambda: (first,), stage)
        if last >= 0:  # otherwise they came before this rank looked
            self.waits.note(last, begin)

    def _table(self, addresses: list[int]) -> int:
        """The address of an array that lives as long as the mailbox."""
        self._tables.append(np.array(addresses, np.int64))
        return int(self._tables[-1].ctypes.data)
