"""Rows by expert where all ranks share memory: one compiled call each way.

A rank fills a parcel with its tokens, and every rank takes its experts' rows from the parcels of
all, straight to their places (`kernels.numba.call.by_expert`). Sums come back as each rank's shares
of other ranks' tokens; a rank sums the rows of its own where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
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
from tokenyard.errors import SharedMemoryError, lack_of_memory
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.runtime.threads import in_threads, num_threads
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import NOTHING, Room
from tokenyard.topology import Placement
from tokenyard.types import KnownPairs
from tokenyard.wire import call as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire.columns import LINE, column_offsets
from tokenyard.wire.verdicts import LOW, MORE_MEMORY, MOVE


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

    @classmethod
    def of(cls, known: KnownPairs) -> Lists:
        """Copy known pairs into lists, as a compiled dispatch would have written them."""
        num_came, num_topk = known.row_of.shape
        made = cls(num_came, num_topk)
        made.num_rows, made.num_came = known.num_rows, num_came
        made._part(torch.int64, 0).copy_(known.row_of)
        made._part(torch.float32, 8 * made._pairs).copy_(known.topk_weights)
        return made

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the rows, and of the weights."""
        begin = int64s.address(self._memory)
        return begin, begin + 8 * self._pairs

    # Copies: the memory itself is compiled code's, which makes addresses of it.
    @cached_property
    def row_of(self) -> Tensor:
        return self._part(torch.int64, 0).clone()

    @cached_property
    def topk_weights(self) -> Tensor:
        return self._part(torch.float32, 8 * self._pairs).clone()

    def _part(self, dtype: torch.dtype, begin: int) -> Tensor:
        came = torch.frombuffer(self._memory, dtype=torch.uint8)[begin:].view(dtype)
        return came[: self.num_came * self.num_topk].view(self.num_came, self.num_topk)


class Space:
    """What a compiled dispatch writes to. Ranks tell each other what they have room for. Where one
    has too little it takes more, and all tell again (`kernels.numba.call.meet.settle_memory`).
    """

    def __init__(self, plan: Plan, ledger: WrittenLedger) -> None:
        self._plan = plan
        self.error: SharedMemoryError | None = None  # why there is no memory, if there is none
        plan.head[say.ROOM] = 0
        self.list(ledger)

    def list(self, ledger: WrittenLedger) -> None:
        self.ledger, table = ledger, self._plan.table
        table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room
        self._plan.head[say.LISTS] = ledger.src_room

    def provides(self, verdict: int) -> bool:
        """Whether this can answer a verdict, and has done so: what a call lacks is there, or all
        ranks will hear that it is not.
        """
        plan, table = self._plan, self._plan.table
        if verdict >> 32 != MORE_MEMORY:
            return False
        try:
            self.grow(table[at.END])  # first: rows of an absurd num_worst_tokens cannot be listed
            count = table[at.NUM_ROWS]
            if table[at.HANDLE] < 0 and count > self.ledger.src_room:
                self.list(self.ledger.with_room(count + count // 4))
                plan.src_room = self.ledger.src_room
        except Exception as error:
            self.error = lack_of_memory(error, plan.shape.stage, self.ledger.rank)
            if self.error is None:
                raise
            plan.head[say.ROOM] = say.NO_MEMORY
        return True

    def grow(self, wanted: int) -> None:
        """Have memory for so much as END says."""
        raise NotImplementedError


class ByExpert(Space):
    """What a dispatch by expert writes to: its results, its ledger and its lists."""

    def __init__(
        self,
        plan: Plan,
        take: Callable[[int], np.ndarray],
        ledger: WrittenLedger,
        array: np.ndarray | None = None,
    ) -> None:
        """`take` gives memory of so many bytes; `array` is what there is of it, if there is."""
        scales = plan.scales
        self._take, self.ends = take, memory.empty_like(plan.ends)
        self._widths = plan.row_bytes, 0 if scales is None else scales[0] * scales[1].itemsize
        super().__init__(plan, ledger)
        plan.table[at.ENDS] = self.ends.data_ptr()
        self._use(array)

    def list(self, ledger: WrittenLedger) -> None:
        super().list(ledger)
        table = self._plan.table
        self.lists = Lists(ledger.src_room, table[at.NUM_TOPK])
        table[at.ROW_OF], table[at.FACTORS] = self.lists.addresses

    def grow(self, wanted: int) -> None:
        if self._plan.head[say.ROOM] < wanted:
            self.renew(wanted)

    def renew(self, num_rows: int) -> None:
        """Take other memory, for so many rows."""
        self._use(None)  # so that its memory can be taken again
        self._use(self._take(self.num_bytes(num_rows)))

    def num_bytes(self, num_rows: int) -> int:
        """The most that rows and their scales take."""
        return num_rows * sum(self._widths) + LINE

    def _use(self, array: np.ndarray | None) -> None:
        self.array, table = array, self._plan.table
        room = 0 if array is None else max(0, array.nbytes - LINE) // sum(self._widths)
        self._plan.head[say.ROOM] = room
        table[at.RESULT] = 0 if array is None else array.ctypes.data
        self._scales_at = column_offsets(room, self._widths)[1]
        table[at.RESULT_SCALES] = table[at.RESULT] + self._scales_at

    def part(self, num_rows: int) -> Tensor:
        """So many of the rows that have come."""
        return rows(self.array, 0, num_rows, self._plan.shape.hidden, self._plan.shape.dtype)

    def rows(self) -> RowsByExpert:
        """The rows that have come, by expert."""
        plan, num_rows, scales = self._plan, self._plan.table[at.END], None
        if plan.scales is not None:
            scales = rows(self.array, self._scales_at, num_rows, *plan.scales)
        return RowsByExpert(self.part(num_rows), scales, self.ends, plan.per_expert.tolist())


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
        self._room = Room(self._pool)

    def dispatch(self, request: DispatchRequest) -> tuple[RowsByExpert, Handle]:
        try:
            plan, columns = self._plan(request)
            table, num_tokens, room = plan.table, plan.table[at.NUM_TOKENS], plan.table[at.ROOM]
            lent, no_memory = self._offer(plan, column_offsets(num_tokens, plan.widths)[-1])
            ledger = WrittenLedger(self._rank, self._size, num_tokens, room, plan.src_room)
            space = ByExpert(plan, self._take, ledger, self._room.offer().array)
        except Exception as error:
            self._core.reject(DISPATCH, error)
        if (
            self.begin(plan, num_tokens, num_tokens * table[at.NUM_TOPK] * plan.row_bytes)
            and lent is not None
        ):
            self._fill(columns.x, lent)
        while verdict := self._meeting.enter(plan, DISPATCH):
            if verdict >> 32 == MOVE:
                part = partial(self._kernels.take_rows, plan.address)
                in_threads(part, table[at.NUM_ROWS], table[at.END] * plan.row_bytes)
                table[at.PHASE] = at.MOVED
            elif not space.provides(verdict):
                self._meeting.refuse(
                    verdict, plan, DISPATCH, columns.topk_idx, no_memory or space.error
                )
        self._turns.give_back(lent)
        most = table[at.END] + table[at.MOST_EXPERTS] * (table[at.ALIGNMENT] - 1)
        self._room.learn(space.num_bytes(most))
        return space.rows(), handle_of(self._core, plan, space.ledger, space.lists)

    def _take(self, num_bytes: int) -> np.ndarray:
        return self._pool.take_small(num_bytes)[1]

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
            lent, no_memory = self._offer(plan, known.ledger.num_rows * plan.row_bytes)
        except Exception as error:
            core.reject(COMBINE, error)
        ledger, lists = known.ledger, known.by_expert
        assert type(ledger) is WrittenLedger
        assert type(lists) is Lists
        num_tokens, num_rows = ledger.num_tokens, ledger.num_rows
        table = plan.table
        table[at.ROW_OF], table[at.FACTORS] = lists.addresses
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
