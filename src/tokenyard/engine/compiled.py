"""Calls of few tokens: one compiled function each way, where all ranks share memory.

A dispatch or combine of a plain kind (see `CompiledCalls.dispatch`) looks up the plan of its shape,
writes a few words into the plan's table, and enters a compiled function that does the rest
(`kernels.numba.exchange`). Whatever is unusual comes back as a verdict: this module does what a
verdict asks for and enters again, or hands the call over to the engine. Both read and write the
same messages and signals, so each rank is free to take either way in every call.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard.engine.agreement import Call, Heard
from tokenyard.engine.handle import CompiledHandle, Ledger
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.engine.plans import find_placement, is_valid, tell_shape
from tokenyard.errors import SharedMemoryError
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.threads import num_threads
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.transports import Offer
from tokenyard.transports.direct import DirectTransport
from tokenyard.types import ROW_DTYPES, Config, Handle
from tokenyard.validate import SUMMABLE
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.exchange_table import GENERAL, LATE, LOW, MAP, ROOM, STRAY
from tokenyard.wire.signals import MAIL

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

_MOST_RANKS = 64  # a token's ranks are the bits of a word
_MOST_PLANS = 64
_MUCH = 8 << 20  # bytes from which several threads may move rows
_SMALL = 1 << 16  # bytes of sums that are not worth a segment
_AT_ONCE = Completion()

_Dispatched = tuple[Tensor, Tensor, Tensor, list[int], Handle]


class ExchangeKernels(Protocol):
    def exchange_dispatch(self, table: int) -> Callable[[], int]: ...

    def exchange_combine(self, dtype: torch.dtype, table: int) -> Callable[[], int]: ...


class _Plan(NamedTuple):
    """A shape's compiled call, the table that it reads, and what the table has addresses of."""

    call: Callable[[], int]
    table: array[int]
    head: np.ndarray  # the message up to its payload
    config: Config
    num_channels: int
    row_bytes: int
    combine_dtype: torch.dtype
    per_expert: np.ndarray
    src_room: list[int]  # rows of others that a ledger has room for, a number that grows
    kept: tuple[Any, ...]


class CompiledCalls:
    def __init__(
        self, engine: Engine, transport: DirectTransport, kernels: ExchangeKernels
    ) -> None:
        node = transport.node
        assert node is not None
        self._engine, self._transport, self._kernels = engine, transport, kernels
        self._node, self._pool, self._agreement = node, node.pool, engine.agreement
        self.rank, self.size = transport.rank, transport.size
        self._words = array("q", bytes(8 * at.TABLE_WORDS))
        self._words[at.RANK], self._words[at.SIZE] = self.rank, self.size
        node.mailbox.tell_calls(self._words)
        node.attached.tell_calls(self._words)
        self._plans: dict[Any, _Plan] = {}
        self.leave_at = 0  # a phase of `wire.exchange_table` at which the engine takes over

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        num_experts: Any,
        expert_alignment: Any,
        config: Config,
        tag: Any,
    ) -> _Dispatched | None:
        """A dispatch of contiguous CPU tensors that counts by itself and ends before it returns.

        None if this is another call, or one with bad input: nothing is done yet then.
        """
        if not (
            type(x) is type(topk_idx) is type(topk_weights) is Tensor
            and type(num_experts) is type(expert_alignment) is type(tag) is int
            and x.ndim == topk_idx.ndim == 2
            and topk_idx.dtype is torch.int64
            and topk_weights.dtype is torch.float32
            and x.is_cpu
            and topk_idx.is_cpu
            and topk_weights.is_cpu
            and self._engine.worker.pending is None
        ):
            return None
        num_tokens, hidden = x.shape
        shape = topk_idx.shape
        if shape[0] != num_tokens or topk_weights.shape != shape:
            return None
        if (x.requires_grad or topk_weights.requires_grad) and torch.is_grad_enabled():
            return None
        num_topk, dtype = shape[1], x.dtype
        key = dtype, hidden, num_topk, num_experts, expert_alignment, tag
        plan = self._plans.get(key)
        if plan is None or plan.config is not config:
            plan = self._plan_dispatch(*key, config)
            if plan is None:
                return None
            self._plans[key] = plan
        call, table, head, _, num_channels, row_bytes, combine_dtype, per_expert, src_room, _ = plan
        most = num_tokens * (num_topk if num_topk < self.size else self.size)
        if most * row_bytes >= _MUCH and num_threads(num_tokens, most * row_bytes) > 1:
            return None
        try:
            if not (
                x.is_contiguous() and topk_idx.is_contiguous() and topk_weights.is_contiguous()
            ):
                return None
            table[at.X] = address = x.data_ptr()
            table[at.TOPK_IDX] = ids = topk_idx.data_ptr()
            table[at.TOPK_WEIGHTS] = weights = topk_weights.data_ptr()
            if num_tokens and not (address and ids and weights):
                return None
            if x.is_neg() or topk_weights.is_neg():
                return None
        except RuntimeError:  # of tensors without memory
            return None

        number = self._agreement.number
        try:
            segment, memory = self._pool.take(self._transport.last_bytes)
        except SharedMemoryError:
            return None
        ledger = Ledger(num_tokens, most, src_room[0], self.size)
        table[at.PHASE], table[at.LEAVE_AT] = at.START, self.leave_at
        table[at.NUMBER], table[at.NUM_TOKENS] = number, num_tokens
        table[at.BLOCK] = segment.address
        head[say.OFFER : say.OFFER + 3] = segment.told
        ledger.tell(table)
        self._agreement.engaged = True
        while verdict := call():
            what, which = verdict >> 32, verdict & LOW
            if what == GENERAL and table[at.PHASE] == at.START:
                self._agreement.engaged = False
                return None
            if what == GENERAL:
                sent = ledger.send_counts(table[at.NUM_COPIES])
                block = SharedRows(memory, segment.told, segment.address)
                heard = Heard(Offer(block.told, (block,)), self._node.mailbox.last_messages(), sent)
                del block, memory
                request = DispatchRequest.plain(
                    x, topk_idx, topk_weights, num_experts, expert_alignment, config, tag
                )
                got, handle, _ = self._engine.dispatch(request, _AT_ONCE, heard=heard)
                assert got.topk_idx is not None
                assert got.topk_weights is not None
                return got.x, got.topk_idx, got.topk_weights, got.num_tokens_per_expert, handle
            if what == ROOM:
                src_room[0] = which + which // 4
                ledger = ledger.with_room(src_room[0])
                ledger.tell(table)
            else:
                self._answer(what, which, "dispatch", say.OFFER)
        self._agreement.number = number + 1
        num_rows = table[at.NUM_ROWS]
        self._transport.last_bytes = table[at.END]
        ids_at = -(-num_rows * row_bytes // 64) * 64
        weights_at = ids_at + -(-num_rows * num_topk // 8) * 64
        handle = CompiledHandle.written(
            self._engine.buffer_id,
            number,
            hidden,
            combine_dtype,
            num_channels,
            ledger,
            self.rank,
            num_rows,
            table[at.NUM_COPIES],
        )
        if num_rows == 0:
            memory = memory[:0]
        ids = np.ndarray((num_rows, num_topk), np.int64, memory, ids_at)
        weights = np.ndarray((num_rows, num_topk), np.float32, memory, weights_at)
        return (
            rows(memory, 0, num_rows, hidden, dtype),
            from_numpy(ids),
            from_numpy(weights),
            per_expert.tolist(),
            handle,
        )

    def combine(
        self, x: Any, handle: CompiledHandle, out: Any, config: Config, tag: Any
    ) -> Tensor | None:
        """A combine of a contiguous CPU tensor, without weights and biases, that ends before it
        returns; None as in `dispatch`.
        """
        num_rows, ledger = handle.num_rows, handle.ledger
        if not (
            type(x) is Tensor
            and ledger is not None
            and type(tag) is int
            and x.ndim == 2
            and x.is_cpu
            and handle.buffer_id == self._engine.buffer_id
            and self._engine.worker.pending is None
        ):
            return None
        num_tokens = ledger.num_tokens
        got_rows, hidden = x.shape
        if got_rows != num_rows or (x.requires_grad and torch.is_grad_enabled()):
            return None
        dtype = x.dtype
        key = dtype, hidden, tag
        plan = self._plans.get(key)
        if plan is None or plan.config is not config:
            plan = self._plan_combine(*key, config)
            if plan is None:
                return None
            self._plans[key] = plan
        call, table, head, _, _, row_bytes, _, _, _, _ = plan
        moved = (handle.num_copies + num_tokens) * row_bytes
        if moved >= _MUCH and num_threads(num_tokens, moved) > 1:
            return None
        try:
            if not x.is_contiguous() or x.is_neg():
                return None
            address = x.data_ptr()
            if num_rows and not address:
                return None
        except RuntimeError:
            return None
        if out is not None and not self._fits(out, x, num_tokens, hidden):
            return None
        memory, segment = None, self._pool.find(address, num_rows * row_bytes)
        begin = 0 if segment is None else address - segment.address
        try:
            if segment is None:
                segment, memory = self._pool.take(num_rows * row_bytes)
            if out is not None:
                sums = out
            elif num_tokens * row_bytes < _SMALL:
                sums = torch.empty(num_tokens, hidden, dtype=dtype)
            else:
                sums = self._pool.rows(num_tokens, hidden, dtype)
        except SharedMemoryError:
            return None
        number = self._agreement.number
        copies = memory is not None
        table[at.PHASE], table[at.LEAVE_AT] = at.START, self.leave_at
        table[at.NUMBER], table[at.NUM_TOKENS], table[at.HANDLE] = number, num_tokens, handle.call
        table[at.X], table[at.OUT] = address, sums.data_ptr()
        table[at.COPIES], table[at.BLOCK] = copies, segment.address
        head[say.OFFER : say.OFFER + 5] = not copies, *segment.told, begin
        ledger.tell(table)
        self._agreement.engaged = True
        while verdict := call():
            what, which = verdict >> 32, verdict & LOW
            if what == GENERAL and table[at.PHASE] == at.START:
                self._agreement.engaged = False
                return None
            if what == GENERAL:
                block = SharedRows(memory, segment.told, segment.address)
                words = np.array([(not copies, *block.told, begin)] * self.size, np.int64)
                heard = Heard(Offer(words, (block,)), self._node.mailbox.last_messages())
                return self._engine.combine(
                    x, handle, None, None, out, config, None, tag, _AT_ONCE, heard
                )[0]
            self._answer(what, which, "combine", say.OFFER + 1)
        self._agreement.number = number + 1
        return sums

    def _answer(self, what: int, which: int, stage: str, offer: int) -> None:
        """Do what a call that could not go on needs, or raise what it met. `offer` is where a
        message names a segment.
        """
        if what == LATE:
            self._node.mailbox.wait_for(which, f"{stage} (notify)" if which == MAIL else stage)
        elif what == MAP:
            told = self._node.mailbox.last_messages()[which, offer : offer + 3]
            self._node.attached.make_known(which, told.tolist(), stage)
        else:
            assert what == STRAY
            raise self._node.liveness.stray(which, stage)

    def _fits(self, out: Any, x: Tensor, num_tokens: int, hidden: int) -> bool:
        """Whether sums can be written there as they are."""
        if not (
            type(out) is Tensor
            and out.dtype is x.dtype
            and out.shape == (num_tokens, hidden)
            and out.is_cpu
            and not out.requires_grad
            and out.is_contiguous()
            and not out.is_neg()
        ):
            return False
        begin, first = out.data_ptr(), x.data_ptr()
        apart = first >= begin + out.nbytes or begin >= first + x.nbytes
        return apart and (begin != 0 or not num_tokens)

    def _plan_dispatch(
        self,
        dtype: torch.dtype,
        hidden: int,
        num_topk: int,
        num_experts: int,
        expert_alignment: int,
        tag: int,
        config: Config,
    ) -> _Plan | None:
        """None for a shape that only the engine can make calls of, or that is wrong."""
        placement = find_placement(self._engine, num_experts, expert_alignment, config, tag)
        if placement is None:
            return None
        payload = 1 + placement.most_experts + self.size
        if dtype not in ROW_DTYPES or min(hidden, num_topk) < 1 or payload > say.PAYLOAD_WORDS:
            return None
        more = {"num_topk": num_topk, "num_experts": num_experts, "tag": tag}
        buffer = self._agreement.buffer_id
        call = Call.of_shape("dispatch", dtype, hidden, config, buffer=buffer, **more)
        row_bytes = hidden * dtype.itemsize
        table, head, kept = self._table(call, row_bytes, num_experts)
        per_expert, more_kept = tell_shape(table, placement, self.rank, num_topk, expert_alignment)
        compiled = self._kernels.exchange_dispatch(table.buffer_info()[0])
        kept = *kept, *more_kept
        return _Plan(
            compiled,
            table,
            head,
            config,
            config.num_channels,
            row_bytes,
            dtype if dtype in SUMMABLE else torch.bfloat16,
            per_expert,
            [0],
            kept,
        )

    def _plan_combine(
        self, dtype: torch.dtype, hidden: int, tag: int, config: Config
    ) -> _Plan | None:
        if dtype not in SUMMABLE or hidden < 1 or not is_valid(self._engine, config, tag):
            return None
        buffer = self._agreement.buffer_id
        call = Call.of_shape("combine", dtype, hidden, config, buffer=buffer, tag=tag)
        row_bytes = hidden * dtype.itemsize
        table, head, kept = self._table(call, row_bytes, 0)
        compiled = self._kernels.exchange_combine(dtype, table.buffer_info()[0])
        return _Plan(compiled, table, head, config, 0, row_bytes, dtype, np.zeros(0), [0], kept)

    def _table(
        self, call: Call, row_bytes: int, num_experts: int
    ) -> tuple[array[int], np.ndarray, tuple[Any, ...]]:
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        table = array("q", self._words)
        head = np.zeros(say.PAYLOAD, np.int64)
        head[say.CALL : say.TOKENS] = call
        scratch = np.zeros(at.scratch_words(self.size, num_experts), np.int64)
        table[at.HEAD], table[at.SCRATCH] = head.ctypes.data, scratch.ctypes.data
        table[at.ROW_BYTES] = row_bytes
        return table, head, (scratch,)


def compiled_calls(engine: Engine, kernels: Any) -> CompiledCalls | None:
    """The compiled calls of an engine, if its transport and its kernels have them.

    TOKENYARD_COMPILED_CALLS=0 leaves them out: to compare, or to find out where a fault is.
    """
    transport = engine.transport
    if (
        not isinstance(transport, DirectTransport)
        or not hasattr(kernels, "exchange_dispatch")
        or transport.size > _MOST_RANKS
        or engine.topology.num_nodes > 1
        or os.environ.get("TOKENYARD_COMPILED_CALLS") == "0"
    ):
        return None
    return CompiledCalls(engine, transport, kernels)
