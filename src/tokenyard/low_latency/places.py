"""What ranks that share memory have for every other call of a kind: a mailbox, a block, plans.

Calls of a kind use two places in turn, so two of them may be on their way. A place is used again
once all ranks have read what was sent in it last: a dispatch's tokens, or a combine's rows.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from tokenyard.engine.agreement import Call
from tokenyard.engine.mismatch import STAGES
from tokenyard.engine.plans import DispatchShape, Plan, tell_routing
from tokenyard.low_latency.engine import Arrived
from tokenyard.low_latency.handle import COMBINE, STAGE_OF
from tokenyard.low_latency.shape import SlotShape
from tokenyard.runtime import memory
from tokenyard.runtime.completion import RecvHook
from tokenyard.shm.attached import Mapped
from tokenyard.shm.control import Control, ControlLayout
from tokenyard.shm.mailbox import Mailbox
from tokenyard.shm.node import BOX, SharedNode
from tokenyard.shm.pool import KEPT
from tokenyard.shm.segment import Segment
from tokenyard.types import ROW_DTYPES, Config
from tokenyard.wire import call as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire.fp8 import NO_CAST
from tokenyard.wire.signals import READ

_MANY = 16  # segments


def control_bytes(num_ranks: int) -> int:
    """Bytes that a rank shares for messages of the mode, and for its masks."""
    return 4 * ControlLayout(num_ranks, BOX).num_bytes + 8 * num_ranks


class Masks:
    """Which ranks this one goes on without, and who goes on without it."""

    def __init__(self, size: int, rank: int, told: list[np.ndarray]) -> None:
        """`told` has words of each rank: for every rank, does that one leave it out?"""
        self.masked_R = np.zeros(size, np.int64)
        self._own = told[rank]
        self._flags = np.array([one[rank:].ctypes.data for one in told], np.int64)
        self.address = int(self.masked_R.ctypes.data)

    def tell(self, words: Any) -> None:
        words[at.MASKED], words[at.FLAGS] = self.address, self._flags.ctypes.data

    def set(self, rank: int, masked: bool) -> None:
        """Calls fence before they write where that rank may read."""
        self.masked_R[rank] = self._own[rank] = masked

    @property
    def left_out(self) -> list[int]:
        return np.flatnonzero(self.masked_R).tolist()


class Place:
    def __init__(self, kind: int, node: SharedNode, controls: list[Control], masks: Masks) -> None:
        self.kind, self.stage, self._node = kind, STAGE_OF[kind], node
        layout = ControlLayout(node.size, BOX)
        self.mailbox = Mailbox(controls, layout, node.liveness, node.signals)
        self.mailbox.waits = node.mailbox.waits
        self.block: Segment | None = None
        self._array: np.ndarray | None = None  # which keeps the block lent
        # Segments that calls have told of, and those that all ranks are known to have mapped.
        self._names: set[int] = set()
        self._mapped: set[int] = set()
        self.is_new = False  # whether the next call tells of one that some rank may not have mapped
        self.offered: Any = None  # the plan of whose block and rows the last message told
        self.lent: Any = None  # rows that others may still read where they lie
        self.offers_lent = False  # whether the last message told of such rows
        self.plans: dict[Any, SlotPlan] = {}  # by shape, and the dtype of the rows of a combine
        # The hook of what was sent here and is not received yet.
        self.unread: weakref.ref[RecvHook] | None = None
        # Segments of others: a mapping lives for as long as it is known, whoever else gave it up.
        self._known = np.zeros((node.size, at.NUM_KNOWN, at.KNOWN_WORDS), np.int64)
        self._held: dict[tuple[int, int], Mapped] = {}
        self._next = [0] * node.size
        self._no_drops = np.zeros(node.size, np.int64)
        self._no_drop_R = np.full(node.size, self._no_drops.ctypes.data, np.int64)
        words = int64s.new(at.TABLE_WORDS)
        words[at.RANK], words[at.SIZE] = node.rank, node.size
        self.mailbox.tell_calls(words)
        words[at.DROPS] = self._no_drop_R.ctypes.data
        words[at.SEEN_DROPS] = self._no_drops.ctypes.data
        words[at.KNOWN] = self._known.ctypes.data
        masks.tell(words)
        self.words = words

    def fits(self, plan: SlotPlan, num_bytes: int) -> bool:
        """Whether the block has room for so many bytes, and not far more than a plan ever needs."""
        block = self.block
        return block is not None and num_bytes <= block.size <= max(KEPT, 4 * plan.most)

    def offer(self, plan: SlotPlan, num_bytes: int) -> Segment:
        """Memory for what calls of a plan send: so many bytes now. All have read what was there."""
        block, head = self.block, plan.head
        if block is None or not self.fits(plan, num_bytes):
            is_smaller = block is not None and num_bytes <= block.size
            block = self.block = self._array = None
            if is_smaller:  # the pool trims itself only when it is asked for more
                self._node.pool.trim()
            block, self._array = self._node.pool.take(num_bytes)
            self.block = block
        self.offered = plan
        head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = block.told
        self.name(block)
        return block

    def name(self, segment: Segment) -> None:
        """The next call tells of a segment."""
        if len(self._names) > _MANY:
            self._names.clear()
        self._names.add(segment.identity)
        self.is_new = self.is_new or segment.identity not in self._mapped

    def settle_names(self) -> None:
        """A call has ended, and all have mapped what it has told of."""
        if len(self._mapped) > _MANY:  # most are gone
            self._mapped.clear()
        self._mapped.update(self._names)
        self._names.clear()
        self.is_new = False

    def map(self, rank: int, told: list[int]) -> bool:
        """Map a segment of another rank. Whether it is as large as the rank says."""
        known_R = self._known[rank, :, 0].tolist()
        if told[2] in known_R:
            return True
        mapped = self._node.attached.memory(rank, told, self.stage)
        for entry, identity in enumerate(known_R):
            if identity and not self._node.attached.has(rank, identity):
                self._known[rank, entry] = 0
                del self._held[rank, entry]
        entry = self._next[rank]
        self._known[rank, entry] = told[2], mapped.address, mapped.array.size
        self._held[rank, entry] = mapped
        self._next[rank] = (entry + 1) % at.NUM_KNOWN
        return mapped.array.size == told[1]

    @property
    def is_posted(self) -> bool:
        """Whether a message was sent that this rank has not answered yet."""
        return self.mailbox.num_sent > self.mailbox.epochs[READ]


class SlotPlan(Plan):
    """What calls of one shape need in one place; combines of rows of one dtype."""

    def __init__(self, place: Place, shape: SlotShape, buffer: int, dtype: torch.dtype) -> None:
        is_back, placement = place.kind == COMBINE, shape.placement
        told = Call(
            stage=STAGES.index(place.stage),
            buffer=buffer,
            hidden=shape.hidden,
            dtype=ROW_DTYPES.index(dtype),
            num_topk=shape.num_topk,
            num_experts=placement.num_experts,
            num_max=shape.num_max,
            cast=NO_CAST if is_back else shape.cast,
        )
        widths = [shape.hidden * dtype.itemsize] if is_back else shape.widths
        of = DispatchShape(place.stage, dtype, shape.hidden, shape.num_topk, placement, 1, -1, None)
        super().__init__(of, Config(), told, place.words, widths, 0)
        self.per_expert, kept = tell_routing(self.table, placement, shape.rank, shape.num_topk, 1)
        self.take_scratch(shape.num_ranks, placement.num_experts, shape.num_topk)
        picked, table = int64s.new(shape.num_max * shape.num_topk), self.table
        self.keep(kept, picked)
        table[at.LOCAL_OF_EXPERT] = placement.local_of_expert.data_ptr()
        table[at.CAST], table[at.NUM_SLOTS] = shape.cast, shape.num_slots
        table[at.ROOM], table[at.FIRSTS_BYTES] = shape.num_max, shape.firsts_bytes
        table[at.ROW_OF] = int64s.address(picked)
        # Bytes of the block that a call needs at least, and at most.
        self.least = shape.num_ranks * shape.firsts_bytes if is_back else shape.block_bytes
        self.most_rows = shape.num_ranks * shape.most_back if is_back else 0
        self.most = self.least + self.most_rows * self.row_bytes
        is_small = not is_back and shape.num_local * shape.num_slots * shape.row_bytes <= KEPT
        self._of, self._like_result = shape, Arrived.empty(shape) if is_small else None

    def result(self) -> Arrived:
        """Memory for what a dispatch brings, like that of the last one if it is small."""
        like = self._like_result
        if like is None:
            return Arrived.empty(self._of)
        scales = None if like.scales is None else memory.empty_like(like.scales)
        return Arrived(memory.empty_like(like.x), scales, memory.empty_like(like.counts))
