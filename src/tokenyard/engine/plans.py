"""Plans of compiled calls: all that follows from the shape of a call, checked once.

A plan is found by one look into a dictionary. It has the compiled function, the table that this
reads (`wire.call`), and the memory that the table has addresses of.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.agreement import Call
from tokenyard.engine.by_expert import DISPATCH as BY_EXPERT
from tokenyard.engine.inputs import SMALL, Checked, CombineRequest, DispatchRequest
from tokenyard.engine.mismatch import STAGES
from tokenyard.runtime import memory
from tokenyard.shm.pool import SegmentPool
from tokenyard.topology import Placement
from tokenyard.types import SCALE_DTYPES, Config, Layout
from tokenyard.validate.alike import Like, like
from tokenyard.wire import call as at
from tokenyard.wire import int64s
from tokenyard.wire import message as say

if TYPE_CHECKING:
    from tokenyard.engine.core import Core

MOST_PLANS = 64  # that are kept
_MOST_SEEN = 1024  # kinds of tensors of dispatches
_MOST_RANKS = 64  # a token's ranks are the bits of a word, where a call counts them

Compiled = Callable[[], int]


class CallKernels(Protocol):
    """Whole calls, and what they hand over."""

    def expect_calls(self, dtype: torch.dtype) -> None: ...

    def balance_call(self, table: int, beside: int) -> Compiled: ...

    def call_by_source(self, table: int) -> Compiled: ...

    def call_by_expert(self, table: int) -> Compiled: ...

    def call_combine(self, dtype: torch.dtype, table: int) -> Compiled: ...

    def write_rows(self, table: int, begin: int, end: int) -> None: ...

    def take_rows(self, table: int, begin: int, end: int) -> None: ...

    def share_rows(self, dtype: torch.dtype, table: int, begin: int, end: int) -> None: ...

    def sum_rows(
        self, dtype: torch.dtype, table: int, column: int, begin: int, end: int
    ) -> None: ...


class DispatchShape(NamedTuple):
    """What plans of dispatches differ in, but for their Config."""

    stage: str
    dtype: torch.dtype
    hidden: int
    num_topk: int  # -1 without experts
    placement: Placement  # where rows go
    expert_alignment: int
    tag: int
    scales: tuple[int, torch.dtype] | None  # of a row
    is_cached: bool = False  # along a handle


class CombineShape(NamedTuple):
    stage: str
    dtype: torch.dtype
    hidden: int
    num_weights: int  # of a row, which are summed too; 0: none
    tag: int
    num_topk: int  # of rows by expert, which each rank sums first; 0: rows are of tokens


class Plan:
    """What a call of one shape needs."""

    def __init__(
        self,
        shape: DispatchShape | CombineShape,
        config: Config,
        told: Call,
        words: Sequence[int],
        widths: Sequence[int],
        told_words: int,
    ) -> None:
        """`words` are those of the Buffer."""
        self.shape, self.config, self.told, self.widths = shape, config, told, tuple(widths)
        self.scales = shape.scales if isinstance(shape, DispatchShape) else None
        self.row_bytes, self.num_channels = widths[0], config.num_channels
        self.table, self.head = int64s.new(at.TABLE_WORDS), int64s.new(say.PAYLOAD)
        self.address = int64s.address(self.table)
        self.table[: len(words)] = array("q", words)
        self.head[say.CALL : say.TOKENS] = array("q", told)
        self.src_room = 0  # rows of a result that ledgers have room for, a number that grows
        self.ids_at = -1  # the word of the address of ids, which that of weights follows
        # Of a combine: sums of as many tokens as one had before.
        self._like = memory.empty(0, shape.hidden, dtype=shape.dtype)
        self._num_like, self._num_small = 0, SMALL // max(1, self.row_bytes)
        self.per_expert = np.zeros(0, np.int64)
        self.ends = memory.empty(0, dtype=torch.int32)  # of each local expert's rows
        table = self.table
        table[at.HEAD], table[at.HANDLE], table[at.IDS] = int64s.address(self.head), -1, -1
        table[at.NUM_COLUMNS], table[at.ALIGNMENT] = len(widths), 1
        table[at.WIDTHS : at.WIDTHS + len(widths)] = array("q", widths)
        table[at.TOLD_WORDS] = told_words
        self.call: Compiled = _no_call
        self.combine_dtype = validate.combine_dtype(shape.dtype)
        is_back = isinstance(shape, CombineShape)
        self.segments_end = say.SEGMENTS + say.SEGMENT_WORDS * (len(widths) if is_back else 1)
        self.pairs = np.zeros(0, np.int64)  # of each expert, where the call does not count them
        self._kept: tuple[Any, ...] = ()
        self.slots: Tensor | None = None  # of the last call's pairs, with a balance
        self._marks: Any = None

    def take_scratch(self, size: int, num_experts: int, num_topk: int) -> None:
        """Memory in which nothing is kept from call to call."""
        table, told = self.table, size * self.table[at.TOLD_WORDS]
        parts = {
            at.PAIRS: num_experts + 1,
            at.TAKEN: size,
            at.TOLD: told,
            at.HEARD: told,
            at.LACKS: size,
            at.PLACES: at.MOST_COLUMNS * size,
            at.TERMS: at.terms_words(size, num_topk),
        }
        memory = int64s.new(sum(parts.values()))
        self.pairs, begin = np.asarray(memory)[: num_experts + 1], int64s.address(memory)
        for word, count in parts.items():
            table[word] = begin
            begin += 8 * count
        self.keep(memory)

    def count(self, counters: int, load: np.ndarray | None) -> None:
        self.table[at.COUNTERS] = self.counters = counters
        self.table[at.LOAD] = 0 if load is None else load.ctypes.data
        self.keep(load)

    def mark(self, layout: Layout | None) -> None:
        """Who gets each token, and how many pairs each expert. None: the call counts the ids."""
        self._marks, self.table[at.MARKS] = layout, 0
        if layout is not None:
            self.pairs[:-1] = layout.num_tokens_per_expert
            self.table[at.MARKS] = layout.is_token_in_rank.data_ptr()

    def empty_sums(self, num_tokens: int, pool: SegmentPool) -> Tensor:
        """Memory for what a combine sums. Raises SharedMemoryError."""
        if num_tokens >= self._num_small:
            return pool.rows(num_tokens, self.shape.hidden, self.shape.dtype)
        if self._num_like != num_tokens:
            self._like = memory.empty(num_tokens, self.shape.hidden, dtype=self.shape.dtype)
            self._num_like = num_tokens
        return memory.empty_like(self._like)

    def keep(self, *values: Any) -> None:
        """What the table has addresses of."""
        self._kept += values


def tell_routing(
    table: array[int], placement: Placement, rank: int, num_topk: int, alignment: int
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Write where experts are, in words that all tables have in the same places. Returns where it
    will be told how many rows come to each of this rank's, and what the words have addresses of.
    """
    padded = np.ascontiguousarray(placement.padded_experts_RL)
    per_expert = np.asarray(int64s.new(len(placement.experts_of_rank[rank])))
    table[at.NUM_TOPK], table[at.NUM_EXPERTS] = num_topk, placement.num_experts
    table[at.RANK_OF_EXPERT] = placement.rank_of_expert.data_ptr()
    table[at.OWN_EXPERTS] = placement.local_table(rank).data_ptr()
    table[at.PADDED_EXPERTS] = padded.ctypes.data
    table[at.MOST_EXPERTS] = placement.most_experts
    table[at.NUM_LOCAL], table[at.ALIGNMENT] = len(per_expert), alignment
    table[at.PER_EXPERT] = per_expert.ctypes.data
    return per_expert, (placement, padded)


def _no_call() -> int:
    raise AssertionError("a plan without a call")


class Plans:
    """Makes plans, and keeps them by shape."""

    def __init__(self, core: Core, kernels: CallKernels) -> None:
        node = core.transport.node
        assert node is not None
        self._statistics, self._kernels = core.statistics, kernels
        self._buffer_id = core.agreement.buffer_id
        self._rank, self._size = core.rank, core.num_ranks
        self.counts_ids = self._size <= _MOST_RANKS
        words = int64s.new(at.HEAD)
        words[at.RANK], words[at.SIZE] = self._rank, self._size
        node.mailbox.tell_calls(words)
        node.attached.tell_calls(words)
        self._nodes = np.array(core.topology.node_of_rank, np.int32)
        words[at.NODES] = self._nodes.ctypes.data if self._nodes.any() else 0
        self._words = words
        self._known: dict[DispatchShape | CombineShape, Plan] = {}
        self.get: Callable[[Any], Plan | None] = self._known.get
        self._local = core.local
        self._seen: dict[Any, tuple[Plan, Like]] = {}

    def forget(self) -> None:
        self._known.clear()
        self._seen.clear()

    def find_seen(self, request: DispatchRequest, stage: str) -> Plan | None:
        """The plan of a dispatch like one that was learnt; its table knows its tensors then."""
        x, topk_idx, topk_weights = request.x, request.topk_idx, request.topk_weights
        num_experts, alignment, tag = request.num_experts, request.expert_alignment, request.tag
        if not type(num_experts) is type(alignment) is type(tag) is int:
            return None
        try:
            num_tokens = x.shape[0]
            key = stage, num_tokens, num_experts, alignment, tag, request.balanced
            plan, is_like = self._seen[key]
        except (AttributeError, IndexError, KeyError):
            return None
        if (
            not is_like(x, topk_idx, topk_weights)
            or (plan.config is not request.config and plan.config != request.config)
            or request.previous_event is not None
        ):
            return None
        table, ids, address = plan.table, plan.ids_at, x.data_ptr()
        table[at.SOURCES] = address
        table[ids], table[ids + 1] = experts, weights = topk_idx.data_ptr(), topk_weights.data_ptr()
        table[at.NUM_TOKENS] = num_tokens
        if not (address and experts and weights):  # a tensor without memory
            return None
        if self._local.balance is not None and request.balanced:
            owners = self._local.placement(num_experts)
            plan.slots = self._local.balance.choose(topk_idx, owners, tag)
            table[ids] = plan.slots.data_ptr()
        return plan

    def find_seen_rows(
        self, request: CombineRequest, stage: str, num_rows: int, num_topk: int = 0
    ) -> Plan | None:
        """The plan of a combine of x alone, of rows like those of one that was learnt."""
        tag, config, found = request.tag, request.config, None
        if type(tag) is int and request.topk_weights is request.bias is None:
            found = self._seen.get((stage, num_rows, num_topk, tag))
        if found is None or request.previous_event is not None or not found[1](request.x):
            return None
        plan = found[0]
        is_same = plan.config is config or plan.config == config
        return plan if is_same and request.x.data_ptr() else None

    def learn_rows(self, request: CombineRequest, plan: Plan, num_rows: int, x: Tensor) -> None:
        """Remember what the rows of a combine are like, if they can be read as they are."""
        if x is request.x and request.topk_weights is request.bias is None:
            shape = plan.shape
            assert isinstance(shape, CombineShape)
            self._keep_seen((shape.stage, num_rows, shape.num_topk, shape.tag), plan, like(x))

    def learn(self, request: DispatchRequest, stage: str, given: Checked, plan: Plan) -> None:
        """Remember what the tensors of a dispatch are like, if they can be read as they are."""
        as_given = request.x, request.topk_idx, request.topk_weights
        plain = given.x, given.asked, given.topk_weights
        if (
            not self.counts_ids
            or self._local.choice is not None
            or given.scales is not None
            or not all(map(is_, as_given, plain))
        ):
            return
        if plain[1] is None or plain[2] is None:
            return
        more = given.expert_alignment, given.tag, request.balanced
        key = stage, len(given.x), request.num_experts, *more
        self._keep_seen(key, plan, like(given.x, plain[1], plain[2]))

    def _keep_seen(self, key: Any, plan: Plan, is_like: Like) -> None:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] = plan, is_like

    def find_dispatch(self, shape: DispatchShape, config: Config) -> Plan:
        """The plan of a shape that was checked."""
        found = self._known.get(shape)
        if found is not None and found.config == config:
            return found
        return self._keep(self.new_dispatch(shape, config))

    def find_combine(self, shape: CombineShape, config: Config) -> Plan:
        """The plan of a combine whose shape was checked."""
        found = self._known.get(shape)
        if found is not None and found.config == config:
            return found
        return self._keep(self.new_combine(shape, config))

    def _keep(self, plan: Plan) -> Plan:
        if len(self._known) >= MOST_PLANS:
            self.forget()
        self._known[plan.shape] = plan
        return plan

    def new_dispatch(self, shape: DispatchShape, config: Config) -> Plan:
        """One that nobody else uses."""
        is_by_expert, num_topk = shape.stage == BY_EXPERT, shape.num_topk
        placement = shape.placement
        more = {"buffer": self._buffer_id, "tag": shape.tag}
        scale_bytes = 0
        if shape.scales is not None:
            num_scales, dtype = shape.scales
            more |= {"num_scales": num_scales, "scales_dtype": SCALE_DTYPES.index(dtype)}
            scale_bytes = num_scales * dtype.itemsize
        if not shape.is_cached:
            more |= {"num_topk": num_topk, "num_experts": placement.num_experts}
        told = Call.of_shape(shape.stage, shape.dtype, shape.hidden, config, **more)
        row_bytes = shape.hidden * shape.dtype.itemsize
        ids, told_words = -1, 0
        if is_by_expert:
            widths, ids, told_words = (
                [row_bytes, scale_bytes, 8 * num_topk, 4 * num_topk],
                2,
                2 * self._size,
            )
        else:
            widths = [row_bytes, scale_bytes] if scale_bytes else [row_bytes]
            if not shape.is_cached:
                told_words = placement.most_experts + self._size
                if num_topk >= 0:
                    ids = len(widths)
                    widths += [8 * num_topk, 4 * num_topk]
                widths.append(4)
        plan = Plan(shape, config, told, self._words, widths, told_words)
        plan.per_expert, kept = tell_routing(
            plan.table, placement, self._rank, num_topk, shape.expert_alignment
        )
        plan.keep(kept)
        plan.table[at.IDS], plan.ids_at = ids, at.SOURCES + ids
        plan.ends = memory.empty(len(plan.per_expert), dtype=torch.int32)
        plan.take_scratch(self._size, placement.num_experts, max(num_topk, 0))
        load = self._statistics.load(placement)
        plan.count(self._statistics.address(shape.stage), load)
        if plan.combine_dtype in validate.SUMMABLE:
            self._kernels.expect_calls(plan.combine_dtype)
        made = self._kernels.call_by_expert if is_by_expert else self._kernels.call_by_source
        plan.call = made(plan.address)
        return plan

    def new_balance(self, stage: str, owners: Placement, tag: int, beside: array[int]) -> Plan:
        """That of a call in which ranks tell each other of their pairs."""
        shape = DispatchShape(stage, torch.int64, 0, -1, owners, 1, tag, None)
        num_experts = owners.num_experts
        words = {"stage": STAGES.index(stage), "num_experts": num_experts, "tag": tag}
        told = Call(buffer=self._buffer_id, **words)
        plan = Plan(shape, Config(), told, self._words, [0], num_experts)
        plan.table[at.NUM_EXPERTS] = num_experts
        plan.take_scratch(self._size, num_experts, 0)
        plan.keep(beside)
        plan.call = self._kernels.balance_call(plan.address, int64s.address(beside))
        return plan

    def new_combine(self, shape: CombineShape, config: Config) -> Plan:
        """One that nobody else uses."""
        more = {"buffer": self._buffer_id, "tag": shape.tag}
        more["num_topk"] = shape.num_weights or -1
        told = Call.of_shape(shape.stage, shape.dtype, shape.hidden, config, **more)
        widths = [shape.hidden * shape.dtype.itemsize]
        if shape.num_weights:
            widths.append(4 * shape.num_weights)
        plan = Plan(shape, config, told, self._words, widths, 0)
        plan.take_scratch(self._size, 0, shape.num_topk)
        plan.count(self._statistics.address(shape.stage), None)
        plan.table[at.BY_EXPERT] = shape.num_topk > 0
        plan.table[at.NUM_TOPK] = shape.num_topk
        plan.call = self._kernels.call_combine(shape.dtype, plan.address)
        return plan
