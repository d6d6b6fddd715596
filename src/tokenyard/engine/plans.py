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
from tokenyard.engine.mismatch import STAGES
from tokenyard.transports.direct import DirectTransport
from tokenyard.types import ROW_DTYPES, Config, Places
from tokenyard.validate import SUMMABLE
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say

if TYPE_CHECKING:
    from tokenyard.engine.stages import Engine

_MOST_PLANS = 64


class ExchangeKernels(Protocol):
    def exchange_dispatch(self, table: int) -> Callable[[], int]: ...

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
    per_expert: array[int]  # which a dispatch counts
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
        self._words = _words(at.TABLE_WORDS)
        self._words[at.RANK], self._words[at.SIZE] = self._rank, self._size
        node.mailbox.tell_calls(self._words)
        node.attached.tell_calls(self._words)
        self._known: dict[Any, Plan] = {}
        self.get = self._known.get

    def add_dispatch(self, key: tuple[Any, ...], config: Config) -> Plan | None:
        """For a dtype, hidden size, top-k, number of experts, expert_alignment, tag and stage. None
        if only the engine can make calls of such a shape, or if it is wrong.
        """
        dtype, hidden, num_topk, num_experts, expert_alignment, tag, stage = key
        try:
            placement = self._engine.local.placement(num_experts)
            self._engine.local.config(config)
            validate.integer("expert_alignment", expert_alignment, at_least=1)
            validate.tag(tag)
        except ValueError:
            return None
        payload = 1 + placement.most_experts + self._size
        if dtype not in ROW_DTYPES or min(hidden, num_topk) < 1 or payload > say.PAYLOAD_WORDS:
            return None
        more = {"num_topk": num_topk, "num_experts": num_experts}
        call = self._call(stage, dtype, hidden, config, tag, **more)
        table, head, scratch = self._table(call, hidden * dtype.itemsize, num_experts)
        per_expert = _words(len(placement.experts_of_rank[self._rank]))
        padded = np.ascontiguousarray(placement.padded_experts_RL)
        table[at.NUM_TOPK], table[at.NUM_EXPERTS] = num_topk, num_experts
        table[at.RANK_OF_EXPERT] = placement.rank_of_expert.data_ptr()
        table[at.OWN_EXPERTS] = placement.local_table(self._rank).data_ptr()
        table[at.PADDED_EXPERTS] = padded.ctypes.data
        table[at.MOST_EXPERTS] = placement.most_experts
        table[at.NUM_LOCAL], table[at.ALIGNMENT] = len(per_expert), expert_alignment
        table[at.PER_EXPERT] = _address(per_expert)
        return self._add(
            key,
            call=self._kernels.exchange_dispatch(_address(table)),
            table=table,
            head=head,
            config=config,
            combine_dtype=dtype if dtype in SUMMABLE else torch.bfloat16,
            per_expert=per_expert,
            like=[],
            kept=(scratch, placement, padded),
        )

    def add_combine(self, key: tuple[Any, ...], config: Config) -> Plan | None:
        """For a dtype, hidden size, tag and stage; None as in `add_dispatch`."""
        dtype, hidden, tag, stage = key
        try:
            self._engine.local.config(config)
            validate.tag(tag)
        except ValueError:
            return None
        if dtype not in SUMMABLE or hidden < 1:
            return None
        call = self._call(stage, dtype, hidden, config, tag)
        table, head, scratch = self._table(call, hidden * dtype.itemsize, 0)
        return self._add(
            key,
            call=self._kernels.exchange_combine(dtype, _address(table)),
            table=table,
            head=head,
            config=config,
            combine_dtype=dtype,
            per_expert=_words(0),
            like=[torch.empty(0, hidden, dtype=dtype)],
            kept=(scratch,),
        )

    def _call(
        self, stage: str, dtype: torch.dtype, hidden: int, config: Config, tag: int, **more: int
    ) -> Call:
        return Call(
            stage=STAGES.index(stage),
            buffer=self._buffer_id,
            hidden=hidden,
            dtype=ROW_DTYPES.index(dtype),
            num_channels=config.num_channels,
            num_slots=config.num_max_nvl_chunked_recv_tokens,
            tag=tag,
            **more,
        )

    def _table(
        self, call: Call, row_bytes: int, num_experts: int
    ) -> tuple[array[int], array[int], array[int]]:
        """The table, the message, and memory for the call."""
        table, head = array("q", self._words), _words(say.PAYLOAD)
        head[say.CALL : say.TOKENS] = array("q", call)
        scratch = _words(at.scratch_words(self._size, num_experts))
        table[at.HEAD], table[at.SCRATCH] = _address(head), _address(scratch)
        table[at.ROW_BYTES] = row_bytes
        return table, head, scratch

    def _add(self, key: tuple[Any, ...], *, table: array[int], config: Config, **more: Any) -> Plan:
        if len(self._known) >= _MOST_PLANS:
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


def _words(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def _address(words: array[int]) -> int:
    return words.buffer_info()[0]
