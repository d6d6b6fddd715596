"""Memory that a rank offers to the others for rows that they read: two blocks, used in turn.

Nothing says that the others have read a block. But a rank posts its next message, of whatever call,
only when it has read all blocks of this one. So whoever has heard all messages of a later call
knows that his block was read, and two calls after that in which he wrote it, it is free again.

A call that tells of a block for the first time ends when all ranks have read it: then they have
mapped it, even if this rank ends right afterwards. So does one with a large block, which is lent
for that call alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tokenyard.engine.plans import Plan
from tokenyard.shm.pool import SegmentPool
from tokenyard.shm.segment import Segment
from tokenyard.wire import call as at
from tokenyard.wire import message as say

_KEPT = 1 << 20  # bytes of a block that stays lent


class Lent(NamedTuple):
    """A block of one call."""

    segment: Segment
    array: np.ndarray | None  # keeps what is lent for one call alone
    awaits: bool  # whether the call ends when all have read it


class Turns:
    def __init__(self, pool: SegmentPool) -> None:
        self._pool, self._turn = pool, 0
        self._blocks: list[tuple[Segment, np.ndarray] | None] = [None, None]
        self._known = [False, False]  # to all ranks

    @property
    def are_used(self) -> bool:
        return self._blocks != [None, None]

    def offer(self, plan: Plan, num_bytes: int) -> Lent:
        """Offer a block in the next call of a plan. Raises SharedMemoryError."""
        lent, table, head = self._take(num_bytes), plan.table, plan.head
        table[at.BLOCK], table[at.AWAITS] = lent.segment.address, lent.awaits
        head[say.HOW], head[say.SEGMENTS + say.SEGMENT_BEGIN] = say.READY, 0
        head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = lent.segment.told
        return lent

    def offer_rows(self, plan: Plan, address: int, num_bytes: int) -> Lent | None:
        """The same of rows that others shall read: where they lie, if they can be read there; else
        in a block, to which the call copies them.
        """
        table, head, segment = plan.table, plan.head, self._pool.find(address, num_bytes)
        if segment is None:
            table[at.BEGINS] = 0
            return self.offer(plan, num_bytes)
        table[at.BLOCK], table[at.BEGINS], table[at.AWAITS] = segment.address, -1, 1
        head[say.HOW], head[say.SEGMENTS + say.SEGMENT_BEGIN] = say.READY, address - segment.address
        head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = segment.told
        return None

    def _take(self, num_bytes: int) -> Lent:
        if num_bytes > _KEPT:
            return Lent(*self._pool.take(num_bytes), True)
        self._turn = turn = 1 - self._turn
        block = self._blocks[turn]
        if block is None or block[0].size < num_bytes:
            self._blocks[turn] = block = None  # so that its memory can be taken again
            self._blocks[turn] = block = self._pool.take(num_bytes)
            self._known[turn] = False
        return Lent(block[0], None, not self._known[turn])

    def give_back(self, lent: Lent | None) -> None:
        """The call that it was lent for has ended."""
        if lent is not None and lent.array is None:
            self._known[self._turn] = True
