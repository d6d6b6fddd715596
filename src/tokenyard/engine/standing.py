"""Prepared calls where all ranks share memory: compiled calls over tables that stay.

A prepared exchange has two turns, each with a plan for its dispatch, one for the combine that
answers it, and memory of its own. So a call checks its tensors, writes where they lie, and enters.
The calls are those of `engine.calls` and `engine.parcels`, which others may make in their stead.
"""

from __future__ import annotations

from copy import copy
from operator import is_
from sys import getrefcount
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.calls import BySource, SharedCalls
from tokenyard.engine.core import Core
from tokenyard.engine.inputs import fits
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.parcels import ByExpert, handle_of
from tokenyard.engine.plans import CombineShape, DispatchShape
from tokenyard.engine.prepared import PreparedRows, Shape, nothing_dispatched
from tokenyard.engine.turns import Lent, Turns
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.shm import shared_rows
from tokenyard.validate.alike import Like, like, like_none
from tokenyard.wire import call as at
from tokenyard.wire.columns import column_offsets
from tokenyard.wire.verdicts import BAD

_MOST_KNOWN = 1024  # numbers of rows whose tensors are known
_ALONE = 2  # references to memory of which no rows are held: that of its space, and getrefcount's


def _take(num_bytes: int) -> np.ndarray:
    """Memory for rows by expert, and for some more, so that it is soon large enough."""
    return memory.empty(num_bytes + num_bytes // 4).numpy()


class _Turn:
    """Every other dispatch, and the combine that answers it."""

    def __init__(self, core: Core, calls: SharedCalls, shape: Shape) -> None:
        self._shape = shape
        size, most, num_topk = core.num_ranks, shape.max_tokens, shape.num_topk
        dispatch, combine = shape.stages
        placement = core.local.slots(shape.num_experts)
        more = num_topk, placement, shape.expert_alignment, shape.tag, None
        self.plan = calls.plans.new_dispatch(
            DispatchShape(dispatch, shape.dtype, shape.hidden, *more), shape.config
        )
        pairs = num_topk if shape.by_expert else 0
        self.back = calls.plans.new_combine(
            CombineShape(combine, shape.dtype, shape.hidden, 0, shape.tag, pairs), shape.config
        )
        self.table, self.call = self.plan.table, self.plan.call
        self.back_table, self.sum = self.back.table, self.back.call
        self.table[at.ROOM] = room = most * min(num_topk, size)
        ledger = WrittenLedger(core.rank, size, most, room, size * most)
        # The word that counts the rows of a result: N, or M by expert.
        self.count = at.END if shape.by_expert else at.NUM_ROWS
        self.by_source: BySource | None = None
        self.by_expert: ByExpert | None = None
        if shape.by_expert:
            self.by_expert = ByExpert(self.plan, _take, ledger)
        else:
            block = shared_rows.take(calls.pool, column_offsets(size * most, self.plan.widths)[-1])
            if block.error is not None:
                raise block.error
            self.by_source = BySource(self.plan, calls.pool, ledger, block)
        self._tell_back()
        self._seen: Tensor | None = None  # those of the last dispatch
        self._num_seen = -1

    def leave_rows(self) -> None:
        """If somebody still holds rows of this turn's last dispatch, take other memory for the
        next. Each `rows` is of a storage of its own, which holds the array until it dies.
        """
        space = self.by_expert
        if space is not None and space.array is not None and getrefcount(space.array) > _ALONE:
            space.renew(self.table[at.END])

    @property
    def space(self) -> BySource | ByExpert:
        space = self.by_expert or self.by_source
        assert space is not None
        return space

    def provides(self, verdict: int) -> bool:
        self._seen, self._num_seen = None, -1
        if not self.space.provides(verdict):
            return False
        self._tell_back()
        return True

    def _tell_back(self) -> None:
        """Write what a combine reads of its dispatch, where it lies now."""
        table, ledger = self.back_table, self.space.ledger
        table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
        if self.by_expert is not None:
            table[at.ROW_OF], table[at.FACTORS] = self.by_expert.lists.addresses

    def rows(self) -> Tensor:
        """The rows of the last dispatch, in a tensor of the caller's own."""
        num_rows = self.table[self.count]
        if self._num_seen != num_rows:
            shape = self._shape
            with torch.inference_mode(False):  # rows may be used outside of it
                seen = self.space.part(num_rows)
            if shape.leaves_rows:
                return seen
            self._seen, self._num_seen = seen, num_rows
        assert self._seen is not None
        return self._seen.detach()  # a third of the time of a slice

    def per_expert(self) -> list[int]:
        return self.plan.per_expert.tolist()

    def offsets(self) -> Tensor | None:
        return None if self.by_expert is None else self.by_expert.ends.clone()

    def topk_idx(self, num_rows: int) -> Tensor | None:
        return None if self.by_source is None else self.by_source.rows().topk_idx

    def topk_weights(self, num_rows: int) -> Tensor | None:
        return None if self.by_source is None else self.by_source.rows().topk_weights

    def offer(self, turns: Turns, address: int) -> Lent | None:
        """Offer the rows of a combine, which lie there, or what this rank sums of them."""
        num_bytes = self.table[at.NUM_ROWS] * self.back.row_bytes
        self.back_table[at.SOURCES] = address
        if self.by_expert is not None:
            return turns.offer(self.back, num_bytes)
        return turns.offer_rows(self.back, address, num_bytes)

    def offer_parcel(self, turns: Turns) -> Lent:
        """Offer memory for the tokens of a dispatch by expert."""
        num_bytes = column_offsets(self.table[at.NUM_TOKENS], self.plan.widths)[-1]
        return turns.offer(self.plan, num_bytes)


class StandingPair:
    def __init__(self, core: Core, calls: SharedCalls, shape: Shape) -> None:
        self._core, self._calls, self._shape = core, calls, shape
        self._agreement, self._worker, self._meeting = core.agreement, core.worker, calls.meeting
        self._counts_ids = calls.plans.counts_ids
        self._dispatch_stage, self._combine_stage = shape.stages
        self._each, self._turns = [_Turn(core, calls, shape) for _ in range(2)], calls.turns
        self._next = 0
        self._last: _Turn | None = None
        plan = self._each[0].plan
        self._ids = at.SOURCES + plan.table[at.IDS]
        self._numbers = torch.arange(shape.max_tokens, dtype=torch.int32, device="cpu")
        if not shape.by_expert:
            for turn in self._each:
                turn.table[self._ids + 2] = self._numbers.data_ptr()
        # Tensors that were checked, and can be read as they are: by the number of their rows.
        self._given: dict[int, Like] = {}
        self._rows: dict[int, Like] = {}
        calls.offers = True

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> PreparedRows:
        turn = self._each[self._next]
        given = x, topk_idx, topk_weights
        try:
            if self._shape.leaves_rows:
                turn.leave_rows()
            if self._worker.pending is not None or not self._tell(turn, x, topk_idx, topk_weights):
                given = self._check(turn, x, topk_idx, topk_weights)
            elif self._core.balance is not None:
                given = x, self._choose(turn, topk_idx), topk_weights
            lent = None if turn.by_expert is None else turn.offer_parcel(self._turns)
        except Exception as error:
            self._core.reject(self._dispatch_stage, error)
        self._next = 1 - self._next
        table, agreement = turn.table, self._agreement
        table[at.PHASE], table[at.PART], table[at.NUMBER] = at.START, 0, agreement.number
        agreement.engaged = True
        if verdict := turn.call():
            self._go_on(turn, verdict, given[1])
        else:
            agreement.number += 1
        if lent is not None:
            self._turns.give_back(lent)
        self._last = turn
        return PreparedRows(turn.rows(), turn)

    def _tell(self, turn: _Turn, x: Any, topk_idx: Any, topk_weights: Any) -> bool:
        """Write where tensors like those of a dispatch before lie; False if they are not."""
        try:
            num_tokens = x.shape[0]
            if not self._given.get(num_tokens, like_none)(x, topk_idx, topk_weights):
                return False
        except (AttributeError, IndexError):  # of what is no matrix at all
            return False
        self._write(turn, num_tokens, x, topk_idx, topk_weights)
        table, ids = turn.table, self._ids
        return bool(table[at.SOURCES] and table[ids] and table[ids + 1])  # else without memory

    def _write(
        self, turn: _Turn, num_tokens: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor
    ) -> None:
        table, ids = turn.table, self._ids
        table[at.SOURCES], table[ids] = x.data_ptr(), topk_idx.data_ptr()
        table[ids + 1], table[at.NUM_TOKENS] = topk_weights.data_ptr(), num_tokens

    def _choose(self, turn: _Turn, topk_idx: Tensor) -> Tensor:
        """The slots of the pairs of tensors that were checked."""
        core, shape = self._core, self._shape
        assert core.balance is not None
        owners = core.local.placement(shape.num_experts)
        slots = core.balance.choose(topk_idx, owners, shape.tag)
        turn.table[self._ids] = slots.data_ptr()
        return slots

    def _check(self, turn: _Turn, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[Any, ...]:
        """Write where tensors lie, after the checks of every dispatch, which copy them if need be.
        Returns what must live until the call is over.
        """
        core = self._core
        self._worker.drain()
        validate.require(topk_idx is not None, "topk_idx is None, want a torch.Tensor")
        self._shape.check(x, topk_idx)
        given = core.local.check(self._shape.request(x, topk_idx, topk_weights))
        ids, weights = given.topk_idx, given.topk_weights
        assert ids is not None
        assert weights is not None
        if not self._counts_ids:
            turn.plan.mark(core.local.count_ids(ids, given.placement))
        plain, num_tokens = (given.x, ids, weights), len(given.x)
        self._write(turn, num_tokens, *plain)
        if (
            self._counts_ids
            and core.local.choice is None
            and all(map(is_, (given.x, given.asked, weights), (x, topk_idx, topk_weights)))
        ):
            _learn(self._given, num_tokens, x, topk_idx, topk_weights)
        return plain

    def _go_on(self, turn: _Turn, verdict: int, topk_idx: Any) -> None:
        """Give a dispatch what it lacks, until it is over."""
        stage, plan = self._dispatch_stage, turn.plan
        while verdict:
            if verdict >> 32 == BAD:
                self._agreement.engaged = False
            if not turn.provides(verdict) and not self._meeting.answers(verdict, plan, stage):
                self._meeting.refuse(verdict, plan, stage, topk_idx, turn.space.error)
            verdict = self._meeting.enter(plan, stage)

    def combine(self, y: Any, weigh: Any, out: Any) -> Tensor:
        turn, stage = self._last, self._combine_stage
        try:
            if self._worker.pending is not None:
                self._worker.drain()
            if turn is None:
                raise nothing_dispatched()
            of = turn.table
            num_rows, num_tokens = of[turn.count], of[at.NUM_TOKENS]
            if not (self._rows.get(num_rows, like_none)(y) and y.data_ptr()):
                y = self._check_rows(y, num_rows)
            if weigh is not True:
                validate.switch("weigh", weigh)
            if out is None:
                out = turn.back.empty_sums(num_tokens, self._calls.pool)
            elif not fits(out, y, num_tokens):
                out = validate.out(out, num_tokens, y, [y])
            lent = turn.offer(self._turns, y.data_ptr())
        except Exception as error:
            self._core.reject(stage, error)
        table, agreement = turn.back_table, self._agreement
        table[at.NUM_TOKENS], table[at.OUTS] = num_tokens, out.data_ptr()
        table[at.NUM_ROWS], table[at.NUM_COPIES] = of[at.NUM_ROWS], of[at.NUM_COPIES]
        table[at.HANDLE], table[at.WEIGH] = of[at.NUMBER], weigh
        table[at.PHASE], table[at.NUMBER] = at.START, agreement.number
        agreement.engaged = True
        if verdict := turn.sum():
            while verdict:
                if not self._meeting.answers(verdict, turn.back, stage):
                    self._meeting.refuse(verdict, turn.back, stage)
                verdict = self._meeting.enter(turn.back, stage)
        else:
            agreement.number += 1
        if lent is not None:
            self._turns.give_back(lent)
        return out

    def handle(self) -> Handle:
        """The handle of the last dispatch by expert, good until the next but one."""
        assert self._last is not None
        space = self._last.by_expert
        assert space is not None
        return handle_of(self._core, self._last.plan, copy(space.ledger), copy(space.lists))

    def _check_rows(self, y: Any, num_rows: int) -> Tensor:
        """The rows of a combine as they can be read."""
        shape = self._shape
        plain = validate.rows("y", y, num_rows=num_rows, dtypes=(shape.dtype,))
        if plain.shape[1] != shape.hidden:
            raise ValueError(f"y has hidden {plain.shape[1]}, want {shape.hidden}")
        if plain is y:
            _learn(self._rows, num_rows, plain)
        return plain


def _learn(known: dict[int, Like], num_rows: int, *tensors: Tensor) -> None:
    """Remember what tensors of so many rows are like."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[num_rows] = like(*tensors)
