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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Call, Heard
from tokenyard.engine.inputs import SMALL, DispatchRequest
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.parcels import CallsByExpert
from tokenyard.engine.plans import ExchangeKernels, Plan, Plans
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.runtime import memory as local_memory
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.threads import num_threads
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.transports import Offer
from tokenyard.transports.direct import DirectTransport
from tokenyard.types import Config, round_up
from tokenyard.validate import NOT_PLAIN, lies_at
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.columns import LINE
from tokenyard.wire.signals import MAIL
from tokenyard.wire.verdicts import (
    DONE,
    GENERAL,
    LATE,
    LOW,
    MAP,
    MORE_MEMORY,
    MORE_ROOM,
    MUCH,
    STRAY,
)

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

_MOST_RANKS = 64  # a token's ranks are the bits of a word
_AT_ONCE = Completion()

_Dispatched = tuple[Tensor, Tensor, Tensor, list[int], Handle]


class CompiledCalls:
    def __init__(
        self, engine: Engine, transport: DirectTransport, kernels: ExchangeKernels
    ) -> None:
        node = transport.node
        assert node is not None
        self._engine, self._transport, self.kernels = engine, transport, kernels
        self._node, self._pool, self._agreement = node, node.pool, engine.agreement
        self._take, self._room = node.pool.take_small, transport.room
        self.rank, self.size = transport.rank, transport.size
        self.plans = Plans(engine, transport, kernels)
        self.by_expert = CallsByExpert(engine, self)
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
        stage: str = "dispatch",
    ) -> _Dispatched | None:
        """A dispatch of contiguous CPU tensors that counts by itself and ends before it returns.

        None if this is another call, or one with bad input: nothing is done yet then. `stage` is
        what this rank tells the others that it calls.
        """
        given_idx, choice = topk_idx, self._engine.local.choice
        if choice is not None:
            is_plain = lies_at(topk_idx, 2, torch.int64) != NOT_PLAIN
            topk_idx = choice.or_none(topk_idx) if is_plain else None
        asked = num_experts, expert_alignment, tag, stage
        plan = self._plan_dispatch(x, topk_idx, topk_weights, asked, config)
        if plan is None:
            return None
        try:
            segment, memory = self._room.take()
        except SharedMemoryError:
            return None
        table, head = plan.table, plan.head
        num_tokens, most = table[at.NUM_TOKENS], table[at.ROOM]
        ledger = WrittenLedger(self.rank, self.size, num_tokens, most, plan.src_room[0])
        table[at.BLOCK] = segment.address
        head[say.OFFER], head[say.OFFER + 1], head[say.OFFER + 2] = segment.told
        table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room
        while verdict := self.enter(plan, stage, say.OFFER):
            if verdict >> 32 == MORE_ROOM:
                which = verdict & LOW
                plan.src_room[0] = which + which // 4
                ledger = ledger.with_room(plan.src_room[0])
                table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room
                continue
            if not self._agreement.engaged:
                return None
            sent = ledger.send_counts(table[at.NUM_COPIES])
            block = SharedRows(memory, segment.told, segment.address)
            heard = Heard(Offer(block.told, (block,)), self._node.mailbox.last_messages(), sent)
            del block, memory
            request = DispatchRequest.plain(
                x, given_idx, topk_weights, num_experts, expert_alignment, config, tag
            )
            got, handle, _ = self._engine.dispatch(request, _AT_ONCE, stage, heard)
            assert got.topk_idx is not None
            assert got.topk_weights is not None
            return got.x, got.topk_idx, got.topk_weights, got.num_tokens_per_expert, handle
        return self._dispatched(plan, memory, ledger, x, topk_idx.shape[1])

    def _plan_dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, asked: tuple[Any, ...], config: Config
    ) -> Plan | None:
        """The plan of such a dispatch, whose table knows its tensors then; None if it is none."""
        x_at, ids_at = lies_at(x, 2), lies_at(topk_idx, 2, torch.int64)
        weights_at = lies_at(topk_weights, 2, torch.float32)
        num_experts, expert_alignment, tag, _ = asked
        if (
            x_at == NOT_PLAIN
            or ids_at == NOT_PLAIN
            or weights_at == NOT_PLAIN
            or not type(num_experts) is type(expert_alignment) is type(tag) is int
            or self._engine.worker.pending is not None
        ):
            return None
        (num_tokens, hidden), shape = x.shape, topk_idx.shape
        if shape[0] != num_tokens or topk_weights.shape != shape:
            return None
        num_topk = shape[1]
        key = x.dtype, hidden, num_topk, *asked
        plan = self.plans.get(key)
        if plan is None or plan.config is not config:
            plan = self.plans.add_dispatch(key, config)
            if plan is None:
                return None
        most = num_tokens * (num_topk if num_topk < self.size else self.size)
        if num_threads(num_tokens, most * plan.row_bytes) > 1:
            return None
        table = plan.table
        table[at.X], table[at.TOPK_IDX], table[at.TOPK_WEIGHTS] = x_at, ids_at, weights_at
        table[at.NUM_TOKENS], table[at.ROOM] = num_tokens, most
        table[at.PHASE], table[at.LEAVE_AT] = at.START, self.leave_at
        table[at.NUMBER] = self._agreement.number
        return plan

    def _dispatched(
        self, plan: Plan, memory: np.ndarray, ledger: WrittenLedger, x: Tensor, num_topk: int
    ) -> _Dispatched:
        """The results of a dispatch that has ended."""
        table, hidden = plan.table, x.shape[1]
        num_rows = table[at.NUM_ROWS]
        self._room.learn(table[at.END])
        ids_at = round_up(num_rows * plan.row_bytes, LINE)
        weights_at = ids_at + round_up(num_rows * num_topk * 8, LINE)
        ledger.num_rows, ledger.num_copies = num_rows, table[at.NUM_COPIES]
        handle = Handle(
            self._engine.origin,
            table[at.NUMBER],
            hidden,
            plan.combine_dtype,
            plan.num_channels,
            ledger,
        )
        return (
            rows(memory, 0, num_rows, hidden, x.dtype),
            rows(memory, ids_at, num_rows, num_topk, torch.int64),
            rows(memory, weights_at, num_rows, num_topk, torch.float32),
            plan.per_expert.tolist(),
            handle,
        )

    def table(
        self, call: Call, row_bytes: int, num_experts: int
    ) -> tuple[array[int], array[int], array[int]]:
        """A table of one's own for such calls: with the message, and memory for the call."""
        return self.plans.table(call, row_bytes, num_experts)

    def forget(self) -> None:
        """Make plans anew: the placement has changed."""
        self.plans.forget()

    def combine(
        self,
        x: Any,
        handle: Handle,
        out: Any,
        config: Config,
        tag: Any,
        stage: str = "combine",
    ) -> Tensor | None:
        """A combine of a contiguous CPU tensor, without weights and biases, that ends before it
        returns; None, and `stage`, as in `dispatch`.
        """
        plan = self._plan_combine(x, handle, out, config, tag, stage)
        if plan is None:
            return None
        table, head = plan.table, plan.head
        num_bytes, address = x.shape[0] * plan.row_bytes, table[at.X]
        memory, segment = None, self._pool.find(address, num_bytes)
        begin = 0 if segment is None else address - segment.address
        try:
            if segment is None:
                segment, memory = self._take(num_bytes)
            sums = self.sums_of(plan, x) if out is None else out
        except SharedMemoryError:
            return None
        copies = memory is not None
        table[at.OUT], table[at.COPIES], table[at.BLOCK] = sums.data_ptr(), copies, segment.address
        head[say.OFFER], head[say.OFFER + 4] = not copies, begin
        head[say.OFFER + 1], head[say.OFFER + 2], head[say.OFFER + 3] = segment.told
        if self.enter(plan, stage, say.OFFER + 1):
            if not self._agreement.engaged:
                return None
            block = SharedRows(memory, segment.told, segment.address)
            words = np.array([(not copies, *block.told, begin)] * self.size, np.int64)
            heard = Heard(Offer(words, (block,)), self._node.mailbox.last_messages())
            return self._engine.combine(
                x, handle, None, None, out, config, None, tag, _AT_ONCE, heard, stage
            )[0]
        return sums

    def _plan_combine(
        self, x: Any, handle: Handle, out: Any, config: Config, tag: Any, stage: str
    ) -> Plan | None:
        """The plan of such a combine, whose table knows its rows then; None if it is none."""
        address, ledger = lies_at(x, 2), handle.ledger
        if (
            address == NOT_PLAIN
            or type(tag) is not int
            or handle.origin is not self._engine.origin
            or self._engine.worker.pending is not None
        ):
            return None
        num_rows, hidden = x.shape
        if num_rows != ledger.num_rows:
            return None
        key = x.dtype, hidden, tag, stage
        plan = self.plans.get(key)
        if plan is None or plan.config is not config:
            plan = self.plans.add_combine(key, config)
            if plan is None:
                return None
        num_tokens, table = ledger.num_tokens, plan.table
        moved = (ledger.num_copies + num_tokens) * plan.row_bytes
        if num_threads(num_tokens, moved) > 1:
            return None
        if out is not None and not self.fits(out, x, num_tokens, hidden):
            return None
        if not isinstance(ledger, WrittenLedger):
            written = WrittenLedger.of(ledger, self.rank)
            if written is None:
                return None
            ledger = handle.ledger = written
        table[at.X], table[at.NUM_TOKENS], table[at.HANDLE] = address, num_tokens, handle.call
        table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
        table[at.PHASE], table[at.LEAVE_AT] = at.START, self.leave_at
        table[at.NUMBER] = self._agreement.number
        return plan

    def sums_of(self, plan: Plan, x: Tensor) -> Tensor:
        """Memory for what a combine sums."""
        num_tokens, hidden = plan.table[at.NUM_TOKENS], x.shape[1]
        if num_tokens * plan.row_bytes >= SMALL:
            return rows(self._take(num_tokens * plan.row_bytes)[1], 0, num_tokens, hidden, x.dtype)
        if plan.like[0].shape[0] == num_tokens:
            return local_memory.empty_like(plan.like[0])
        sums = local_memory.empty(num_tokens, hidden, dtype=x.dtype)
        plan.like[0] = sums.detach()  # the caller may resize sums, or give them a graph
        return sums

    def enter(self, plan: Plan, stage: str, offer: int) -> int:
        """Make a call until it is over, or until it says what it needs, or that the engine must go
        on. If others rely on this rank then, it is `engaged`. `offer` is where a message names a
        segment.
        """
        agreement = self._agreement
        agreement.engaged = True
        while verdict := plan.call():
            what, which = verdict >> 32, verdict & LOW
            if what in (GENERAL, MORE_ROOM, MORE_MEMORY, MUCH):
                agreement.engaged = plan.table[at.PHASE] != at.START
                return verdict
            self.answer(what, which, stage, offer)
        agreement.number += 1
        return DONE

    def answer(self, what: int, which: int, stage: str, offer: int) -> None:
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

    def fits(self, out: Any, x: Tensor, num_tokens: int, hidden: int) -> bool:
        """Whether sums of x can be written there as they are."""
        return (
            lies_at(out, 2, x.dtype) != NOT_PLAIN
            and out.shape == (num_tokens, hidden)
            and not out.requires_grad
            and not validate.overlap(out, x)
        )


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
