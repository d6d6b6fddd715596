"""Calls of few tokens between nodes: one message each way, and a few compiled steps around it.

A dispatch or combine of a plain kind (see `CompiledNodeCalls.dispatch`) looks up the plan of its
shape, and makes the steps that the engine's calls make too (`transports.hierarchical.enclosed`),
with compiled ones of its own before and after. So each rank is free to take either way in every
call. Whatever is unusual is handed over to the engine: before the exchange, or with what was heard.
"""

from __future__ import annotations

import os
import time
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.agreement import Call, Heard
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.engine.ledger import MarkedLedger
from tokenyard.engine.plans import MOST_PLANS
from tokenyard.engine.shapes import find_placement, is_valid, tell_shape
from tokenyard.engine.statistics import COMPILED
from tokenyard.errors import SharedMemoryError
from tokenyard.handle import Handle
from tokenyard.kernels.base import RowSteps, Step, SumSteps
from tokenyard.runtime import memory
from tokenyard.runtime.completion import Completion
from tokenyard.transports import Offer
from tokenyard.transports.hierarchical import HierarchicalTransport
from tokenyard.transports.hierarchical.enclosed import MOST_SUMS, Came
from tokenyard.types import ROW_DTYPES, Config
from tokenyard.validate import NOT_PLAIN, SUMMABLE, lies_at
from tokenyard.wire import int64s
from tokenyard.wire import message as say
from tokenyard.wire import nodes_table as at
from tokenyard.wire.exchange_table import HEARD, POSTED
from tokenyard.wire.verdicts import GENERAL, LOW

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

_AT_ONCE = Completion()
_X, _IDX, _WEIGHTS, _TOKENS = range(at.SOURCES, at.SOURCES + 4)
_OUT = at.TARGETS

_Dispatched = tuple[Tensor, Tensor, Tensor, list[int], Handle]


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
    shape: tuple[int, torch.dtype, int]  # hidden size, dtype of combine, channels
    per_expert: np.ndarray
    kept: tuple[Any, ...]


class CompiledNodeCalls:
    def __init__(
        self, engine: Engine, transport: HierarchicalTransport, kernels: NodeKernels
    ) -> None:
        self._engine, self._transport, self._kernels = engine, transport, kernels
        self._enclosures = transport.enclosures
        self._steps = transport.enclosures.steps
        self._agreement = engine.agreement
        self.rank, self.size = transport.rank, transport.size
        self._plans: dict[Any, _Plan] = {}
        # A phase of `wire.exchange_table` at which the engine takes over: for tests. 0: none
        self.leave_at = 0

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

        None if this is another call, or has bad input, or too many rows: nothing is done yet then.
        """
        if not (
            type(num_experts) is type(expert_alignment) is type(tag) is int
            and lies_at(x, 2) != NOT_PLAIN
            and lies_at(topk_idx, 2, torch.int64) != NOT_PLAIN
            and lies_at(topk_weights, 2, torch.float32) != NOT_PLAIN
            and x.shape[0] == topk_idx.shape[0]
            and topk_weights.shape == topk_idx.shape
            and self._engine.worker.pending is None
        ):
            return None
        (num_tokens, hidden), num_topk = x.shape, topk_idx.shape[1]
        key = x.dtype, hidden, num_topk, num_experts, expert_alignment, tag
        plan = self._plans.get(key)
        if plan is None or plan.config is not config:
            plan = self._plan_dispatch(*key, config)
            if plan is None:
                return None
            self._plans[key] = plan
        given_idx, choice = topk_idx, self._engine.local.choice
        if choice is not None and (topk_idx := choice.or_none(topk_idx)) is None:
            return None
        steps, table = plan.steps, plan.table
        rows: RowSteps = steps.rows
        num_bytes = self._enclosures.num_bytes(num_tokens, plan.record_bytes)
        if self.leave_at == POSTED or not self._enclosures.has_room(num_bytes, num_bytes):
            return None
        number, begin = self._agreement.number, time.monotonic_ns()
        marks_TR = memory.empty_array((num_tokens, self.size), np.bool_)
        tally_FR = memory.empty_array((at.FACTS + table[at.NUM_RANKS], self.size), np.int64)
        table[at.NUM_TOKENS] = num_tokens
        table[_X], table[_IDX] = x.data_ptr(), topk_idx.data_ptr()
        table[_WEIGHTS] = topk_weights.data_ptr()
        table[_TOKENS] = self._engine.local.token_numbers(num_tokens).data_ptr()
        table[at.MARKS], table[at.TALLY] = marks_TR.ctypes.data, tally_FR.ctypes.data
        self._steps.begin(table)
        head = plan.head
        head[say.NUMBER], head[say.TOKENS], head[say.STAMP] = number, num_tokens, begin
        if steps.tell():
            return None
        self._agreement.engaged = True
        rows.pack()
        heard = self._exchange(table, rows.relay, rows.fill_own, begin, "dispatch")
        verdict = GENERAL << 32 if self.leave_at == HEARD else steps.hear()
        if verdict >> 32 == GENERAL:
            request = DispatchRequest.plain(
                x, given_idx, topk_weights, num_experts, expert_alignment, config, tag
            )
            came = Came(table, rows)
            told = self._hand_over(heard, came, "dispatch", tuple(marks_TR.sum(0).tolist()))
            got, made, _ = self._engine.dispatch(request, _AT_ONCE, heard=told)
            assert got.topk_idx is not None
            assert got.topk_weights is not None
            return got.x, got.topk_idx, got.topk_weights, got.num_tokens_per_expert, made
        if verdict:
            raise self._enclosures.stray(verdict & LOW, "dispatch")
        num_rows = table[at.NUM_ROWS]
        recv_x = memory.empty(num_rows, hidden, dtype=x.dtype)
        recv_idx = memory.empty(num_rows, num_topk, dtype=torch.int64)
        recv_weights = memory.empty(num_rows, num_topk, dtype=torch.float32)
        tokens_N = memory.empty(num_rows, dtype=torch.int32)
        bits = memory.empty_array(int(tally_FR[0].sum()) * self._transport.mark_bytes, np.uint8)
        table[_OUT], table[_OUT + 1] = recv_x.data_ptr(), recv_idx.data_ptr()
        table[_OUT + 2], table[_OUT + 3] = recv_weights.data_ptr(), tokens_N.data_ptr()
        table[at.BITS] = bits.ctypes.data
        verdict = rows.take()
        if verdict:
            raise self._enclosures.stray(verdict & LOW, "dispatch")
        steps.localise()
        self._agreement.number = number + 1
        where = self.rank, self._engine.topology, self._engine.kernels
        ledger = MarkedLedger(marks_TR, tally_FR, bits, tokens_N, *where)
        handle = Handle(self._engine.origin, number, *plan.shape, ledger)
        statistics = self._engine.statistics
        first, num_local = at.BEFORE + say.PAYLOAD + 1, len(plan.per_expert)
        load = statistics.load(table[at.NUM_EXPERTS], num_local)
        load += heard[self._steps.slots_R, first : first + num_local].sum(0)
        sent_R, width = marks_TR.sum(0), plan.record_bytes
        statistics.count("dispatch", begin, sent_R, tally_FR[at.CAME_ROWS], width, COMPILED)
        return recv_x, recv_idx, recv_weights, plan.per_expert.tolist(), handle

    def forget(self) -> None:
        """Make plans anew: the placement has changed."""
        self._plans.clear()

    def combine(self, x: Any, handle: Handle, out: Any, config: Config, tag: Any) -> Tensor | None:
        """A combine of a contiguous CPU tensor, without weights and biases, that ends before it
        returns; None as in `dispatch`.
        """
        ledger = handle.ledger
        if not (
            type(ledger) is MarkedLedger
            and out is None
            and type(tag) is int
            and lies_at(x, 2) != NOT_PLAIN
            and x.shape[0] == ledger.num_rows
            and handle.origin is self._engine.origin
            and self._engine.worker.pending is None
            and self.leave_at != POSTED
        ):
            return None
        hidden = x.shape[1]
        key = x.dtype, hidden, tag
        plan = self._plans.get(key)
        if plan is None or plan.config is not config:
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
        try:
            sums = self._engine.local.empty_sum(x, num_tokens)
        except SharedMemoryError:
            return None
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
        heard = self._exchange(table, made.relay, None, begin, "combine")
        if self.leave_at == HEARD or steps.hear():
            told = self._hand_over(heard, Came(table, made), "combine", ())
            return self._engine.combine(
                x, handle, None, None, None, config, None, tag, _AT_ONCE, told
            )[0]
        made.add_up[0]()
        self._agreement.number = number + 1
        came_R, went_R = ledger.tally_FR[at.CAME_ROWS], ledger.marks_TR.sum(0)
        self._engine.statistics.count("combine", begin, came_R, went_R, width, COMPILED)
        return sums

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
        if (
            placement is None
            or dtype not in ROW_DTYPES
            or min(hidden, num_topk) < 1
            or 1 + placement.most_experts > say.PAYLOAD_WORDS
        ):
            return None
        table, head, scratch = self._table(placement.num_experts)
        more = {"num_topk": num_topk, "num_experts": placement.num_experts, "tag": tag}
        buffer = self._agreement.buffer_id
        call = Call.of_shape("dispatch", dtype, hidden, config, buffer=buffer, **more)
        head[say.CALL : say.TOKENS] = call
        per_expert, kept = tell_shape(table, placement, self.rank, num_topk, expert_alignment)
        row_bytes = hidden * dtype.itemsize
        _write_widths(table, row_bytes, 8 * num_topk, 4 * num_topk, 4)
        return _Plan(
            self._kernels.nodes_dispatch(int64s.address(table)),
            table,
            head,
            scratch,
            config,
            row_bytes + 12 * num_topk + 4,
            (hidden, dtype if dtype in SUMMABLE else torch.bfloat16, config.num_channels),
            per_expert,
            kept,
        )

    def _plan_combine(
        self, dtype: torch.dtype, hidden: int, tag: int, config: Config
    ) -> _Plan | None:
        if dtype not in SUMMABLE or hidden < 1 or not is_valid(self._engine, config, tag):
            return None
        table, head, scratch = self._table(0)
        buffer = self._agreement.buffer_id
        call = Call.of_shape("combine", dtype, hidden, config, buffer=buffer, tag=tag)
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
            (hidden, dtype, config.num_channels),
            np.zeros(0, np.int64),
            (),
        )

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


def compiled_node_calls(engine: Engine, kernels: Any) -> CompiledNodeCalls | None:
    """The compiled calls of an engine between nodes, if its transport and its kernels have them.

    TOKENYARD_COMPILED_CALLS=0 leaves them out, as it does those of one node.
    """
    transport = engine.transport
    if (
        not isinstance(transport, HierarchicalTransport)
        or not hasattr(kernels, "nodes_dispatch")
        or engine.topology.num_nodes == 1
        or os.environ.get("TOKENYARD_COMPILED_CALLS") == "0"
    ):
        return None
    return CompiledNodeCalls(engine, transport, kernels)
