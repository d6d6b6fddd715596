"""Calls where all ranks share memory: one compiled function each way, whatever there is to move.

A call finds the plan of its shape, writes a few words into the plan's table, and enters the
compiled function (`kernels.numba.call`). That counts, meets the other ranks, moves rows and waits
for theirs. What it lacks comes back as a verdict: this module provides it and enters again. Many
rows are moved by threads in the middle, those of an asynchronous call on the Buffer's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.by_expert import RowsByExpert
from tokenyard.engine.core import Core
from tokenyard.engine.inputs import AgainRequest, Checked, CombineRequest, DispatchRequest
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.meeting import Meeting
from tokenyard.engine.parcels import ParcelCalls, Space
from tokenyard.engine.plans import CallKernels, DispatchShape, Plan, Plans
from tokenyard.engine.sums import SumCalls, known_ledger, tell_ledger
from tokenyard.engine.turns import Turns
from tokenyard.results import Handle
from tokenyard.runtime.completion import AT_ONCE, Completion
from tokenyard.runtime.events import EventOverlap
from tokenyard.shm import shared_rows
from tokenyard.shm.pool import SegmentPool, rows
from tokenyard.shm.shared_rows import Room, SharedRows
from tokenyard.types import Received
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets, row_widths
from tokenyard.wire.signals import READ
from tokenyard.wire.verdicts import MOVE

_LEAVING = 5.0  # seconds that a rank waits for others to read what it has offered last
_AGAIN = "cached dispatch"


class BySource(Space):
    """What a dispatch by source writes to: its block, and its ledger."""

    block: SharedRows

    def __init__(
        self, plan: Plan, pool: SegmentPool, ledger: WrittenLedger, block: SharedRows
    ) -> None:
        super().__init__(plan, ledger)
        self._pool = pool
        self._offer(block)

    def grow(self, wanted: int) -> None:
        if self.block.told[1] < wanted:
            self.block = SharedRows(None)  # so that its memory can be taken again
            self._offer(shared_rows.take(self._pool, wanted))
            if self.error is not None:
                raise self.error

    def _offer(self, block: SharedRows) -> None:
        self.block, self.error, head = block, block.error, self._plan.head
        self._plan.table[at.BLOCK], head[say.HOW] = block.address, say.READY
        head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = block.told

    def part(self, num_rows: int) -> Tensor:
        """So many of the rows that have come."""
        return rows(self.block.array, 0, num_rows, self._plan.shape.hidden, self._plan.shape.dtype)

    def rows(self) -> Received:
        """The rows that have come, as tensors over the block."""
        plan, array = self._plan, self.block.array
        shape, num_rows = plan.shape, plan.table[at.NUM_ROWS]
        begins = column_offsets(num_rows, plan.widths)
        x = self.part(num_rows)
        scales = ids = weights = None
        if plan.scales is not None:
            scales = rows(array, begins[1], num_rows, *plan.scales)
        if shape.num_topk >= 0:
            first = plan.table[at.IDS]
            ids = rows(array, begins[first], num_rows, shape.num_topk, torch.int64)
            weights = rows(array, begins[first + 1], num_rows, shape.num_topk, torch.float32)
        return Received(x, scales, ids, weights, plan.per_expert.tolist())


class SharedCalls:
    def __init__(self, core: Core, kernels: CallKernels) -> None:
        self._core, self._kernels = core, kernels
        self.meeting = Meeting(core)
        self._node, self.pool = self.meeting.node, self.meeting.node.pool
        self.offers = False  # whether blocks are offered in turn
        self._agreement, self._worker, self._local = core.agreement, core.worker, core.local
        self._rank, self._size = core.rank, core.num_ranks
        self.plans = Plans(core, kernels)
        if core.balance is not None:
            core.balance.compile(self.meeting, self.plans)
        self.room, self.turns = Room(self.pool), Turns(self.pool, core.agreement)
        self._sums = SumCalls(core, kernels, self.meeting, self.plans, self.turns)
        self._by_expert = ParcelCalls(core, kernels, self.meeting, self.plans, self.turns)

    def dispatch_by_expert(self, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
        return self._by_expert.dispatch(request)

    def combine_by_expert(self, request: CombineRequest, weigh: Any) -> Tensor:
        return self._by_expert.combine(request, weigh)

    def forget(self) -> None:
        self.plans.forget()

    def wait_to_leave(self) -> None:
        """Wait until all ranks have read what this one has offered last."""
        if self.offers or self.turns.are_used:
            mailbox = self._node.mailbox
            mailbox.meet_soon(READ, mailbox.epochs[READ], _LEAVING)

    def dispatch(
        self, request: DispatchRequest, completion: Completion, stage: str
    ) -> tuple[Received, Handle, EventOverlap]:
        plan, given = None, None
        try:
            if completion is AT_ONCE:
                plan = self._seen_plan(request, stage)
            if plan is None:
                given = self._local.check(request)
                plan = self._plan(given, stage, completion)
                if completion is AT_ONCE and given.given is None and not given.num_worst_tokens:
                    self.plans.learn(request, stage, given, plan)
            table, begin = plan.table, time.monotonic_ns()
            num_tokens, room = table[at.NUM_TOKENS], table[at.ROOM]
            ledger = WrittenLedger(self._rank, self._size, num_tokens, room, plan.src_room)
            space = BySource(plan, self.pool, ledger, self.room.offer())
        except Exception as error:
            self._core.reject(stage, error)
        moved = room * plan.row_bytes
        hands_over = self.meeting.begin(plan, completion, num_tokens, moved)
        while verdict := self.meeting.enter(plan, stage):
            if verdict >> 32 == MOVE:
                break
            if not space.provides(verdict):
                ids = request.topk_idx if given is None else given.topk_idx
                self.meeting.refuse(verdict, plan, stage, ids, space.error)
        ledger, block = space.ledger, space.block
        self.room.learn(table[at.END])
        ledger.num_rows, ledger.num_copies = table[at.NUM_ROWS], table[at.NUM_COPIES]
        received, number = space.rows(), table[at.NUMBER]
        handle = Handle(
            self._core.origin,
            number,
            plan.shape.hidden,
            plan.combine_dtype,
            plan.num_channels,
            ledger,
        )
        if not hands_over:
            return received, handle, EventOverlap()
        write = partial(self._kernels.write_rows, plan.address)
        held = given, block, ledger, self._node.attached.hold()
        event = self.meeting.move(plan, stage, completion, None, write, num_tokens, moved, held)
        handle.arrived = event.event
        self.meeting.count(stage, begin, ledger, plan)
        return received, handle, event

    def _seen_plan(self, request: DispatchRequest, stage: str) -> Plan | None:
        """The plan of a dispatch that counts by itself, of tensors like those of one before; its
        table knows these then. None if it is another.
        """
        of_ranks, of_experts = request.num_tokens_per_rank, request.num_tokens_per_expert
        if not (of_ranks is of_experts is request.is_token_in_rank is None):
            return None
        if request.num_worst_tokens:
            return None
        plan = self.plans.find_seen(request, stage)
        if plan is None:
            return None
        table, num_topk = plan.table, plan.shape.num_topk
        num_tokens = table[at.NUM_TOKENS]
        table[plan.ids_at + 2] = self._local.numbers_at(num_tokens)
        table[at.MARKS] = table[at.WORST] = 0
        table[at.ROOM] = num_tokens * (num_topk if num_topk < self._size else self._size)
        return plan

    def _plan(self, given: Checked, stage: str, completion: Completion) -> Plan:
        """The plan of any dispatch."""
        shape = DispatchShape(
            stage,
            given.x.dtype,
            given.x.shape[1],
            -1 if given.topk_idx is None else given.topk_idx.shape[1],
            given.placement,
            given.expert_alignment,
            given.tag,
            None if given.scales is None else (given.scales.shape[1], given.scales.dtype),
        )
        find = self.plans.new_dispatch if completion.async_finish else self.plans.find_dispatch
        plan = find(shape, given.config)
        numbers = self._local.token_numbers(given.x.shape[0])
        if completion.async_finish:  # the thread reads them, whatever later calls make of theirs
            plan.keep(numbers)
        columns = given.x, given.scales, given.topk_idx, given.topk_weights, numbers
        _tell_sources(plan, columns)
        layout, table = given.given, plan.table
        if layout is not None:
            validate.same_counts(layout)
        elif not self.plans.counts_ids:
            assert given.topk_idx is not None
            layout = self._local.count_ids(given.topk_idx, given.placement)
        plan.mark(layout)
        most = self._size if layout is not None else min(self._size, shape.num_topk)
        table[at.WORST], table[at.ROOM] = given.num_worst_tokens, most * given.x.shape[0]
        table[at.NUM_TOKENS] = given.x.shape[0]
        return plan

    def dispatch_again(
        self, request: AgainRequest, completion: Completion
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        core, begin = self._core, time.monotonic_ns()
        try:
            pending = core.pending(request.previous_event, completion)
            columns, known = core.check_again(request, pending)
            ledger, (given, scales) = known_ledger(known, self._rank), columns
            beside_x = None if scales is None else (scales.shape[1], scales.dtype)
            shape = DispatchShape(
                _AGAIN,
                given.dtype,
                given.shape[1],
                -1,
                self._local.any_placement,
                1,
                -1,
                beside_x,
                is_cached=True,
            )
            find = self.plans.new_dispatch if completion.async_finish else self.plans.find_dispatch
            plan = find(shape, request.config)
            _tell_sources(plan, columns)
            tell_ledger(plan, self._core.number_of(known), ledger)
            num_bytes = column_offsets(ledger.num_rows, plan.widths)[-1]
            space = BySource(plan, self.pool, ledger, shared_rows.take(self.pool, num_bytes))
        except Exception as error:
            core.reject(_AGAIN, error)
        num_tokens, moved = ledger.num_tokens, ledger.num_copies * plan.row_bytes
        hands_over = self.meeting.begin(plan, completion, num_tokens, moved)
        while verdict := self.meeting.enter(plan, _AGAIN):
            if verdict >> 32 == MOVE:
                break
            if not space.provides(verdict):
                self.meeting.refuse(verdict, plan, _AGAIN, None, space.error)
        received, event, block = space.rows(), EventOverlap(), space.block
        if hands_over:
            write = partial(self._kernels.write_rows, plan.address)
            held = columns, block, ledger, self._node.attached.hold()
            event = self.meeting.move(
                plan, _AGAIN, completion, pending, write, num_tokens, moved, held
            )
            self.meeting.count(_AGAIN, begin, ledger, plan)
        return received.x, received.scales, event

    def combine(
        self, request: CombineRequest, completion: Completion, stage: str
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        return self._sums.combine(request, completion, stage)


def _tell_sources(plan: Plan, columns: Sequence[Tensor | None]) -> None:
    """Write where columns lie."""
    present = [column for column in columns if column is not None]
    assert row_widths(present) == plan.widths
    for place, column in enumerate(present):
        plan.table[at.SOURCES + place] = column.data_ptr()
