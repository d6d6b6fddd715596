"""Combines where all ranks share memory: one compiled call, which reads rows where they lie.

Rows that other ranks cannot read where they are, and few rows, are copied to a block first. Rows of
a call that goes on on the Buffer's thread are copied there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tokenyard import validate
from tokenyard.engine.core import Core
from tokenyard.engine.inputs import CombineRequest, fits
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.meeting import Meeting
from tokenyard.engine.plans import CallKernels, CombineShape, Plan, Plans
from tokenyard.engine.turns import Turns
from tokenyard.results import Handle
from tokenyard.runtime.completion import AT_ONCE, Completion
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.shm import shared_rows
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.transports import Sum
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets
from tokenyard.wire.verdicts import MOVE


def known_ledger(known: Handle, rank: int) -> WrittenLedger:
    """The ledger of a handle, as compiled calls read it."""
    ledger = known.ledger
    if not isinstance(ledger, WrittenLedger):
        ledger = known.ledger = WrittenLedger.of(ledger, rank)
    return ledger


def tell_ledger(plan: Plan, handle: int, ledger: WrittenLedger) -> None:
    """Write which rows go along a handle."""
    table = plan.table
    table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
    table[at.NUM_TOKENS], table[at.NUM_COPIES] = ledger.num_tokens, ledger.num_copies
    table[at.HANDLE] = handle


class SumCalls:
    def __init__(
        self, core: Core, kernels: CallKernels, meeting: Meeting, plans: Plans, turns: Turns
    ) -> None:
        self._core, self._kernels, self._meeting = core, kernels, meeting
        self._plans, self._turns, self._pool = plans, turns, meeting.node.pool
        self._agreement, self._worker, self._rank = core.agreement, core.worker, core.rank

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
            ledger = known_ledger(known, self._rank)
            first, num_rows = sums[0].rows_ND, ledger.num_rows
            num_weights = sums[1].rows_ND.shape[1] if len(sums) > 1 else 0
            terms = first.dtype, first.shape[1], num_weights, request.tag, 0
            find = self._plans.new_combine if completion.async_finish else self._plans.find_combine
            plan = find(CombineShape(stage, *terms), request.config)
            if completion is AT_ONCE:
                self._plans.learn_rows(request, plan, num_rows, first)
        except Exception as error:
            core.reject(stage, error)
        return self._combine_any(plan, completion, known, ledger, sums, pending)

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
        plan = self._plans.find_seen_rows(request, stage, num_rows)
        if (
            plan is None
            or num_threads(num_tokens, (ledger.num_copies + num_tokens) * plan.row_bytes) > 1
            or not (out is None or fits(out, x, num_tokens))
        ):
            return None
        address = x.data_ptr()
        try:
            lent = self._turns.offer_rows(plan, address, num_rows * plan.row_bytes)
            sums = plan.empty_sums(num_tokens, self._pool) if out is None else out
        except (MemoryError, RuntimeError):  # of which the other way tells
            return None
        table = plan.table
        table[at.SOURCES], table[at.OUTS], table[at.NUM_BIASES] = address, sums.data_ptr(), 0
        tell_ledger(plan, self._core.number_of(handle), ledger)
        table[at.PHASE], table[at.HANDS_OVER] = at.START, 0
        table[at.NUMBER], table[at.COUNTERS] = self._agreement.number, plan.counters
        if verdict := self._meeting.enter(plan, stage):
            self._meeting.refuse(verdict, plan, stage)
        self._turns.give_back(lent)
        return sums

    def _combine_any(
        self,
        plan: Plan,
        completion: Completion,
        known: Handle,
        ledger: WrittenLedger,
        sums: list[Sum],
        pending: EventHandle | None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Whatever a combine may be, on the Buffer's thread too."""
        begin, first, stage = time.monotonic_ns(), sums[0], plan.shape.stage
        table, num_tokens, num_weights = plan.table, ledger.num_tokens, len(sums) - 1
        moved = (ledger.num_copies + num_tokens) * plan.row_bytes
        # Weights are summed after x, by a function of another dtype.
        hands_over = self._meeting.begin(plan, completion, num_tokens, moved)
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
        tell_ledger(plan, self._core.number_of(known), ledger)
        if hands_over and not is_later:
            self._copy_for_others(plan, ledger, sums, block)
        while verdict := self._meeting.enter(plan, stage):
            if verdict >> 32 == MOVE:
                break
            self._meeting.refuse(verdict, plan, stage, None, block.error)
        event = EventOverlap()
        if hands_over:
            self._agreement.number += 1
            mapped = self._meeting.node.attached.hold()

            def work(held: Any = (block, ledger, mapped)) -> None:
                if is_later:
                    self._copy_for_others(plan, ledger, sums, block)
                self._sum_in_threads(plan, stage, sums, moved)

            event = self._core.finish(work, completion, pending, (), stage)
            self._meeting.count(stage, begin, ledger, plan, back=True)
        return first.out_TD, sums[1].out_TD if num_weights else None, event

    def _sum_in_threads(self, plan: Plan, stage: str, sums: Sequence[Sum], moved: int) -> None:
        """End a call that has handed over."""
        plan.table[at.PHASE] = at.MOVED
        verdict = self._meeting.end(plan, stage)
        assert verdict >> 32 == MOVE
        for place, one in enumerate(sums):
            part = partial(self._kernels.sum_rows, one.out_TD.dtype, plan.address, place)
            in_threads(part, len(one.out_TD), moved)
        plan.table[at.PHASE] = at.SUMMED
        verdict = self._meeting.end(plan, stage)
        assert not verdict

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
            segment = self._pool.find(one.rows_ND.data_ptr(), num_bytes)
            segments.append(segment)
            needed.append(0 if segment is not None else width)
        begins = column_offsets(ledger.num_rows, tuple(needed))
        block = SharedRows(None)
        if any(needed):
            block = shared_rows.take(self._pool, begins[-1])
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
