"""Plans of compiled calls: what was checked for a shape, and the table that its call reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.agreement import Call
from tokenyard.engine.shapes import find_placement, is_valid, tell_shape
from tokenyard.transports.direct import DirectTransport
from tokenyard.types import ROW_DTYPES, Config, Places
from tokenyard.validate import SUMMABLE
from tokenyard.wire import exchange_table as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

MOST_PLANS = 64  # that are kept


class ExchangeKernels(Protocol):
    def exchange_dispatch(self, table: int) -> Callable[[], int]: ...

    def exchange_by_expert(self, table: int) -> Callable[[], int]: ...

    def exchange_combine(self, dtype: torch.dtype, table: int) -> Callable[[], int]: ...

    def place_and_spread(
        self,
        x_ND: Tensor,
        topk_idx_NK: Tensor,
        num_experts: int,
        expert_alignment: int,
        out_MD: Tensor,
    ) -> Places | None: ...

    def sum_shares(
        self, y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor | None, out_ND: Tensor
    ) -> bool: ...


class Plan(NamedTuple):
    """A shape's compiled call, the table that it reads, and what the table has addresses of."""

    call: Callable[[], int]
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
            table=table,
            head=head,
            config=config,
            combine_dtype=dtype if dtype in SUMMABLE else torch.bfloat16,
            per_expert=per_expert,
            like=[],
            kept=(scratch, *kept, load),
        )

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
