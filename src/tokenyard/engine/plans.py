"""Plans of compiled calls: what was checked for a shape, and the table that its call reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Call
from tokenyard.engine.shapes import find_placement, is_valid, tell_shape
from tokenyard.transports.direct import DirectTransport
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Config
from tokenyard.validate import SUMMABLE
from tokenyard.wire import exchange_table as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

MOST_PLANS = 64  # that are kept
MUCH_FROM = 16 << 20  # bytes of all ranks' pairs that are too many for parcels
BY_EXPERT = "dispatch by expert"


class ExchangeKernels(Protocol):
    def exchange_dispatch(self, table: int) -> Callable[[], int]: ...

    def exchange_by_expert(self, table: int) -> Callable[[], int]: ...

    def exchange_combine(self, dtype: torch.dtype, table: int) -> Callable[[], int]: ...


class ByParcels(NamedTuple):
    """The shape of a dispatch by expert whose rows travel in parcels."""

    dtype: torch.dtype
    hidden: int
    num_topk: int
    num_experts: int
    expert_alignment: int
    tag: int
    scales: tuple[int, torch.dtype] | None  # of a row; FP8 only


class Plan(NamedTuple):
    """A shape's compiled call, the table that it reads, and what the table has addresses of."""

    call: Callable[[], int]
    told: Call  # what it tells the others, but for what differs from call to call
    table: array[int]
    head: array[int]  # the message up to its payload
    config: Config
    num_channels: int
    row_bytes: int
    combine_dtype: torch.dtype
    per_expert: np.ndarray  # which a dispatch counts
    src_room: list[int]  # rows of others that a ledger has room for, a number that grows
    like: list[Tensor]  # of a combine: sums of as many tokens as one had before
    kept: tuple[Any, ...]


class Plans:
    """Makes plans, and keeps them by shape."""

    def __init__(
        self, engine: Engine, transport: DirectTransport, kernels: ExchangeKernels
    ) -> None:
        node = transport.node
        assert node is not None
        self._engine, self._kernels = engine, kernels
        self._buffer_id = engine.agreement.buffer_id
        self._rank, self._size = transport.rank, transport.size
        self._words = int64s.new(at.TABLE_WORDS)
        self._words[at.RANK], self._words[at.SIZE] = self._rank, self._size
        node.mailbox.tell_calls(self._words)
        node.attached.tell_calls(self._words)
        self._terms = int64s.new(0)
        self.much_from = MUCH_FROM
        self._known: dict[Any, Plan] = {}
        self.get = self._known.get

    def forget(self) -> None:
        self._known.clear()

    def add_dispatch(self, key: tuple[Any, ...], config: Config) -> Plan | None:
        """For a dtype, hidden size, top-k, number of experts, expert_alignment, tag and stage. None
        if only the engine can make calls of such a shape, or if it is wrong.
        """
        dtype, hidden, num_topk, num_experts, expert_alignment, tag, stage = key
        placement = find_placement(self._engine, num_experts, expert_alignment, config, tag)
        if placement is None:
            return None
        payload = 1 + placement.most_experts + self._size
        if dtype not in ROW_DTYPES or min(hidden, num_topk) < 1 or payload > say.PAYLOAD_WORDS:
            return None
        physical = placement.num_experts
        more = {"num_topk": num_topk, "num_experts": physical, "tag": tag}
        call = Call.of_shape(stage, dtype, hidden, config, buffer=self._buffer_id, **more)
        table, head, scratch = self.table(call, hidden * dtype.itemsize, physical)
        per_expert, kept = tell_shape(table, placement, self._rank, num_topk, expert_alignment)
        statistics = self._engine.statistics
        load = statistics.load(physical, len(per_expert))
        table[at.COUNTERS], table[at.LOAD] = statistics.address(stage), load.ctypes.data
        return self._add(
            key,
            call=self._kernels.exchange_dispatch(int64s.address(table)),
            told=call,
            table=table,
            head=head,
            config=config,
            combine_dtype=dtype if dtype in SUMMABLE else torch.bfloat16,
            per_expert=per_expert,
            like=[],
            kept=(scratch, *kept, load),
        )

    def by_expert(self, shape: ByParcels, config: Config) -> Plan:
        """For a dispatch by expert whose rows travel in parcels. Raises ValueError if something of
        its shape is wrong.
        """
        found = self._known.get(shape)
        if found is not None and found.config is config:
            return found
        dtype, hidden, num_topk, num_experts, alignment, tag, scales = shape
        placement = self._engine.local.placement(num_experts)
        validate.alignment(alignment)
        self._engine.local.config(config)
        # `num_max` tells these calls from those that go the engine's way.
        more = {"num_topk": num_topk, "num_experts": placement.num_experts, "num_max": 0}
        more |= {"tag": validate.tag(tag), "buffer": self._buffer_id}
        if scales is not None:
            more |= {"num_scales": scales[0], "scales_dtype": SCALE_DTYPES.index(scales[1])}
        call = Call.of_shape(BY_EXPERT, dtype, hidden, config, **more)
        table, head, scratch = self.table(call, hidden * dtype.itemsize, placement.num_experts)
        per_expert, kept = tell_shape(table, placement, self._rank, num_topk, alignment)
        load = self._engine.statistics.load(placement.num_experts, len(per_expert))
        table[at.COUNTERS] = self._engine.statistics.address(BY_EXPERT)
        table[at.LOAD] = load.ctypes.data
        table[at.SCALE_BYTES] = 0 if scales is None else scales[0] * scales[1].itemsize
        return self._add(
            shape,
            call=self._kernels.exchange_by_expert(int64s.address(table)),
            told=call,
            table=table,
            head=head,
            config=config,
            combine_dtype=dtype if dtype in SUMMABLE else torch.bfloat16,
            per_expert=per_expert,
            like=[],
            kept=(scratch, *kept, load),
        )

    def terms(self, num_topk: int) -> int:
        """The address of memory for the terms of one sum, in which no call keeps anything."""
        if len(self._terms) < 2 * num_topk:
            self._terms = int64s.new(2 * num_topk)
        return int64s.address(self._terms)

    def find_combine(self, key: tuple[Any, ...], config: Config) -> Plan | None:
        """As `add_combine`; the plan that is known, if there is one."""
        plan = self._known.get(key)
        return plan if plan is not None and plan.config is config else self.add_combine(key, config)

    def add_combine(self, key: tuple[Any, ...], config: Config) -> Plan | None:
        """For a dtype, hidden size, tag and stage; None as in `add_dispatch`."""
        dtype, hidden, tag, stage = key
        if dtype not in SUMMABLE or hidden < 1 or not is_valid(self._engine, config, tag):
            return None
        call = Call.of_shape(stage, dtype, hidden, config, buffer=self._buffer_id, tag=tag)
        table, head, scratch = self.table(call, hidden * dtype.itemsize, 0)
        table[at.COUNTERS] = self._engine.statistics.address(stage)
        return self._add(
            key,
            call=self._kernels.exchange_combine(dtype, int64s.address(table)),
            told=call,
            table=table,
            head=head,
            config=config,
            combine_dtype=dtype,
            per_expert=np.zeros(0, np.int64),
            like=[torch.empty(0, hidden, dtype=dtype, device="cpu")],
            kept=(scratch,),
        )

    def table(
        self, call: Call, row_bytes: int, num_experts: int
    ) -> tuple[array[int], array[int], array[int]]:
        """The table, the message, and memory for the call."""
        table, head = int64s.new(len(self._words)), int64s.new(say.PAYLOAD)
        table[:] = self._words
        head[say.CALL : say.TOKENS] = array("q", call)
        scratch = int64s.new(at.scratch_words(self._size, num_experts))
        table[at.HEAD], table[at.SCRATCH] = int64s.address(head), int64s.address(scratch)
        table[at.ROW_BYTES] = row_bytes
        return table, head, scratch

    def _add(self, key: tuple[Any, ...], *, table: array[int], config: Config, **more: Any) -> Plan:
        if len(self._known) >= MOST_PLANS:
            self._known.clear()
        plan = Plan(
            table=table,
            config=config,
            num_channels=config.num_channels,
            row_bytes=table[at.ROW_BYTES],
            src_room=[0],
            **more,
        )
        self._known[key] = plan
        return plan
