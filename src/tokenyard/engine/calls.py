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
from tokenyard.engine.inputs import Checked, CombineRequest, DispatchRequest, fits
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.meeting import Meeting
from tokenyard.engine.parcels import ParcelCalls
from tokenyard.engine.plans import CallKernels, CombineShape, DispatchShape, Plan, Plans
from tokenyard.engine.statistics import COMPILED
from tokenyard.engine.turns import Turns
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.runtime.completion import AT_ONCE, Completion
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.shm import shared_rows
from tokenyard.shm.pool import SegmentPool, rows
from tokenyard.shm.shared_rows import Room, SharedRows
from tokenyard.transports import Sum
from tokenyard.types import Received
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets, row_widths
from tokenyard.wire.signals import READ
from tokenyard.wire.verdicts import LOW, MORE_MEMORY, MORE_ROOM, MOVE

_LEAVING = 5.0  # seconds that a rank waits for others to read what it has offered last
_AGAIN = "cached dispatch"


class BySource:
    """What a dispatch by source writes to: its block, and its ledger."""

    def __init__(
        self, plan: Plan, pool: SegmentPool, ledger: WrittenLedger, block: SharedRows
    ) -> None:
        self._plan, self._pool, self.block = plan, pool, block
        _tell_block(plan, block)
        self.list(ledger)

    def list(self, ledger: WrittenLedger) -> None:
        self.ledger, table = ledger, self._plan.table
        table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room

    def provides(self, verdict: int) -> bool:
        """Whether this can give a call what it lacks, and has done so."""
        plan, what, count = self._plan, verdict >> 32, verdict & LOW
        if what == MORE_ROOM:
            plan.src_room = count + count // 4
            self.list(self.ledger.with_room(plan.src_room))
        elif what == MORE_MEMORY:
            wanted = plan.table[at.END]
            self.block = SharedRows(None)  # so that its memory can be taken again
            self.block = shared_rows.take(self._pool, wanted)
            _tell_block(plan, self.block, wanted)
        else:
            return False
        return True

    def rows(self) -> Received:
        """What has come."""
        plan, array = self._plan, self.block.array
        shape, num_rows = plan.shape, plan.table[at.NUM_ROWS]
        begins = column_offsets(num_rows, plan.widths)
        x = rows(array, 0, num_rows, shape.hidden, shape.dtype)
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
        self.room, self.turns = Room(self.pool), Turns(self.pool)
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
        if completion is AT_ONCE:
            plan = self._seen_plan(request, stage)
        if plan is None:
            try:
                given = self._local.check(request)
                plan = self._plan(given, stage, completion)
            except Exception as error:
                self._core.reject(stage, error)
            if completion is AT_ONCE and given.given is None and not given.num_worst_tokens:
                self.plans.learn(request, stage, given, plan)
        table, begin = plan.table, time.monotonic_ns()
        num_tokens, room = table[at.NUM_TOKENS], table[at.ROOM]
        ledger = WrittenLedger(self._rank, self._size, num_tokens, room, plan.src_room)
        space = BySource(plan, self.pool, ledger, self.room.offer())
        moved = room * plan.row_bytes
        hands_over = self._begin(plan, completion, num_tokens, moved)
        while verdict := self.meeting.enter(plan, stage):
            if verdict >> 32 == MOVE:
                break
            if not space.provides(verdict):
                ids = request.topk_idx if given is None else given.topk_idx
                self.meeting.refuse(verdict, plan, stage, ids, space.block.error)
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
        event = self._move(plan, stage, completion, None, write, num_tokens, moved, held)
        handle.arrived = event.event
        self._count(stage, begin, ledger, plan)
        return received, handle, event

    def _seen_plan(self, request: DispatchRequest, stage: str) -> Plan | None:
        """The plan of a dispatch that counts by itself, of tensors like those of one before; its
        table knows these then. None if it is another.
        """
        if request.is_token_in_rank is not None or request.num_worst_tokens:
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
            given.placement.num_experts,
            given.expert_alignment,
            given.tag,
            None if given.scales is None else (given.scales.shape[1], given.scales.dtype),
        )
        find = self.plans.new_dispatch if completion.async_finish else self.plans.find_dispatch
        plan = find(shape, given.placement, given.config)
        numbers = self._local.token_numbers(given.x.shape[0])
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

    def _begin(self, plan: Plan, completion: Completion, num_items: int, moved: int) -> bool:
        """Write the words with which every call begins. Whether it hands over its rows."""
        if not completion.async_finish and self._worker.pending is not None:
            self._worker.drain()
        hands_over = completion.async_finish or num_threads(num_items, moved) > 1
        table = plan.table
        table[at.PHASE], table[at.PART], table[at.HANDS_OVER] = at.START, 0, hands_over
        table[at.NUMBER] = self._agreement.number
        table[at.COUNTERS] = 0 if hands_over else plan.counters
        return hands_over

    def _move(
        self,
        plan: Plan,
        stage: str,
        completion: Completion,
        pending: EventHandle | None,
        part: Any,
        num_items: int,
        num_bytes: int,
        held: Any,
    ) -> EventOverlap:
        """Move rows, and end the call: now, or on the Buffer's thread. `held` lives until all ranks
        have written, even if nobody wants the result any more.
        """
        self._agreement.number += 1

        def work(held: Any = held) -> None:
            in_threads(part, num_items, num_bytes)
            plan.table[at.PHASE] = at.MOVED
            verdict = self.meeting.end(plan, stage)
            assert not verdict

        return self._core.finish(work, completion, pending, (), stage)

    def _count(
        self,
        stage: str,
        begin: int,
        ledger: WrittenLedger,
        plan: Plan,
        back: bool = False,
    ) -> None:
        """Count a call that was handed over."""
        sent, came = ledger.sent_RR[self._rank], ledger.sent_RR[:, self._rank]
        if back:
            sent, came = came, sent
        self._core.statistics.count(stage, begin, sent, came, sum(plan.widths), COMPILED)

    def dispatch_again(
        self,
        x: Any,
        handle: Any,
        beside: Sequence[str],
        config: Any,
        previous_event: Any,
        completion: Completion,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        core, begin = self._core, time.monotonic_ns()
        try:
            pending = core.pending(previous_event, completion)
            columns, known = core.check_again(x, handle, beside, config, pending)
            ledger, (given, scales) = self._written(known), columns
            beside_x = None if scales is None else (scales.shape[1], scales.dtype)
            shape = DispatchShape(
                _AGAIN, given.dtype, given.shape[1], -1, 0, 1, -1, beside_x, is_cached=True
            )
            find = self.plans.new_dispatch if completion.async_finish else self.plans.find_dispatch
            plan = find(shape, self._local.placement(self._local.any_num_experts), config)
        except Exception as error:
            core.reject(_AGAIN, error)
        _tell_sources(plan, columns)
        self._tell_ledger(plan, known, ledger)
        num_bytes = column_offsets(ledger.num_rows, plan.widths)[-1]
        space = BySource(plan, self.pool, ledger, shared_rows.take(self.pool, num_bytes))
        num_tokens, moved = ledger.num_tokens, ledger.num_copies * plan.row_bytes
        hands_over = self._begin(plan, completion, num_tokens, moved)
        while verdict := self.meeting.enter(plan, _AGAIN):
            if verdict >> 32 == MOVE:
                break
            if not space.provides(verdict):
                self.meeting.refuse(verdict, plan, _AGAIN, None, space.block.error)
        received, event, block = space.rows(), EventOverlap(), space.block
        if hands_over:
            write = partial(self._kernels.write_rows, plan.address)
            held = columns, block, ledger, self._node.attached.hold()
            event = self._move(plan, _AGAIN, completion, pending, write, num_tokens, moved, held)
            self._count(_AGAIN, begin, ledger, plan)
        return received.x, received.scales, event

    def _written(self, known: Handle) -> WrittenLedger:
        """The ledger of a handle, as compiled calls read it."""
        ledger = known.ledger
        if not isinstance(ledger, WrittenLedger):
            ledger = known.ledger = WrittenLedger.of(ledger, self._rank)
        return ledger

    def _tell_ledger(self, plan: Plan, known: Handle, ledger: WrittenLedger) -> None:
        """Write which rows go along a handle."""
        table = plan.table
        table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
        table[at.NUM_TOKENS], table[at.NUM_COPIES] = ledger.num_tokens, ledger.num_copies
        table[at.HANDLE] = self._core.number_of(known)

    def combine(
        self, request: CombineRequest, completion: Completion, stage: str
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        if completion is AT_ONCE:
            plain = self._combine_plain(request, stage)
            if plain is not None:
                return plain, None, EventOverlap()
        core = self._core
        try:
            pending = core.pending(request.previous_event, completion)
            known = core.known(request.handle)
            sums = core.local.combine(request, known, pending)
            core.local.config(request.config)
            validate.tag(request.tag)
            ledger = self._written(known)
        except Exception as error:
            core.reject(stage, error)
        return self._combine_any(request, completion, stage, known, ledger, sums, pending)

    def _combine_plain(self, request: CombineRequest, stage: str) -> Tensor | None:
        """The sums of a contiguous CPU tensor, without weights and biases; None if this is another
        combine, or one with bad input.
        """
        x, handle, out, known = request.x, request.handle, request.out, self._core.origin
        if type(handle) is not Handle or handle.origin is not known or self._worker.pending:
            return None
        ledger = handle.ledger
        if type(ledger) is not WrittenLedger:
            return None
        num_rows, num_tokens = ledger.num_rows, ledger.num_tokens
        plan = self.plans.find_seen_rows(request, stage, num_rows)
        if (
            plan is None
            or num_threads(num_tokens, (ledger.num_copies + num_tokens) * plan.row_bytes) > 1
            or not (out is None or fits(out, x, num_tokens))
        ):
            return None
        address = x.data_ptr()
        try:
            lent = self.turns.offer_rows(plan, address, num_rows * plan.row_bytes)
            sums = plan.empty_sums(num_tokens, self.pool) if out is None else out
        except SharedMemoryError:
            return None
        table = plan.table
        table[at.SOURCES], table[at.OUTS], table[at.NUM_BIASES] = address, sums.data_ptr(), 0
        self._tell_ledger(plan, handle, ledger)
        table[at.PHASE], table[at.HANDS_OVER] = at.START, 0
        table[at.NUMBER], table[at.COUNTERS] = self._agreement.number, plan.counters
        if verdict := self.meeting.enter(plan, stage):
            self.meeting.refuse(verdict, plan, stage)
        self.turns.give_back(lent)
        return sums

    def _combine_any(
        self,
        request: CombineRequest,
        completion: Completion,
        stage: str,
        known: Handle,
        ledger: WrittenLedger,
        sums: list[Sum],
        pending: EventHandle | None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Whatever a combine may be, on the Buffer's thread too."""
        begin, first = time.monotonic_ns(), sums[0]
        num_weights = sums[1].rows_ND.shape[1] if len(sums) > 1 else 0
        dtype, hidden = first.rows_ND.dtype, first.rows_ND.shape[1]
        shape = CombineShape(stage, dtype, hidden, num_weights, request.tag, 0)
        find = self.plans.new_combine if completion.async_finish else self.plans.find_combine
        plan = find(shape, request.config)
        if completion is AT_ONCE:
            self.plans.learn_rows(request, plan, ledger.num_rows, first.rows_ND)
        table, num_tokens = plan.table, ledger.num_tokens
        moved = (ledger.num_copies + num_tokens) * plan.row_bytes
        # Weights are summed after x, by a function of another dtype.
        hands_over = self._begin(plan, completion, num_tokens, moved)
        if num_weights:
            hands_over = table[at.HANDS_OVER] = True
            table[at.COUNTERS] = 0
        is_later = completion.async_finish
        block = self._offer_columns(plan, ledger, sums, is_later, pending is None)
        for place, one in enumerate(sums):
            table[at.SOURCES + place] = one.rows_ND.data_ptr()
            table[at.OUTS + place] = one.out_TD.data_ptr()
        table[at.NUM_BIASES], table[at.AWAITS] = len(first.biases_TD), 1
        for place, bias in enumerate(first.biases_TD):
            table[at.BIASES + place] = bias.data_ptr()
        self._tell_ledger(plan, known, ledger)
        if hands_over and not is_later:
            self._copy_for_others(plan, ledger, sums, block)
        while verdict := self.meeting.enter(plan, stage):
            if verdict >> 32 == MOVE:
                break
            self.meeting.refuse(verdict, plan, stage, None, block.error)
        event = EventOverlap()
        if hands_over:
            self._agreement.number += 1
            mapped = self._node.attached.hold()

            def work(held: Any = (sums, block, ledger, mapped)) -> None:
                if is_later:
                    self._copy_for_others(plan, ledger, sums, block)
                table[at.PHASE] = at.MOVED
                verdict = self.meeting.end(plan, stage)
                assert verdict >> 32 == MOVE
                for place, one in enumerate(sums):
                    part = partial(self._kernels.sum_rows, one.out_TD.dtype, plan.address, place)
                    in_threads(part, num_tokens, moved)
                table[at.PHASE] = at.SUMMED
                verdict = self.meeting.end(plan, stage)
                assert not verdict

            event = self._core.finish(work, completion, pending, (), stage)
            self._count(stage, begin, ledger, plan, back=True)
        return first.out_TD, sums[1].out_TD if num_weights else None, event

    def _offer_columns(
        self, plan: Plan, ledger: WrittenLedger, sums: Sequence[Sum], is_later: bool, is_valid: bool
    ) -> SharedRows:
        """Offer each column where it lies, if others can read it there; else in a block, which is
        this call's alone. `is_valid` says that rows can be read by now.
        """
        table, head = plan.table, plan.head
        segments, needed = [], []
        for one, width in zip(sums, plan.widths):
            num_bytes = ledger.num_rows * width
            segment = self.pool.find(one.rows_ND.data_ptr(), num_bytes)
            segments.append(segment)
            needed.append(0 if segment is not None else width)
        begins = column_offsets(ledger.num_rows, tuple(needed))
        block = SharedRows(None)
        if any(needed):
            block = shared_rows.take(self.pool, begins[-1])
        table[at.BLOCK] = block.address
        is_ready = is_valid and not (is_later and any(needed))
        head[say.HOW] = is_ready * say.READY + is_later * say.LATER
        for place, (one, segment) in enumerate(zip(sums, segments)):
            told, begin = block.told, begins[place]
            table[at.BEGINS + place] = begin
            if segment is not None:
                told, begin = segment.told, one.rows_ND.data_ptr() - segment.address
                table[at.BEGINS + place] = -1
            at_word = say.SEGMENTS + say.SEGMENT_WORDS * place
            head[at_word], head[at_word + 1], head[at_word + 2] = told
            head[at_word + say.SEGMENT_BEGIN] = begin
        return block

    def _copy_for_others(
        self, plan: Plan, ledger: WrittenLedger, sums: Sequence[Sum], block: SharedRows
    ) -> None:
        """Copy the rows that others read, and not those that came from this rank."""
        came = ledger.sent_RR[:, self._rank]
        before, after, total = came[: self._rank].sum(), came[: self._rank + 1].sum(), came.sum()
        for place, one in enumerate(sums):
            begin = plan.table[at.BEGINS + place]
            if begin < 0 or block.array is None:
                continue
            width, dtype = one.rows_ND.shape[1], one.rows_ND.dtype
            copy = rows(block.array, begin, int(total), width, dtype)
            for part in (slice(0, before), slice(after, total)):
                self._core.kernels.pack(as_bytes(one.rows_ND[part]), None, as_bytes(copy[part]))


def _tell_sources(plan: Plan, columns: Sequence[Tensor | None]) -> None:
    """Write where columns lie."""
    present = [column for column in columns if column is not None]
    assert row_widths(present) == plan.widths
    for place, column in enumerate(present):
        plan.table[at.SOURCES + place] = column.data_ptr()


def _tell_block(plan: Plan, block: SharedRows, wanted: int = 0) -> None:
    """Offer memory. If there is none though it is wanted, all ranks hear of that."""
    table, head = plan.table, plan.head
    table[at.BLOCK], table[at.BLOCK_BYTES] = block.address, block.told[1] or wanted
    head[say.HOW] = say.READY
    head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = block.told
