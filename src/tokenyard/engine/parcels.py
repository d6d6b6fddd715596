"""Rows by expert where all ranks share memory: one compiled call each way.

A rank fills a parcel with its tokens, and every rank takes its experts' rows from the parcels of
all, straight to their places (`kernels.numba.call.by_expert`). Sums come back as each rank's shares
of other ranks' tokens; a rank sums the rows of its own where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.by_expert import COMBINE, DISPATCH, RowsByExpert, check_rows
from tokenyard.engine.core import Core
from tokenyard.engine.inputs import CombineRequest, DispatchRequest, fits
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.meeting import Meeting
from tokenyard.engine.plans import CallKernels, CombineShape, DispatchShape, Plan, Plans
from tokenyard.engine.turns import Lent, Turns
from tokenyard.errors import SharedMemoryError
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import NOTHING
from tokenyard.topology import Placement
from tokenyard.types import KnownPairs
from tokenyard.wire import call as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets
from tokenyard.wire.verdicts import LOW, MORE_MEMORY, MORE_ROOM, MOVE

Empty = Callable[[int, int, torch.dtype], Tensor]


class Lists:
    """What a dispatch by parcels knows of its pairs: `types.KnownPairs`, written by compiled code.

    Its memory holds the row of each pair that came, int64, and then the weights, float32.
    """

    num_rows = num_came = 0  # M, and N: known once all is written

    def __init__(self, room: int, num_topk: int) -> None:
        """Make room for the pairs of `room` rows."""
        pairs = room * num_topk
        self._memory = int64s.new(pairs + pairs // 2 + 1)
        self.num_topk, self._pairs = num_topk, pairs
        self.row_of_at = int64s.address(self._memory)
        self.weights_at = self.row_of_at + 8 * pairs

    @classmethod
    def of(cls, known: KnownPairs) -> Lists:
        """Copy known pairs into lists, as a compiled dispatch would have written them."""
        num_came, num_topk = known.row_of.shape
        made = cls(num_came, num_topk)
        made.num_rows, made.num_came = known.num_rows, num_came
        made.row_of.copy_(known.row_of)
        made.topk_weights.copy_(known.topk_weights)
        return made

    @cached_property
    def row_of(self) -> Tensor:
        return self._part(torch.int64, 0)

    @cached_property
    def topk_weights(self) -> Tensor:
        return self._part(torch.float32, 8 * self._pairs)

    def _part(self, dtype: torch.dtype, begin: int) -> Tensor:
        came = torch.frombuffer(self._memory, dtype=torch.uint8)[begin:].view(dtype)
        return came[: self.num_came * self.num_topk].view(self.num_came, self.num_topk)


class ByExpert:
    """What a dispatch by expert writes to: its results, its ledger and its lists."""

    def __init__(self, plan: Plan, empty: Empty, ledger: WrittenLedger) -> None:
        """`empty` gives memory for rows, of which nobody knows yet how many come."""
        self._plan, self._empty = plan, empty
        self.x: Tensor | None = None
        self._scales: Tensor | None = None
        self.ends = memory.empty_like(plan.ends)
        plan.table[at.ENDS], plan.table[at.RESULT_BYTES] = self.ends.data_ptr(), 0
        self._list(ledger)

    def _list(self, ledger: WrittenLedger) -> None:
        self.ledger, table = ledger, self._plan.table
        self.lists = Lists(ledger.src_room, table[at.NUM_TOPK])
        table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room
        table[at.ROW_OF], table[at.FACTORS] = self.lists.row_of_at, self.lists.weights_at

    def provides(self, verdict: int) -> bool:
        """Whether this can give a call what it lacks, and has done so."""
        plan, what, count = self._plan, verdict >> 32, verdict & LOW
        if what == MORE_ROOM:
            plan.src_room = count + count // 4
            self._list(self.ledger.with_room(plan.src_room))
        elif what == MORE_MEMORY:
            self.grow(plan.table[at.END])
        else:
            return False
        return True

    def grow(self, num_rows: int) -> None:
        """Take memory for so many rows."""
        plan, table, shape = self._plan, self._plan.table, self._plan.shape
        self.x = self._empty(num_rows, shape.hidden, shape.dtype)
        table[at.RESULT], table[at.RESULT_BYTES] = self.x.data_ptr(), self.x.nbytes
        if plan.scales is not None:
            self._scales = self._empty(num_rows, *plan.scales)
            table[at.RESULT_SCALES] = self._scales.data_ptr()

    def room(self) -> Tensor:
        """The rows that there is memory for."""
        if self.x is None:
            self.grow(0)
        assert self.x is not None
        return self.x

    def rows(self) -> RowsByExpert:
        """The rows that have come, by expert."""
        return RowsByExpert(self.room(), self._scales, self.ends, self._plan.per_expert.tolist())


class Columns(NamedTuple):
    """What a dispatch by expert sends of each token."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor


def handle_of(core: Core, plan: Plan, ledger: WrittenLedger, lists: Lists) -> Handle:
    """The handle of a plan's last dispatch, which has written this ledger and these lists."""
    table, shape = plan.table, plan.shape
    ledger.num_tokens, ledger.num_rows = table[at.NUM_TOKENS], table[at.NUM_ROWS]
    ledger.num_copies = table[at.NUM_COPIES]
    lists.num_rows, lists.num_came = table[at.END], ledger.num_rows
    return Handle(
        core.origin,
        table[at.NUMBER],
        shape.hidden,
        plan.combine_dtype,
        plan.num_channels,
        ledger,
        None,
        lists,
    )


class ParcelCalls:
    def __init__(
        self, core: Core, kernels: CallKernels, meeting: Meeting, plans: Plans, turns: Turns
    ) -> None:
        self._core, self._kernels, self._meeting = core, kernels, meeting
        self._plans, self._turns, self._pool = plans, turns, meeting.node.pool
        self._agreement, self._local, self._worker = core.agreement, core.local, core.worker
        self._rank, self._size = core.rank, core.num_ranks

    def dispatch(self, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
        try:
            plan, columns = self._plan(request)
        except Exception as error:
            self._core.reject(DISPATCH, error)
        table, shape = plan.table, plan.shape
        num_tokens, num_topk = table[at.NUM_TOKENS], shape.num_topk
        lent, no_memory = self._offer(plan, column_offsets(num_tokens, plan.widths)[-1])
        ledger = WrittenLedger(self._rank, self._size, num_tokens, table[at.ROOM], plan.src_room)
        space = ByExpert(plan, self._core.transport.empty, ledger)
        if (
            self.begin(plan, num_tokens, num_tokens * num_topk * plan.row_bytes)
            and lent is not None
        ):
            self._fill(columns.x, lent)
        while verdict := self._meeting.enter(plan, DISPATCH):
            if verdict >> 32 == MOVE:
                part = partial(self._kernels.take_rows, plan.address)
                in_threads(part, table[at.NUM_ROWS], table[at.END] * plan.row_bytes)
                table[at.PHASE] = at.MOVED
            elif not space.provides(verdict):
                self._meeting.refuse(verdict, plan, DISPATCH, columns.topk_idx, no_memory)
        self._turns.give_back(lent)
        return space.rows(), handle_of(self._core, plan, space.ledger, space.lists)

    def begin(self, plan: Plan, num_items: int, moved: int) -> bool:
        """Write the words with which every call begins. Whether threads move its rows."""
        if self._worker.pending is not None:
            self._worker.drain()
        hands_over, table = num_threads(num_items, moved) > 1, plan.table
        table[at.PHASE], table[at.PART], table[at.HANDS_OVER] = at.START, 0, hands_over
        table[at.NUMBER] = self._agreement.number
        return hands_over

    def _plan(self, request: DispatchRequest) -> tuple[Plan, Columns]:
        """The plan of a dispatch, whose table knows its tensors then."""
        plan = self._plans.find_seen(request, DISPATCH)
        if plan is not None:
            columns = Columns(request.x, None, request.topk_idx, request.topk_weights)
        else:
            self._worker.drain()
            validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
            validate.alignment(request.expert_alignment)
            given = self._local.check(request)
            assert given.topk_idx is not None
            assert given.topk_weights is not None
            columns = Columns(given.x, given.scales, given.topk_idx, given.topk_weights)
            shape = _shape(columns, request, given.placement)
            plan = self._plans.find_dispatch(shape, given.config)
            self._plans.learn(request, DISPATCH, given, plan)
            for place, column in enumerate(columns):
                plan.table[at.SOURCES + place] = 0 if column is None else column.data_ptr()
            plan.table[at.NUM_TOKENS] = len(given.x)
            if not self._plans.counts_ids:
                plan.mark(self._local.count_ids(columns.topk_idx, given.placement))
        plan.table[at.ROOM] = plan.table[at.NUM_TOKENS] * min(plan.shape.num_topk, self._size)
        return plan, columns

    def _offer(self, plan: Plan, num_bytes: int) -> tuple[Lent | None, SharedMemoryError | None]:
        """Offer a block for a parcel, or for shares. Without memory, all ranks hear of that."""
        try:
            return self._turns.offer(plan, num_bytes), None
        except SharedMemoryError as error:
            table, head = plan.table, plan.head
            table[at.BLOCK], table[at.AWAITS], head[say.HOW] = 0, 1, say.READY
            head[say.SEGMENTS], head[say.SEGMENTS + 1], head[say.SEGMENTS + 2] = NOTHING
            return None, error

    def _fill(self, x: Tensor, lent: Lent) -> None:
        """Copy the rows of a large parcel, which come first in it, in threads."""
        copy = rows(lent.array, 0, x.shape[0], x.shape[1], x.dtype)
        self._core.kernels.pack(as_bytes(x), None, as_bytes(copy))

    def _check_rows(
        self, request: CombineRequest, weigh: Any
    ) -> tuple[Handle, Plan, Tensor, Tensor]:
        """The handle and the plan of a combine, whose table knows its rows then; and what it reads
        and writes.
        """
        core, handle, out = self._core, request.handle, request.out
        plan = None
        if type(handle) is Handle and handle.origin is core.origin and type(weigh) is bool:
            lists, num_tokens = handle.by_expert, handle.ledger.num_tokens
            if type(lists) is Lists and type(handle.ledger) is WrittenLedger:
                found = lists.num_rows, lists.num_topk
                plan = self._plans.find_seen_rows(request, COMBINE, *found)
        if plan is not None and (out is None or fits(out, request.x, num_tokens)):
            known, y = handle, request.x
        else:
            known, y, out = check_rows(core, request, weigh)
            core.local.config(request.config)
            lists = known.by_expert
            if type(known.ledger) is not WrittenLedger:
                known.ledger = WrittenLedger.of(known.ledger, self._rank)
            if type(lists) is not Lists:
                assert lists is not None
                lists = known.by_expert = Lists.of(lists)
            tag = validate.tag(request.tag)
            shape = CombineShape(COMBINE, y.dtype, y.shape[1], 0, tag, lists.num_topk)
            plan = self._plans.find_combine(shape, request.config)
            self._plans.learn_rows(request, plan, lists.num_rows, y)
        if out is None:
            out = plan.empty_sums(known.num_tokens, self._pool)
        plan.table[at.SOURCES], plan.table[at.OUTS] = y.data_ptr(), out.data_ptr()
        plan.table[at.WEIGH] = weigh
        return known, plan, y, out

    def combine(self, request: CombineRequest, weigh: Any) -> Tensor:
        core = self._core
        try:
            known, plan, y, sums = self._check_rows(request, weigh)
        except Exception as error:
            core.reject(COMBINE, error)
        ledger, lists = known.ledger, known.by_expert
        assert type(ledger) is WrittenLedger
        assert type(lists) is Lists
        num_tokens, num_rows = ledger.num_tokens, ledger.num_rows
        table = plan.table
        lent, no_memory = self._offer(plan, num_rows * plan.row_bytes)
        table[at.ROW_OF], table[at.FACTORS] = lists.row_of_at, lists.weights_at
        table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
        table[at.NUM_TOKENS], table[at.NUM_COPIES] = num_tokens, ledger.num_copies
        table[at.NUM_ROWS], table[at.HANDLE] = num_rows, core.number_of(known)
        moved = (y.shape[0] + num_tokens) * plan.row_bytes
        if self.begin(plan, max(num_tokens, num_rows), moved) and lent is not None:
            share = partial(self._kernels.share_rows, y.dtype, plan.address)
            in_threads(share, num_rows, moved)
        while verdict := self._meeting.enter(plan, COMBINE):
            if verdict >> 32 != MOVE:
                self._meeting.refuse(verdict, plan, COMBINE, None, no_memory)
            if verdict & LOW:  # the rows of all ranks are there
                part = partial(self._kernels.sum_rows, y.dtype, plan.address, 0)
                in_threads(part, num_tokens, moved)
            table[at.PHASE] = at.SUMMED if verdict & LOW else at.MOVED
        self._turns.give_back(lent)
        return sums


def _shape(columns: Columns, request: DispatchRequest, placement: Placement) -> DispatchShape:
    x, scales, topk_idx, _ = columns
    beside = None if scales is None else (scales.shape[1], scales.dtype)
    more = placement, request.expert_alignment, request.tag, beside
    return DispatchShape(DISPATCH, x.dtype, x.shape[1], topk_idx.shape[1], *more)
