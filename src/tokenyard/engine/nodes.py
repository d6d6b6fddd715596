"""Calls of few tokens between nodes: one message each way, and a few compiled steps around it.

A dispatch or combine of a plain kind (see `NodeCalls._dispatch_few`) looks up the plan of its
shape, and makes the steps that general calls make too (`transports.hierarchical.enclosed`), with
compiled ones of its own before and after. So each rank is free to take either way in every
call. Whatever is unusual is handed over to the engine: before the exchange, or with what was heard.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Call, Heard
from tokenyard.engine.core import Core
from tokenyard.engine.failure import raised_on_all_ranks
from tokenyard.engine.general import GeneralCalls
from tokenyard.engine.inputs import CombineRequest, DispatchRequest
from tokenyard.engine.ledger import MarkedLedger
from tokenyard.engine.plans import MOST_PLANS, tell_routing
from tokenyard.engine.statistics import COMPILED
from tokenyard.kernels.base import RowSteps, Step, SumSteps
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.runtime.completion import AT_ONCE, Completion
from tokenyard.runtime.events import EventOverlap
from tokenyard.transports import Offer
from tokenyard.transports.hierarchical import HierarchicalTransport
from tokenyard.transports.hierarchical.enclosed import MOST_SUMS, Came
from tokenyard.types import ROW_DTYPES, Config, Received
from tokenyard.validate import NOT_PLAIN, SUMMABLE, lies_at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.call import MET, POSTED
from tokenyard.wire.verdicts import GENERAL, LOW

_X, _IDX, _WEIGHTS, _TOKENS = range(at.SOURCES, at.SOURCES + 4)
_OUT = at.TARGETS
Made = TypeVar("Made")


class NodeKernels(Protocol):
    def nodes_dispatch(self, table: int) -> Any: ...

    def nodes_combine(self, dtype: torch.dtype, table: int) -> Any: ...


class _Plan(NamedTuple):
    """A shape's compiled steps, the table that they read, and what the table has addresses of."""

    steps: Any
    table: array[int]
    head: np.ndarray  # the message up to its payload
    scratch: array[int]
    config: Config
    record_bytes: int  # of a row of every column
    dtype: torch.dtype  # of x
    shape: tuple[int, torch.dtype, int]  # hidden size, dtype of combine, channels
    per_expert: np.ndarray
    kept: tuple[Any, ...]


class NodeCalls(GeneralCalls):
    def __init__(self, core: Core, kernels: NodeKernels) -> None:
        super().__init__(core)
        transport = cast(HierarchicalTransport, core.transport)
        self._transport, self._kernels = transport, kernels
        self._enclosures, self._steps = transport.enclosures, transport.enclosures.steps
        self._agreement, self._local = core.agreement, core.local
        self._rank, self._size = core.rank, core.num_ranks
        self._plans: dict[Any, _Plan] = {}
        # A phase of `wire.call` at which the general calls take over: for tests. 0: none
        self.leave_at = 0

    def dispatch(
        self,
        request: DispatchRequest,
        completion: Completion,
        stage: str,
        heard: Heard | None = None,
    ) -> tuple[Received, Handle, EventOverlap]:
        if completion is AT_ONCE and heard is None:
            found = self._few(self._dispatch_few, request, stage)
            if found is not None:
                return found
        return super().dispatch(request, completion, stage, heard)

    def combine(
        self,
        request: CombineRequest,
        completion: Completion,
        stage: str,
        heard: Heard | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        if completion is AT_ONCE and heard is None:
            found = self._few(self._combine_few, request, stage)
            if found is not None:
                return found
        return super().combine(request, completion, stage, heard)

    def forget(self) -> None:
        self._plans.clear()

    def _few(
        self, call: Callable[[Any, str], Made | None], request: Any, stage: str
    ) -> Made | None:
        """A call of few tokens; None also if it has no memory, of which the general call tells."""
        agreement = self._agreement
        was, agreement.engaged = agreement.engaged, False
        try:
            found = call(request, stage)
        except (MemoryError, RuntimeError) as error:
            if agreement.engaged or raised_on_all_ranks(error):
                raise
            found = None
        agreement.engaged |= was
        return found

    def _dispatch_few(
        self, request: DispatchRequest, stage: str
    ) -> tuple[Received, Handle, EventOverlap] | None:
        """A dispatch of contiguous CPU tensors that counts by itself.

        None if this is another call, or has bad input, or too many rows: nothing is done yet then.
        """
        found = self._find_dispatch(request, stage)
        if found is None:
            return None
        plan, topk_idx = found
        num_tokens, steps, table = request.x.shape[0], plan.steps, plan.table
        rows: RowSteps = steps.rows
        num_bytes = self._enclosures.num_bytes(num_tokens, plan.record_bytes)
        if self.leave_at == POSTED or not self._enclosures.has_room(num_bytes, num_bytes):
            return None
        number, begin = self._agreement.number, time.monotonic_ns()
        marks_TR = memory.empty_array((num_tokens, self._size), np.bool_)
        tally_FR = memory.empty_array((at.FACTS + table[at.NUM_RANKS], self._size), np.int64)
        table[at.NUM_TOKENS] = num_tokens
        table[_X], table[_IDX] = request.x.data_ptr(), topk_idx.data_ptr()
        table[_WEIGHTS] = request.topk_weights.data_ptr()
        table[_TOKENS] = self._local.token_numbers(num_tokens).data_ptr()
        table[at.MARKS], table[at.TALLY] = marks_TR.ctypes.data, tally_FR.ctypes.data
        self._steps.begin(table)
        head = plan.head
        head[say.NUMBER], head[say.TOKENS], head[say.STAMP] = number, num_tokens, begin
        if steps.tell():
            return None
        self._agreement.engaged = True
        rows.pack()
        heard = self._exchange(table, rows.relay, rows.fill_own, begin, stage)
        verdict = GENERAL << 32 if self.leave_at == MET else steps.hear()
        if verdict >> 32 == GENERAL:
            came = Came(table, rows)
            told = self._hand_over(heard, came, stage, tuple(marks_TR.sum(0).tolist()))
            return self.dispatch(request, AT_ONCE, stage, told)
        if verdict:
            raise self._enclosures.stray(verdict & LOW, stage)
        received, ledger = self._take(plan, stage, marks_TR, tally_FR)
        self._agreement.number = number + 1
        handle = Handle(self._core.origin, number, *plan.shape, ledger)
        statistics = self._core.statistics
        first, num_local = at.BEFORE + say.PAYLOAD + 1, len(plan.per_expert)
        load = statistics.load(plan.kept[0])
        load += heard[self._steps.slots_R, first : first + num_local].sum(0)
        sent_R, width = marks_TR.sum(0), plan.record_bytes
        statistics.count(stage, begin, sent_R, tally_FR[at.CAME_ROWS], width, COMPILED)
        return received, handle, EventOverlap()

    def _find_dispatch(self, request: DispatchRequest, stage: str) -> tuple[_Plan, Tensor] | None:
        """The plan of a dispatch of contiguous CPU tensors that counts by itself, and its ids of
        physical experts; None if it is another, or has bad input.
        """
        x, topk_idx, topk_weights = request.x, request.topk_idx, request.topk_weights
        num_experts, alignment, tag = request.num_experts, request.expert_alignment, request.tag
        if not (
            type(num_experts) is type(alignment) is type(tag) is int
            and request.is_token_in_rank is request.previous_event is None
            and not request.num_worst_tokens
            and self._local.balance is None  # ranks meet for it, and would again
            and lies_at(x, 2) != NOT_PLAIN
            and lies_at(topk_idx, 2, torch.int64) != NOT_PLAIN
            and lies_at(topk_weights, 2, torch.float32) != NOT_PLAIN
            and x.shape[0] == topk_idx.shape[0]
            and topk_weights.shape == topk_idx.shape
            and self._core.worker.pending is None
        ):
            return None
        key = stage, x.dtype, x.shape[1], topk_idx.shape[1], num_experts, alignment, tag
        plan = self._plans.get(key)
        if plan is None or plan.config != request.config:
            plan = self._plan_dispatch(*key, request.config)
            if plan is None:
                return None
            self._plans[key] = plan
        choice = self._local.choice
        if choice is not None:
            topk_idx = choice.or_none(topk_idx)
        return None if topk_idx is None else (plan, topk_idx)

    def _take(
        self, plan: _Plan, stage: str, marks_TR: np.ndarray, tally_FR: np.ndarray
    ) -> tuple[Received, MarkedLedger]:
        """Take what has come out of all messages, into new memory."""
        table, rows = plan.table, plan.steps.rows
        num_rows, num_topk = table[at.NUM_ROWS], table[at.NUM_TOPK]
        x = memory.empty(num_rows, plan.shape[0], dtype=plan.dtype)
        ids = memory.empty(num_rows, num_topk, dtype=torch.int64)
        weights = memory.empty(num_rows, num_topk, dtype=torch.float32)
        tokens_N = memory.empty(num_rows, dtype=torch.int32)
        bits = memory.empty_array(int(tally_FR[0].sum()) * self._transport.mark_bytes, np.uint8)
        table[_OUT], table[_OUT + 1] = x.data_ptr(), ids.data_ptr()
        table[_OUT + 2], table[_OUT + 3] = weights.data_ptr(), tokens_N.data_ptr()
        table[at.BITS] = bits.ctypes.data
        verdict = rows.take()
        if verdict:
            raise self._enclosures.stray(verdict & LOW, stage)
        plan.steps.localise()
        where = self._rank, self._core.topology, self._core.kernels
        ledger = MarkedLedger(marks_TR, tally_FR, bits, tokens_N, *where)
        return Received(x, None, ids, weights, plan.per_expert.tolist()), ledger

    def _combine_few(
        self, request: CombineRequest, stage: str
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | None:
        """A combine of a contiguous CPU tensor, without weights and biases; None as in
        `_dispatch_few`.
        """
        x, handle, topk_weights, bias, out, config, previous_event, tag = request
        if (
            not topk_weights is bias is out is previous_event is None
            or type(handle) is not Handle
            or type(handle.ledger) is not MarkedLedger
            or type(tag) is not int
            or lies_at(x, 2) == NOT_PLAIN
            or x.shape[0] != handle.ledger.num_rows
            or handle.origin is not self._core.origin
            or self._core.worker.pending is not None
            or self.leave_at == POSTED
        ):
            return None
        ledger, hidden = handle.ledger, x.shape[1]
        key = stage, x.dtype, hidden, tag
        plan = self._plans.get(key)
        if plan is None or plan.config != config:
            plan = self._plan_combine(*key, config)
            if plan is None:
                return None
            self._plans[key] = plan
        steps, table, width = plan.steps, plan.table, plan.record_bytes
        made: SumSteps = steps.sums
        enclosed, staged = self._enclosures.sizes(ledger.tally_FR, ledger.num_rows, (width,))
        if enclosed > MOST_SUMS or not self._enclosures.has_room(enclosed, staged):
            return None
        number, num_tokens = self._agreement.number, ledger.num_tokens
        begin = time.monotonic_ns()
        sums = self._local.empty_sum(x, num_tokens)
        table[_OUT] = sums.data_ptr()
        table[_X], table[at.NUM_TOKENS], table[at.HANDLE] = x.data_ptr(), num_tokens, handle.call
        table[at.MARKS] = ledger.marks_TR.ctypes.data
        table[at.TALLY], table[at.BITS] = ledger.tally_FR.ctypes.data, ledger.bits.ctypes.data
        self._steps.begin(table)
        if not self._steps.stage(made):
            return None
        head = plan.head
        head[say.NUMBER], head[say.HANDLE], head[say.STAMP] = number, handle.call, begin
        self._steps.told_RW[:, at.BEFORE : at.BEFORE + say.PAYLOAD] = head
        self._agreement.engaged = True
        made.pack()
        made.sum_for[0]()
        heard = self._exchange(table, made.relay, None, begin, stage)
        if self.leave_at == MET or steps.hear():
            told = self._hand_over(heard, Came(table, made), stage, ())
            return self.combine(request, AT_ONCE, stage, told)
        made.add_up[0]()
        self._agreement.number = number + 1
        came_R, went_R = ledger.tally_FR[at.CAME_ROWS], ledger.marks_TR.sum(0)
        self._core.statistics.count(stage, begin, came_R, went_R, width, COMPILED)
        return sums, None, EventOverlap()

    def _exchange(
        self, table: array[int], relay: Step, meanwhile: Step | None, begin: int, stage: str
    ) -> np.ndarray:
        with self._transport.telling():
            heard = self._steps.exchange(table, relay, meanwhile, f"{stage} (notify)")
        self._agreement.note_stamps(begin, heard[self._steps.slots_R, at.BEFORE + say.STAMP])
        return heard

    def _hand_over(
        self, heard: np.ndarray, came: Came, stage: str, counts: tuple[int, ...]
    ) -> Heard:
        """What the engine goes on with. All ranks have met."""
        told_RW = heard[self._steps.slots_R]
        with self._transport.telling():
            told, offer = self._enclosures.settle(told_RW, Offer(), came, f"{stage} (notify)")
        return Heard(offer, told, counts)

    def _plan_dispatch(
        self,
        stage: str,
        dtype: torch.dtype,
        hidden: int,
        num_topk: int,
        num_experts: int,
        expert_alignment: int,
        tag: int,
        config: Config,
    ) -> _Plan | None:
        """A new plan; None for a shape that only general calls can take, or that is wrong."""
        try:
            placement = self._local.placement(num_experts)
            validate.integer("expert_alignment", expert_alignment, at_least=1)
            self._check(config, tag)
        except ValueError:
            return None
        fits = 1 + placement.most_experts <= say.PAYLOAD_WORDS
        if dtype not in ROW_DTYPES or min(hidden, num_topk) < 1 or not fits:
            return None
        table, head, scratch = self._table(placement.num_experts)
        more = {"num_topk": num_topk, "num_experts": placement.num_experts, "tag": tag}
        buffer = self._agreement.buffer_id
        call = Call.of_shape(stage, dtype, hidden, config, buffer=buffer, **more)
        head[say.CALL : say.TOKENS] = call
        per_expert, kept = tell_routing(table, placement, self._rank, num_topk, expert_alignment)
        row_bytes = hidden * dtype.itemsize
        _write_widths(table, row_bytes, 8 * num_topk, 4 * num_topk, 4)
        return _Plan(
            self._kernels.nodes_dispatch(int64s.address(table)),
            table,
            head,
            scratch,
            config,
            row_bytes + 12 * num_topk + 4,
            dtype,
            (hidden, validate.combine_dtype(dtype), config.num_channels),
            per_expert,
            kept,
        )

    def _plan_combine(
        self, stage: str, dtype: torch.dtype, hidden: int, tag: int, config: Config
    ) -> _Plan | None:
        try:
            self._check(config, tag)
        except ValueError:
            return None
        if dtype not in SUMMABLE or hidden < 1:
            return None
        table, head, scratch = self._table(0)
        buffer = self._agreement.buffer_id
        call = Call.of_shape(stage, dtype, hidden, config, buffer=buffer, tag=tag)
        head[say.CALL : say.TOKENS] = call
        row_bytes, table[at.IS_BACK] = hidden * dtype.itemsize, True
        _write_widths(table, row_bytes)
        return _Plan(
            self._kernels.nodes_combine(dtype, int64s.address(table)),
            table,
            head,
            scratch,
            config,
            row_bytes,
            dtype,
            (hidden, dtype, config.num_channels),
            np.zeros(0, np.int64),
            (),
        )

    def _check(self, config: Config, tag: int) -> None:
        self._local.config(config)
        validate.tag(tag)

    def _table(self, num_experts: int) -> tuple[array[int], np.ndarray, array[int]]:
        """A table, the message up to its payload, and scratch memory."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        table, scratch = self._steps.table(num_experts)
        head = np.zeros(say.PAYLOAD, np.int64)
        table[at.HEAD], table[at.COMES] = head.ctypes.data, at.ENCLOSES
        return table, head, scratch


def _write_widths(table: array[int], *widths: int) -> None:
    """The bytes of a row of each column, whose rows lie one after the other."""
    table[at.NUM_COLUMNS] = len(widths)
    for column, width in enumerate(widths):
        table[at.WIDTHS + column] = table[at.STRIDES + column] = width
