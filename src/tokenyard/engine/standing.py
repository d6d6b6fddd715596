"""Prepared calls between ranks that share memory: one compiled call each way, over a table that
stays.

A call checks its tensors, writes a few words, and enters. Rows arrive in two blocks, used in turn.
Both are as large as they can ever have to be, so no call needs more memory than it has; rows by
expert, of which one rank can get very many, take more when they need it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, is_grad_enabled

from tokenyard import validate
from tokenyard.engine.agreement import Call, Heard, Terms
from tokenyard.engine.compiled import CompiledCalls
from tokenyard.engine.inputs import SMALL
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.parcels import Lists
from tokenyard.engine.prepared import OrdinaryPair, PreparedRows, Shape, nothing_dispatched
from tokenyard.engine.shapes import tell_shape
from tokenyard.errors import SharedMemoryError
from tokenyard.runtime import memory as local_memory
from tokenyard.shm.pool import SegmentPool, rows
from tokenyard.shm.segment import Segment
from tokenyard.transports import Offer
from tokenyard.wire import exchange_table as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire.columns import column_offsets
from tokenyard.wire.verdicts import GENERAL, LOW, MORE_MEMORY, MORE_ROOM, MUCH

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

_int64, _float32 = torch.int64, torch.float32


class _Turn:
    """What every other dispatch by source brings: a block that other ranks write to."""

    def __init__(self, pool: SegmentPool, shape: Shape, most_rows: int, num_local: int) -> None:
        self._widths = shape.row_bytes, 8 * shape.num_topk, 4 * shape.num_topk, 4
        self._num_topk = shape.num_topk
        self.segment, self._array = pool.take(column_offsets(most_rows, self._widths)[-1])
        self._seen = self.x = rows(self._array, 0, most_rows, shape.hidden, shape.dtype)
        self.counts = np.asarray(int64s.new(num_local))
        self.counts_at = self.counts.ctypes.data

    def rows(self, num_rows: int) -> Tensor:
        """The first rows, in a tensor of the caller's own."""
        if self._seen.shape[0] != num_rows:
            self._seen = self.x[:num_rows]
        return self._seen.detach()  # a third of the time of a slice

    def per_expert(self) -> list[int]:
        return self.counts.tolist()

    def offsets(self) -> None:
        return None

    def topk_idx(self, num_rows: int) -> Tensor:
        begin = column_offsets(num_rows, self._widths)[1]
        return rows(self._array, begin, num_rows, self._num_topk, torch.int64)

    def topk_weights(self, num_rows: int) -> Tensor:
        begin = column_offsets(num_rows, self._widths)[2]
        return rows(self._array, begin, num_rows, self._num_topk, torch.float32)


class _TurnByExpert:
    """What every other dispatch by expert brings."""

    def __init__(self, shape: Shape, num_local: int) -> None:
        self._seen = self.x = local_memory.empty(0, shape.hidden, dtype=shape.dtype)
        self.counts = np.asarray(int64s.new(num_local))
        self.counts_at = self.counts.ctypes.data
        self._ends = torch.zeros(num_local, dtype=torch.int32, device="cpu")
        self.ends_at = self._ends.data_ptr()

    def grow(self, num_rows: int) -> None:
        """Make room for so many rows, and some more, so that room is soon large enough."""
        _, hidden = self.x.shape
        with torch.inference_mode(False):  # the next rows may be used outside of it
            self.x = local_memory.empty(num_rows + num_rows // 4, hidden, dtype=self.x.dtype)
        self._seen = self.x

    def rows(self, num_rows: int) -> Tensor:
        """The first rows, in a tensor of the caller's own."""
        if self._seen.shape[0] != num_rows:
            self._seen = self.x[:num_rows]
        return self._seen.detach()

    def per_expert(self) -> list[int]:
        return self.counts.tolist()

    def offsets(self) -> Tensor:
        return self._ends.detach()

    def topk_idx(self, num_rows: int) -> None:
        return None

    def topk_weights(self, num_rows: int) -> None:
        return None


class StandingPair:
    """What both layouts have in common: tables, tensors, verdicts."""

    def __init__(self, engine: Engine, compiled: CompiledCalls, shape: Shape) -> None:
        node = engine.transport.node
        assert node is not None
        self._engine, self._compiled, self._shape = engine, compiled, shape
        self._node, self._agreement = node, engine.agreement
        self._dispatch_stage, self._combine_stage = shape.stages
        self._worker, self._choice = engine.worker, engine.local.choice
        self._dtype, self._hidden, self._num_topk = shape.dtype, shape.hidden, shape.num_topk
        self._max_tokens = shape.max_tokens
        self._num_rows = -1  # of the last dispatch; -1: there was none
        self._number = 0  # of the last dispatch
        self._turn = 0
        self._given: tuple[Tensor, ...] = ()  # to a dispatch that has not ended
        self._back_told = 0, 0, 0, 0
        size = engine.num_ranks
        placement = engine.local.placement(shape.num_experts)
        self._most_rows = size * shape.max_tokens
        most_copies = shape.max_tokens * min(shape.num_topk, size)
        self._ledger = WrittenLedger(
            engine.rank, size, shape.max_tokens, most_copies, self._most_rows
        )
        self._load = engine.statistics.load(
            placement.num_experts, len(placement.experts_of_rank[engine.rank])
        )
        # Blocks of rows by source must have room for what any rank may send; parcels need none.
        more = {"num_max": 0 if shape.by_expert else shape.max_tokens}
        more |= {"num_topk": shape.num_topk, "num_experts": placement.num_experts}
        self._calls = self._call(self._dispatch_stage, **more), self._call(self._combine_stage)
        self._table, self._head, scratch = compiled.table(
            self._calls[0], shape.row_bytes, placement.num_experts
        )
        self._back, self._back_head, back_scratch = compiled.table(
            self._calls[1], shape.row_bytes, 0
        )
        counts, kept = tell_shape(
            self._table, placement, engine.rank, shape.num_topk, shape.expert_alignment
        )
        self._num_local = len(counts)
        terms = int64s.new(2 * shape.num_topk)
        for table, stage in zip((self._table, self._back), shape.stages):
            table[at.LEDGER], table[at.ROOM] = self._ledger.address, self._ledger.room
            table[at.SRC_ROOM], table[at.NUM_TOPK] = self._most_rows, shape.num_topk
            table[at.COUNTERS] = engine.statistics.address(stage)
            table[at.TERMS] = int64s.address(terms)
        self._table[at.LOAD] = self._load.ctypes.data
        self._kept = scratch, back_scratch, kept, terms
        self._sum = compiled.kernels.exchange_combine(shape.dtype, int64s.address(self._back))
        self._like = local_memory.empty(0, shape.hidden, dtype=shape.dtype)
        self._block: tuple[Segment, np.ndarray] | None = None  # of a combine

    def _call(self, stage: str, **more: int) -> Call:
        shape, buffer = self._shape, self._agreement.buffer_id
        return Call.of_shape(stage, shape.dtype, shape.hidden, shape.config, buffer=buffer, **more)

    def _tell_input(self, x: Any, topk_idx: Any, topk_weights: Any) -> None:
        """Write where the tensors of a dispatch lie, and keep them until it ends. Whatever is not
        plain goes through the checks of every dispatch, which copy it if need be.
        """
        self._given = x, topk_idx, topk_weights
        if self._choice is None and self._worker.pending is None and self._tell(*self._given):
            return
        try:
            self._worker.drain()
            validate.require(topk_idx is not None, "topk_idx is None, want a torch.Tensor")
            self._shape.check(x, topk_idx)
            request = self._shape.request(x, topk_idx, topk_weights)
            out = self._engine.local.dispatch(request)
            assert out.topk_idx is not None
            assert out.topk_weights is not None
            self._given = out.x.detach(), out.topk_idx, out.topk_weights.detach()
        except ValueError as error:
            self._agreement.reject(self._dispatch_stage, error)
        plain = self._tell(*self._given)
        assert plain

    def _tell(self, x: Any, topk_idx: Any, topk_weights: Any) -> bool:
        """Write where plain tensors lie; False if they are not: contiguous, on CPU, of the dtypes
        and sizes that were prepared, with values as they are in memory, and without a graph.
        """
        try:
            if not (
                type(x) is type(topk_idx) is type(topk_weights) is Tensor
                and x.dtype is self._dtype
                and topk_idx.dtype is _int64
                and topk_weights.dtype is _float32
                and x.is_contiguous()
                and topk_idx.is_contiguous()
                and topk_weights.is_contiguous()
                and x.is_cpu
                and topk_idx.is_cpu
                and topk_weights.is_cpu
                and not (x.is_neg() or topk_weights.is_neg())
                and not ((x.requires_grad or topk_weights.requires_grad) and is_grad_enabled())
            ):
                return False
            shape = topk_idx.shape
            if topk_weights.shape != shape or len(shape) != 2 or shape[1] != self._num_topk:
                return False
            num_tokens = shape[0]
            if num_tokens > self._max_tokens or x.shape != (num_tokens, self._hidden):
                return False
            table, at_x = self._table, x.data_ptr()
            table[at.X], table[at.TOPK_IDX] = at_x, topk_idx.data_ptr()
            table[at.TOPK_WEIGHTS], table[at.NUM_TOKENS] = topk_weights.data_ptr(), num_tokens
            return at_x != 0 or num_tokens == 0
        except RuntimeError:  # of tensors without memory
            return False

    def _make(self, kernel: Callable[[], int], table: array[int], which: int, offer: int) -> bool:
        """Enter a call until it has ended; False if there is too much for it. `offer` is where a
        message names a segment.
        """
        agreement = self._agreement
        table[at.PHASE], table[at.NUMBER] = at.START, agreement.number
        agreement.engaged = True
        while verdict := kernel():
            what, rank = verdict >> 32, verdict & LOW
            if what == MORE_MEMORY:
                self._grow()
            elif what == MORE_ROOM:
                self._list(rank + rank // 4)
            elif what == MUCH:
                agreement.engaged = False
                return False
            elif what != GENERAL:
                self._compiled.answer(what, rank, self._shape.stages[which], offer)
            elif table[at.PHASE] == at.START:
                agreement.engaged = False
                self._refuse_experts()
            else:
                self._differs(which, rank)
        agreement.number += 1
        return True

    def _grow(self) -> None:
        raise AssertionError("only rows by expert grow")

    def _list(self, num_rows: int) -> None:
        raise AssertionError("no more rows by source can come than there is room for")

    def _refuse_experts(self) -> NoReturn:
        """An id is no expert's: this rank raises that, the others PeerInputError."""
        ids, shape = self._given[1], self._shape
        placement = self._engine.local.placement(shape.num_experts)
        bad = (ids < -1) | (ids >= placement.num_experts)
        error = validate.bad_expert(ids, int(bad.flatten().nonzero()[0]), placement.num_experts)
        self._agreement.reject(self._dispatch_stage, error)

    def _differs(self, which: int, rank: int) -> NoReturn:
        """Ranks make different calls, or one was given bad input: raise what it is. Else this rank
        has told what cannot be.
        """
        call = self._calls[which]
        if which:
            call = call._replace(handle=self._number)
        heard = Heard(Offer(), self._node.mailbox.last_messages())
        self._agreement.meet(self._shape.stages[which], Terms(call), heard)
        raise self._node.liveness.stray(rank, self._shape.stages[which])

    def combine(self, y: Any, weigh: Any, out: Any) -> Tensor:
        engine, shape, table = self._engine, self._shape, self._back
        stage, num_tokens = self._combine_stage, self._table[at.NUM_TOKENS]
        try:
            if engine.worker.pending is not None:
                engine.worker.drain()
            if self._num_rows < 0:
                raise nothing_dispatched()
            wanted = self._num_rows, shape.hidden
            address = _address(y, wanted, shape.dtype)
            if not address:
                y = validate.rows(
                    "y", y, num_rows=wanted[0], dtypes=(shape.dtype,), device=engine.device
                ).detach()
                if y.shape[1] != shape.hidden:
                    raise ValueError(f"y has hidden {y.shape[1]}, want {shape.hidden}")
                address = _address(y, wanted, shape.dtype)
            if weigh is not True:
                validate.switch("weigh", weigh)
            if out is None:
                out = self._empty_sums(num_tokens)
            elif not self._compiled.fits(out, y, num_tokens, shape.hidden):
                out = validate.out(out, num_tokens, y, [y])
            self._offer(address)
        except (ValueError, SharedMemoryError) as error:
            self._agreement.reject(stage, error)
        table[at.NUM_TOKENS], table[at.OUT] = num_tokens, out.data_ptr()
        table[at.HANDLE], table[at.WEIGH] = self._number, weigh
        self._make(self._sum, table, 1, say.OFFER + 1)
        return out

    def _offer(self, address: int) -> None:
        """Write where the rows of a combine lie, and where others read them."""
        raise NotImplementedError

    def _tell_block(self, num_rows: int) -> None:
        """Offer memory for so many rows of a combine."""
        num_bytes = num_rows * self._shape.row_bytes
        if self._block is None or self._block[0].size < num_bytes:
            self._block = None  # so that its memory can be taken again
            self._block = self._node.pool.take(num_bytes + num_bytes // 4)
            self._back[at.BLOCK] = self._block[0].address
            self._back_told = *self._block[0].told, 0
        head = self._back_head
        head[say.OFFER + 1], head[say.OFFER + 2], head[say.OFFER + 3], head[say.OFFER + 4] = (
            self._back_told
        )

    def _empty_sums(self, num_tokens: int) -> Tensor:
        shape = self._shape
        if num_tokens * shape.row_bytes >= SMALL:
            return self._node.pool.rows(num_tokens, shape.hidden, shape.dtype)
        if self._like.shape[0] != num_tokens:
            self._like = local_memory.empty(num_tokens, shape.hidden, dtype=shape.dtype)
        return local_memory.empty_like(self._like)


class PairBySource(StandingPair):
    def __init__(self, engine: Engine, compiled: CompiledCalls, shape: Shape) -> None:
        super().__init__(engine, compiled, shape)
        pool, most = self._node.pool, self._most_rows
        self._turns = [_Turn(pool, shape, most, self._num_local) for _ in range(2)]
        self._kernel = compiled.kernels.exchange_dispatch(int64s.address(self._table))

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> PreparedRows:
        self._tell_input(x, topk_idx, topk_weights)
        self._turn = 1 - self._turn
        turn, table, head = self._turns[self._turn], self._table, self._head
        table[at.BLOCK], table[at.PER_EXPERT] = turn.segment.address, turn.counts_at
        head[say.OFFER], head[say.OFFER + 1], head[say.OFFER + 2] = turn.segment.told
        number = self._agreement.number
        self._make(self._kernel, table, 0, say.OFFER)
        self._given, self._number = (), number
        self._num_rows = num_rows = table[at.NUM_ROWS]
        return PreparedRows(turn.rows(num_rows), turn)

    def _offer(self, address: int) -> None:
        segment = self._turns[self._turn].segment
        begin = address - segment.address
        table, head = self._back, self._back_head
        table[at.X] = address
        table[at.COPIES] = copies = not 0 <= begin < segment.size
        head[say.OFFER] = not copies
        if copies:
            self._tell_block(self._num_rows)
            return
        head[say.OFFER + 1], head[say.OFFER + 2], head[say.OFFER + 3] = segment.told
        head[say.OFFER + 4] = begin


class PairByExpert(StandingPair):
    """Its calls are those of `engine.parcels`, which other ranks may make in their stead."""

    def __init__(self, engine: Engine, compiled: CompiledCalls, shape: Shape) -> None:
        super().__init__(engine, compiled, shape)
        self._turns = [_TurnByExpert(shape, self._num_local) for _ in range(2)]
        self._parcels, self._plans = compiled.by_expert.parcels, compiled.plans
        self._widths = 8 * shape.num_topk, 4 * shape.num_topk, shape.row_bytes
        self._kernel = compiled.kernels.exchange_by_expert(int64s.address(self._table))
        self._list(self._most_rows)
        self._back_head[say.OFFER] = 1  # shares can be read when they are offered
        self._much: OrdinaryPair | None = None  # by which a large dispatch has gone

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> PreparedRows:
        self._tell_input(x, topk_idx, topk_weights)
        self._turn = 1 - self._turn
        turn, table = self._turns[self._turn], self._table
        table[at.MUCH_FROM] = self._plans.much_from
        try:
            num_bytes = column_offsets(table[at.NUM_TOKENS], self._widths)[-1]
            self._parcels.offer(num_bytes, table, self._head)
        except SharedMemoryError as error:
            self._agreement.reject(self._dispatch_stage, error)
        table[at.PER_EXPERT], table[at.ENDS] = turn.counts_at, turn.ends_at
        table[at.RESULT], table[at.RESULT_BYTES] = turn.x.data_ptr(), turn.x.nbytes
        number, self._much = self._agreement.number, None
        if not self._make(self._kernel, table, 0, say.OFFER):
            self._much = OrdinaryPair(self._engine, self._shape)
            return self._much.dispatch_much(x, topk_idx, topk_weights)
        self._parcels.were_read()
        self._given, self._number = (), number
        self._num_rows = num_rows = table[at.END]
        return PreparedRows(turn.rows(num_rows), turn)

    def combine(self, y: Any, weigh: Any, out: Any) -> Tensor:
        if self._much is not None:
            return self._much.combine(y, weigh, out)
        return super().combine(y, weigh, out)

    def _list(self, num_rows: int) -> None:
        """Make room to list so many rows. Ranks may have prepared for other numbers of tokens."""
        self._ledger = self._ledger.with_room(num_rows)
        self._lists = Lists(num_rows, self._num_topk)
        for table in (self._table, self._back):
            table[at.LEDGER], table[at.SRC_ROOM] = self._ledger.address, num_rows
            table[at.ROW_OF] = self._lists.row_of_at
            table[at.FACTORS] = self._lists.weights_at

    def _grow(self) -> None:
        turn, table = self._turns[self._turn], self._table
        turn.grow(table[at.END])
        table[at.RESULT], table[at.RESULT_BYTES] = turn.x.data_ptr(), turn.x.nbytes

    def _offer(self, address: int) -> None:
        table = self._back
        table[at.NUM_ROWS] = num_rows = self._table[at.NUM_ROWS]
        table[at.Y] = address
        self._tell_block(num_rows)


def _address(x: Any, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Where a plain CPU tensor of this shape lies: contiguous, with values as they are in memory,
    and without a graph. 0 if it is not plain, something else if it has no elements.
    """
    try:
        if not (
            type(x) is Tensor
            and x.dtype is dtype
            and x.shape == shape
            and x.is_cpu
            and not (x.requires_grad and is_grad_enabled())
            and x.is_contiguous()
            and not x.is_neg()
        ):
            return 0
        return x.data_ptr() if shape[0] else 1
    except RuntimeError:  # of tensors without memory
        return 0
