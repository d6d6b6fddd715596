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
from tokenyard.engine.inputs import CombineRequest, DispatchRequest
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.meeting import Meeting
from tokenyard.engine.plans import CallKernels, CombineShape, DispatchShape, Plan, Plans
from tokenyard.engine.turns import Lent, Turns
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import NOTHING
from tokenyard.types import KnownPairs
from tokenyard.validate import NOT_PLAIN, lies_at
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
        """With room for the pairs of so many rows."""
        pairs = room * num_topk
        self._memory = int64s.new(pairs + pairs // 2 + 1)
        self.num_topk, self._pairs = num_topk, pairs
        self.row_of_at = int64s.address(self._memory)
        self.weights_at = self.row_of_at + 8 * pairs

    @classmethod
    def of(cls, known: KnownPairs) -> Lists:
        """The same of pairs that came as lists."""
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
        self.ends = torch.empty(plan.table[at.NUM_LOCAL], dtype=torch.int32, device="cpu")
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
        """What has come."""
        return RowsByExpert(self.room(), self._scales, self.ends, self._plan.per_expert.tolist())


class Columns(NamedTuple):
    """What a dispatch by expert sends of each token."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor


def handle_of(core: Core, plan: Plan, ledger: WrittenLedger, lists: Lists) -> Handle:
    """That of a plan's last dispatch, which has written these."""
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
        columns = self._plain(request)
        try:
            plan, columns = self._plan(request, columns)
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

    def _plain(self, request: DispatchRequest) -> Columns | None:
        """x, scales, ids and weights as they were given, if nothing needs to be done to them."""
        x, topk_idx, topk_weights = request.x, request.topk_idx, request.topk_weights
        if (
            lies_at(x, 2) == NOT_PLAIN
            or lies_at(topk_idx, 2, torch.int64) == NOT_PLAIN
            or lies_at(topk_weights, 2, torch.float32) == NOT_PLAIN
            or not type(request.num_experts) is type(request.expert_alignment) is int
            or type(request.tag) is not int
            or self._local.choice is not None
        ):
            return None
        shape = topk_idx.shape
        if shape[0] != x.shape[0] or topk_weights.shape != shape:
            return None
        return Columns(x, None, topk_idx, topk_weights)

    def _plan(self, request: DispatchRequest, columns: Columns | None) -> tuple[Plan, Columns]:
        """The plan of a dispatch, whose table knows its tensors then."""
        plan = None
        if columns is not None:
            plan = self._plans.get(_shape(columns, request))
        if plan is None or plan.config != request.config:
            self._worker.drain()
            validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
            validate.alignment(request.expert_alignment)
            given = self._local.check(request)
            assert given.topk_idx is not None
            assert given.topk_weights is not None
            columns = Columns(given.x, given.scales, given.topk_idx, given.topk_weights)
            shape = _shape(columns, request)
            plan = self._plans.find_dispatch(shape, given.placement, given.config)
        assert columns is not None
        table = plan.table
        for place, column in enumerate(columns):
            table[at.SOURCES + place] = 0 if column is None else column.data_ptr()
        num_tokens, num_topk = columns.topk_idx.shape
        table[at.NUM_TOKENS], table[at.ROOM] = num_tokens, num_tokens * min(num_topk, self._size)
        if not self._plans.counts_ids:
            placement = self._local.placement(request.num_experts)
            plan.mark(self._local.count_ids(columns.topk_idx, placement))
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
        copy = rows(lent.segment.array(), 0, x.shape[0], x.shape[1], x.dtype)
        self._core.kernels.pack(as_bytes(x), None, as_bytes(copy))

    def combine(self, request: CombineRequest, weigh: Any) -> Tensor:
        core = self._core
        try:
            known, y, out = check_rows(core, request, weigh)
            core.local.config(request.config)
            ledger, lists = known.ledger, known.by_expert
            if type(ledger) is not WrittenLedger:
                ledger = known.ledger = WrittenLedger.of(ledger, self._rank)
            if type(lists) is not Lists:
                assert lists is not None
                lists = known.by_expert = Lists.of(lists)
            tag = validate.tag(request.tag)
            shape = CombineShape(COMBINE, y.dtype, y.shape[1], 0, tag, lists.num_topk)
            plan = self._plans.find_combine(shape, request.config)
            num_tokens, num_rows = ledger.num_tokens, ledger.num_rows
            sums = core.local.empty_sum(y, num_tokens) if out is None else out
        except Exception as error:
            core.reject(COMBINE, error)
        table = plan.table
        lent, no_memory = self._offer(plan, num_rows * plan.row_bytes)
        table[at.SOURCES], table[at.WEIGH], table[at.OUTS] = y.data_ptr(), weigh, sums.data_ptr()
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


def _shape(columns: Columns, request: DispatchRequest) -> DispatchShape:
    x, scales, topk_idx, _ = columns
    beside = None if scales is None else (scales.shape[1], scales.dtype)
    more = request.num_experts, request.expert_alignment, request.tag, beside
    return DispatchShape(DISPATCH, x.dtype, x.shape[1], topk_idx.shape[1], *more)
