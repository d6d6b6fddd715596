"""Few rows by expert, in one compiled call each way, where all ranks share memory.

A rank fills a parcel with its tokens, and every rank takes its experts' rows from the parcels of
all, straight to their places (`kernels.numba.exchange.by_expert`). Where there is more than parcels
are for, all ranks find that out together, from the same numbers, and nothing has moved yet. Sums
come back as each rank's shares, which the combine sums first.
"""

from __future__ import annotations

import weakref
from array import array
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Heard, Terms
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.plans import BY_EXPERT, ByParcels, Plan
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.threads import num_threads
from tokenyard.shm.pool import SegmentPool, rows
from tokenyard.shm.segment import Segment
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.transports import Offer
from tokenyard.types import Config
from tokenyard.validate import NOT_PLAIN, lies_at
from tokenyard.wire import exchange_table as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets
from tokenyard.wire.signals import READ
from tokenyard.wire.verdicts import LOW, MORE_MEMORY, MORE_ROOM, MUCH

if TYPE_CHECKING:
    from tokenyard.engine.compiled import CompiledCalls
    from tokenyard.engine.stages import Engine

COMBINE = "combine by expert"
_LEAVING = 5.0  # seconds that a rank waits for others to read its last parcel


class Parcels:
    """The memory of a Buffer's parcels: two blocks, used in turn. A rank has read the parcels of a
    dispatch when it posts its next message, so a block is free again two dispatches later.

    A dispatch that tells of a block for the first time ends when all ranks have read it. So they
    have mapped it even if this rank ends right afterwards.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self._pool, self._turn = pool, 0
        self._blocks: list[tuple[Segment, np.ndarray] | None] = [None, None]
        self._known = [False, False]  # to all ranks

    @property
    def are_used(self) -> bool:
        return self._blocks != [None, None]

    def offer(self, num_bytes: int, table: array[int], head: array[int]) -> None:
        """Write where the next parcel of a call is, for this rank and for the others. Raises
        SharedMemoryError.
        """
        self._turn = turn = 1 - self._turn
        block = self._blocks[turn]
        if block is None or block[0].size < num_bytes:
            self._blocks[turn] = block = None  # so that its memory can be taken again
            self._blocks[turn] = block = self._pool.take(num_bytes)
            self._known[turn] = False
        table[at.FIRST], table[at.BLOCK] = not self._known[turn], block[0].address
        head[say.OFFER], head[say.OFFER + 1], head[say.OFFER + 2] = block[0].told

    def were_read(self) -> None:
        """The call has ended."""
        self._known[self._turn] = True


class Lists:
    """What a dispatch by parcels knows of its pairs: `types.KnownPairs`, written by compiled code.

    Its memory holds the row of each pair that came, int64, and then the weights, float32.
    """

    sent = None  # no rank has written another's rows
    num_rows = num_came = 0  # M, and N: known once all is written

    def __init__(self, room: int, num_topk: int) -> None:
        """With room for the pairs of so many rows."""
        pairs = room * num_topk
        self._memory = int64s.new(pairs + pairs // 2 + 1)
        self.num_topk, self._pairs = num_topk, pairs
        self.row_of_at = int64s.address(self._memory)
        self.weights_at = self.row_of_at + 8 * pairs

    @cached_property
    def row_of(self) -> Tensor:
        return self._part(torch.int64, 0)

    @cached_property
    def topk_weights(self) -> Tensor:
        return self._part(torch.float32, 8 * self._pairs)

    def _part(self, dtype: torch.dtype, begin: int) -> Tensor:
        came = torch.frombuffer(self._memory, dtype=torch.uint8)[begin:].view(dtype)
        return came[: self.num_came * self.num_topk].view(self.num_came, self.num_topk)


class RowsByExpert(NamedTuple):
    """What dispatch_by_expert brings to one rank: M rows by (local expert, source rank, token)."""

    x: Tensor  # [M, D]
    scales: Tensor | None  # [M, S]; FP8 only
    offsets: Tensor  # [L] int32, the end of each expert's rows with their padding
    num_tokens_per_expert: list[int]  # L, padding included


class _Given(NamedTuple):
    """The tensors of a dispatch: contiguous, checked or plain."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor


class CallsByExpert:
    def __init__(self, engine: Engine, compiled: CompiledCalls) -> None:
        node = engine.transport.node
        assert node is not None
        # Weakly, since they hold this: a closed Buffer gives back its memory without a collector.
        self._compiled: CompiledCalls = weakref.proxy(compiled)
        self._engine, self._node = engine, node
        self._agreement, self._pool = engine.agreement, node.pool
        self.parcels = Parcels(node.pool)
        engine.wait_to_leave = self.wait_to_leave

    def wait_to_leave(self) -> None:
        """Before this rank unmakes its parcels: wait until all ranks have read the last ones."""
        if self.parcels.are_used:
            mailbox = self._node.mailbox
            mailbox.meet_soon(READ, mailbox.epochs[READ], _LEAVING)

    def dispatch(self, request: DispatchRequest) -> tuple[RowsByExpert, Handle] | None:
        """None if there is much to move: on all ranks."""
        try:
            given = self._plain(request) or self._checked(request)
            plan = self._plan(given, request)
            num_tokens, num_topk = given.topk_idx.shape
            plan.table[at.MUCH_FROM] = self._compiled.plans.much_from
            self.parcels.offer(self._parcel_bytes(given, plan), plan.table, plan.head)
            most = num_tokens * min(num_topk, self._compiled.size)
            ledger = self._ledger(num_tokens, most, plan.src_room[0])
            lists = Lists(ledger.src_room, num_topk)
        except Exception as error:
            self._agreement.reject(BY_EXPERT, error)
        table = plan.table
        table[at.X], table[at.TOPK_IDX] = given.x.data_ptr(), given.topk_idx.data_ptr()
        table[at.TOPK_WEIGHTS], table[at.NUM_TOKENS] = given.topk_weights.data_ptr(), num_tokens
        table[at.SCALES] = 0 if given.scales is None else given.scales.data_ptr()
        table[at.PHASE], table[at.NUMBER] = at.START, self._agreement.number
        table[at.ROOM], table[at.RESULT_BYTES] = most, 0
        ends = torch.empty(len(plan.per_expert), dtype=torch.int32, device="cpu")
        table[at.ENDS] = ends.data_ptr()
        results: tuple[Tensor, Tensor | None] | None = None
        self._tell(plan, ledger, lists)
        while verdict := self._compiled.enter(plan, BY_EXPERT, say.OFFER):
            what = verdict >> 32
            if what == MORE_ROOM:
                plan.src_room[0] = (verdict & LOW) + (verdict & LOW) // 4
                ledger = ledger.with_room(plan.src_room[0])
                lists = Lists(ledger.src_room, num_topk)
                self._tell(plan, ledger, lists)
            elif what == MORE_MEMORY:
                results = self._results(plan, given)
            elif what == MUCH:
                self._agreement.engaged = False
                return None
            else:
                self._differs(plan, given, request)
        self.parcels.were_read()
        return self._dispatched(plan, given, ledger, lists, ends, results)

    def _plain(self, request: DispatchRequest) -> _Given | None:
        """The tensors as they were given, if nothing needs to be done to them."""
        x, topk_idx, topk_weights = request.x, request.topk_idx, request.topk_weights
        engine = self._engine
        if (
            engine.worker.pending is not None
            or lies_at(x, 2) == NOT_PLAIN
            or lies_at(topk_idx, 2, torch.int64) == NOT_PLAIN
            or lies_at(topk_weights, 2, torch.float32) == NOT_PLAIN
            or not type(request.num_experts) is type(request.expert_alignment) is int
            or type(request.tag) is not int
        ):
            return None
        shape = topk_idx.shape
        if shape[0] != x.shape[0] or topk_weights.shape != shape or not (x.shape[1] and shape[1]):
            return None
        if engine.local.choice is not None:
            topk_idx = engine.local.choice(topk_idx)
        return _Given(x, None, topk_idx, topk_weights)

    def _checked(self, request: DispatchRequest) -> _Given:
        self._engine.worker.drain()
        validate.require(request.topk_idx is not None, "topk_idx is None, want a torch.Tensor")
        out = self._engine.local.dispatch(request)
        assert out.topk_idx is not None
        assert out.topk_weights is not None
        return _Given(out.x, out.scales, out.topk_idx, out.topk_weights)

    def _plan(self, given: _Given, request: DispatchRequest) -> Plan:
        """Raises ValueError if something is wrong with the shape."""
        scales = None if given.scales is None else (given.scales.shape[1], given.scales.dtype)
        return self._compiled.plans.by_expert(
            ByParcels(
                given.x.dtype,
                given.x.shape[1],
                given.topk_idx.shape[1],
                request.num_experts,
                request.expert_alignment,
                request.tag,
                scales,
            ),
            request.config,
        )

    def _parcel_bytes(self, given: _Given, plan: Plan) -> int:
        num_tokens, num_topk = given.topk_idx.shape
        if num_tokens * num_topk * plan.row_bytes >= plan.table[at.MUCH_FROM]:
            return 0
        widths = 8 * num_topk, 4 * num_topk, plan.row_bytes, plan.table[at.SCALE_BYTES]
        return column_offsets(num_tokens, widths)[-1]

    def _ledger(self, num_tokens: int, room: int, src_room: int) -> WrittenLedger:
        compiled = self._compiled
        return WrittenLedger(compiled.rank, compiled.size, num_tokens, room, src_room)

    @staticmethod
    def _tell(plan: Plan, ledger: WrittenLedger, lists: Lists) -> None:
        table = plan.table
        table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room
        table[at.ROW_OF], table[at.FACTORS] = lists.row_of_at, lists.weights_at

    def _results(self, plan: Plan, given: _Given) -> tuple[Tensor, Tensor | None]:
        """Memory for the rows that come, now that their number is known."""
        table, hidden = plan.table, given.x.shape[1]
        num_rows, scales = table[at.END], given.scales
        x = self._engine.transport.empty(num_rows, hidden, given.x.dtype)
        table[at.RESULT], table[at.RESULT_BYTES] = x.data_ptr(), num_rows * plan.row_bytes
        if scales is None:
            return x, None
        came = self._engine.transport.empty(num_rows, scales.shape[1], scales.dtype)
        table[at.RESULT_SCALES] = came.data_ptr()
        return x, came

    def _differs(self, plan: Plan, given: _Given, request: DispatchRequest) -> None:
        """Calls differ, or some rank was given bad input: raise what it is."""
        if not self._agreement.engaged:  # an id of this rank is no expert's
            num_experts = plan.table[at.NUM_EXPERTS]
            bad = (given.topk_idx < -1) | (given.topk_idx >= num_experts)
            first = int(bad.flatten().nonzero()[0])
            error = validate.bad_expert(given.topk_idx, first, num_experts)
            self._agreement.reject(BY_EXPERT, error)
        heard = Heard(Offer(), self._node.mailbox.last_messages())
        self._agreement.meet(BY_EXPERT, Terms(plan.told), heard)
        raise AssertionError("calls that differ raise")

    def _dispatched(
        self,
        plan: Plan,
        given: _Given,
        ledger: WrittenLedger,
        lists: Lists,
        ends: Tensor,
        results: tuple[Tensor, Tensor | None] | None,
    ) -> tuple[RowsByExpert, Handle]:
        table, per_expert = plan.table, plan.per_expert.tolist()
        ledger.num_rows, ledger.num_copies = table[at.NUM_ROWS], table[at.NUM_COPIES]
        if results is None:
            results = self._results(plan, given)
        lists.num_rows, lists.num_came = table[at.END], ledger.num_rows
        handle = Handle(
            self._engine.origin,
            table[at.NUMBER],
            given.x.shape[1],
            plan.combine_dtype,
            plan.num_channels,
            ledger,
            None,
            lists,
        )
        return RowsByExpert(*results, ends, per_expert), handle

    def combine(
        self, y: Any, handle: Handle, weigh: Any, out: Any, config: Config, tag: Any
    ) -> Tensor | None:
        """The sums of plain rows; None if this is another call, or one with bad input."""
        by_expert, ledger, compiled = handle.by_expert, handle.ledger, self._compiled
        y_at = lies_at(y, 2)
        if not (
            type(by_expert) is Lists
            and type(ledger) is WrittenLedger
            and handle.origin is self._engine.origin
            and y_at != NOT_PLAIN
            and type(weigh) is bool
            and type(tag) is int
            and self._engine.worker.pending is None
        ):
            return None
        num_rows, hidden = y.shape
        if num_rows != by_expert.num_rows:
            return None
        plan = compiled.plans.find_combine((y.dtype, hidden, tag, COMBINE), config)
        num_tokens = ledger.num_tokens
        if plan is None or (out is not None and not compiled.fits(out, y, num_tokens, hidden)):
            return None
        moved = (num_rows + num_tokens) * plan.row_bytes
        if num_threads(num_tokens, moved) > 1:
            return None
        table, head = plan.table, plan.head
        table[at.NUM_TOKENS] = num_tokens
        try:
            segment, memory = self._pool.take_small(ledger.num_rows * plan.row_bytes)
            sums = compiled.sums_of(plan, y) if out is None else out
        except SharedMemoryError:
            return None
        table[at.Y], table[at.WEIGH] = y_at, weigh
        table[at.ROW_OF], table[at.FACTORS] = by_expert.row_of_at, by_expert.weights_at
        table[at.NUM_ROWS], table[at.NUM_TOPK] = by_expert.num_came, by_expert.num_topk
        table[at.TERMS] = compiled.plans.terms(by_expert.num_topk)
        table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
        table[at.HANDLE], table[at.NUMBER] = handle.call, self._agreement.number
        table[at.PHASE], table[at.COPIES] = at.START, 0
        table[at.OUT], table[at.BLOCK] = sums.data_ptr(), segment.address
        head[say.OFFER], head[say.OFFER + 4] = 1, 0
        head[say.OFFER + 1], head[say.OFFER + 2], head[say.OFFER + 3] = segment.told
        if compiled.enter(plan, COMBINE, say.OFFER + 1):
            # Calls differ, or a rank has no memory: the engine finds out which.
            share = rows(memory, 0, ledger.num_rows, hidden, y.dtype)
            told = np.array([(1, *segment.told, 0)] * compiled.size, np.int64)
            offer = Offer(told, (SharedRows(None, segment.told, segment.address),))
            heard = Heard(offer, self._node.mailbox.last_messages())
            more = out, config, None, tag, Completion(), heard, COMBINE
            return self._engine.combine(share, handle, None, None, *more)[0]
        return sums
