"""Calls of few tokens: one compiled function each way, where all ranks share memory.

A dispatch or combine of a plain kind (see `CompiledCalls.dispatch`) looks up the plan of its shape,
writes a few words into the plan's table, and enters a compiled function that does the rest
(`kernels.numba.exchange`). Whatever is unusual comes back as a verdict: this module does what a
verdict asks for and enters again, or hands the call over to the engine. Both read and write the
same messages and signals, so each rank is free to take either way in every call.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Heard
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.engine.ledger import WrittenLedger
from tokenyard.engine.plans import ExchangeKernels, Plans
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.runtime import memory as local_memory
from tokenyard.runtime.completion import Completion
from tokenyard.runtime.threads import num_threads
from tokenyard.shm.pool import rows
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.transports import Offer
from tokenyard.transports.direct import DirectTransport
from tokenyard.types import Config
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.exchange_table import GENERAL, LATE, LOW, MAP, MORE_ROOM, STRAY
from tokenyard.wire.signals import MAIL

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

_MOST_RANKS = 64  # a token's ranks are the bits of a word
_MUCH = 8 << 20  # bytes from which several threads may move rows
_SMALL = 1 << 16  # bytes of sums that are not worth a segment
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
        self._plans = Plans(engine, transport, kernels)
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
        given_idx, choice = topk_idx, self._engine.local.choice
        if choice is not None and (topk_idx := choice.or_none(topk_idx)) is None:
            return None
        key = dtype, hidden, num_topk, num_experts, expert_alignment, tag, stage
        plan = self._plans.get(key)
        if plan is None or plan.config is not config:
            plan = self._plans.add_dispatch(key, config)
            if plan is None:
                return None
        call, table, head, _, num_channels, row_bytes, combine_dtype, per_expert, src_room, _, _ = (
            plan
        )
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
            segment, memory = self._room.take()
        except SharedMemoryError:
            return None
        ledger = WrittenLedger(self.rank, self.size, num_tokens, most, src_room[0])
        table[at.PHASE], table[at.LEAVE_AT] = at.START, self.leave_at
        table[at.NUMBER], table[at.NUM_TOKENS] = number, num_tokens
        table[at.BLOCK] = segment.address
        head[say.OFFER], head[say.OFFER + 1], head[say.OFFER + 2] = segment.told
        table[at.LEDGER], table[at.ROOM] = ledger.address, most
        table[at.SRC_ROOM] = ledger.src_room
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
                    x, given_idx, topk_weights, num_experts, expert_alignment, config, tag
                )
                got, handle, _ = self._engine.dispatch(request, _AT_ONCE, stage, heard)
                assert got.topk_idx is not None
                assert got.topk_weights is not None
                return got.x, got.topk_idx, got.topk_weights, got.num_tokens_per_expert, handle
            if what == MORE_ROOM:
                src_room[0] = which + which // 4
                ledger = ledger.with_room(src_room[0])
                table[at.LEDGER], table[at.SRC_ROOM] = ledger.address, ledger.src_room
            else:
                self._answer(what, which, stage, say.OFFER)
        self._agreement.number = number + 1
        num_rows = ledger.num_rows = table[at.NUM_ROWS]
        ledger.num_copies = table[at.NUM_COPIES]
        self._room.learn(table[at.END])
        ids_at = -(-num_rows * row_bytes // 64) * 64
        weights_at = ids_at + -(-num_rows * num_topk // 8) * 64
        handle = Handle(self._engine.origin, number, hidden, combine_dtype, num_channels, ledger)
        return (
            rows(memory, 0, num_rows, hidden, dtype),
            rows(memory, ids_at, num_rows, num_topk, torch.int64),
            rows(memory, weights_at, num_rows, num_topk, torch.float32),
            per_expert.tolist(),
            handle,
        )

    def forget(self) -> None:
        """Make plans anew: the placement has changed."""
        self._plans.forget()

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
        ledger = handle.ledger
        if not (
            type(x) is Tensor
            and type(ledger) is WrittenLedger
            and type(tag) is int
            and x.ndim == 2
            and x.is_cpu
            and handle.origin is self._engine.origin
            and self._engine.worker.pending is None
        ):
            return None
        num_tokens, num_rows = ledger.num_tokens, ledger.num_rows
        got_rows, hidden = x.shape
        if got_rows != num_rows or (x.requires_grad and torch.is_grad_enabled()):
            return None
        dtype = x.dtype
        key = dtype, hidden, tag, stage
        plan = self._plans.get(key)
        if plan is None or plan.config is not config:
            plan = self._plans.add_combine(key, config)
            if plan is None:
                return None
        call, table, head, row_bytes = plan.call, plan.table, plan.head, plan.row_bytes
        moved = (ledger.num_copies + num_tokens) * row_bytes
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
        if out is not None and not self.fits(out, x, num_tokens, hidden):
            return None
        memory, segment = None, self._pool.find(address, num_rows * row_bytes)
        begin = 0 if segment is None else address - segment.address
        try:
            if segment is None:
                segment, memory = self._take(num_rows * row_bytes)
            if out is not None:
                sums = out
            elif num_tokens * row_bytes >= _SMALL:
                _, taken = self._take(num_tokens * row_bytes)
                sums = rows(taken, 0, num_tokens, hidden, dtype)
            elif plan.like[0].shape[0] == num_tokens:
                sums = local_memory.empty_like(plan.like[0])
            else:
                sums = local_memory.empty(num_tokens, hidden, dtype=dtype)
                plan.like[0] = sums.detach()  # the caller may resize sums, or give them a graph
        except SharedMemoryError:
            return None
        number = self._agreement.number
        copies = memory is not None
        table[at.PHASE], table[at.LEAVE_AT] = at.START, self.leave_at
        table[at.NUMBER], table[at.NUM_TOKENS], table[at.HANDLE] = number, num_tokens, handle.call
        table[at.X], table[at.OUT] = address, sums.data_ptr()
        table[at.COPIES], table[at.BLOCK] = copies, segment.address
        head[say.OFFER], head[say.OFFER + 4] = not copies, begin
        head[say.OFFER + 1], head[say.OFFER + 2], head[say.OFFER + 3] = segment.told
        table[at.LEDGER], table[at.ROOM] = ledger.address, ledger.room
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
                    x, handle, None, None, out, config, None, tag, _AT_ONCE, heard, stage
                )[0]
            self._answer(what, which, stage, say.OFFER + 1)
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

    def fits(self, out: Any, x: Tensor, num_tokens: int, hidden: int) -> bool:
        """Whether sums of x can be written there as they are."""
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
        return not validate.overlap(out, x) and (out.data_ptr() != 0 or not num_tokens)


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
