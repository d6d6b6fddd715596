"""Memory that a rank offers to the others for rows that they read: two blocks, used in turn.

Nothing says that the others have read a block. But a rank posts its next message, of whatever call,
only when it has read all blocks of this one. So a rank that has heard all messages of a later call
knows that its block was read, and two calls after the one in which it wrote it, it is free again.

A call that tells of a block for the first time ends when all ranks have read it: then they have
mapped it, even if this rank ends right afterwards. So does one with a large block, which is lent
for that call alone.
"""

from __future__ import annotations

import numpy as np

from tokenyard.engine.agreement import Agreement
from tokenyard.engine.plans import Plan
from tokenyard.shm.pool import KEPT, SegmentPool
from tokenyard.shm.segment import Segment
from tokenyard.wire import call as at
from tokenyard.wire import message as say

_COPIED = 1 << 15  # bytes of rows that are copied though others could read them where they lie
_BEGIN = say.SEGMENTS + say.SEGMENT_BEGIN


class Lent:
    """A block that a call offers."""

    __slots__ = ("address", "array", "awaits", "fd", "identity", "size", "stays")

    def __init__(self, segment: Segment, array: np.ndarray, stays: bool) -> None:
        """`stays` says that others may know it from an earlier call."""
        self.address, self.array, self.stays = segment.address, array, stays
        self.fd, self.size, self.identity = segment.told
        self.awaits = 1  # whether the call ends when all have read it


class Turns:
    def __init__(self, pool: SegmentPool, agreement: Agreement) -> None:
        self._pool, self._agreement = pool, agreement
        self._turn, self._number = 0, -1  # of the block that was offered last, and of its call
        self._blocks: list[Lent | None] = [None, None]

    @property
    def are_used(self) -> bool:
        return self._blocks != [None, None]

    def offer(self, plan: Plan, num_bytes: int) -> Lent:
        """Offer a block in the next call of a plan. Raises SharedMemoryError."""
        if self._number != self._agreement.number:  # else an interrupted call is made again
            self._turn, self._number = 1 - self._turn, self._agreement.number
        turn = self._turn
        lent, table, head = self._blocks[turn], plan.table, plan.head
        if lent is None or lent.size < num_bytes:
            lent = self._take(turn, num_bytes)
        table[at.BLOCK], table[at.AWAITS] = lent.address, lent.awaits
        head[say.HOW], head[_BEGIN], head[say.SEGMENTS] = say.READY, 0, lent.fd
        head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = lent.size, lent.identity
        return lent

    def offer_rows(self, plan: Plan, address: int, num_bytes: int) -> Lent | None:
        """Offer rows for others to read: in a block, to which the call copies them; or where they
        lie, if they are many and can be read there. The caller may write there again when the call
        has ended, so the call waits until all have read: copying few rows is quicker.
        """
        table, head = plan.table, plan.head
        segment = self._pool.find(address, num_bytes) if num_bytes > _COPIED else None
        if segment is None:
            table[at.BEGINS] = 0
            return self.offer(plan, num_bytes)
        table[at.BLOCK], table[at.BEGINS], table[at.AWAITS] = segment.address, -1, 1
        head[say.HOW], head[_BEGIN] = say.READY, address - segment.address
        head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = segment.told
        return None

    def _take(self, turn: int, num_bytes: int) -> Lent:
        if num_bytes > KEPT:
            return Lent(*self._pool.take(num_bytes), False)
        self._blocks[turn] = None  # so that its memory can be taken again
        self._blocks[turn] = lent = Lent(*self._pool.take(num_bytes), True)
        return lent

    def give_back(self, lent: Lent | None) -> None:
        """The call that it was lent for has ended."""
        if lent is not None and lent.stays:
            lent.awaits = 0
