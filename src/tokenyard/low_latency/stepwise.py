"""Low-latency calls where ranks share no memory: the engine's calls by source, then slots.

A dispatch sends each token once to every rank that has an expert of it, with its experts in the
same row of bytes. A combine sends the rows of all slots that are in use back, to the rank of their
token. They arrive by (rank, local expert, token), so that each rank knows which are of which pair.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.engine import Engine
from tokenyard.engine.general import GeneralCalls
from tokenyard.engine.inputs import DispatchRequest
from tokenyard.kernels import Kernels, wide_dtype
from tokenyard.low_latency.engine import Arrived, LowLatency
from tokenyard.low_latency.handle import COMBINE, DISPATCH, STAGE_OF, LowLatencyHandle
from tokenyard.low_latency.inputs import Tokens, repeated_pair, unsent_pair
from tokenyard.low_latency.shape import SlotShape
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.runtime.completion import Completion, RecvHook
from tokenyard.runtime.events import EventOverlap
from tokenyard.runtime.memory import as_bytes
from tokenyard.types import ROW_DTYPES, Config
from tokenyard.wire.fp8 import NO_CAST, PACKED, PLAIN
from tokenyard.wire.verdicts import LOW


class StepwiseSlots(LowLatency):
    def __init__(self, engine: Engine, kernels: Kernels, shrink: bool, num_bytes: int) -> None:
        super().__init__(engine, kernels, shrink, num_bytes)
        self._engine, self._calls = engine, GeneralCalls(engine)

    def is_shared(self, y: Tensor) -> bool:
        """What is given is copied anyway."""
        return True

    def empty_rows(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        return memory.empty(*shape.x_shape, dtype=dtype)

    def refuse(self, kind: int, error: Exception) -> NoReturn:
        self.engaged = False  # from here on the agreement is
        self._engine.reject(STAGE_OF[kind], error)

    def dispatch(
        self, completion: Completion, *asked: Any
    ) -> tuple[Arrived, LowLatencyHandle, EventOverlap, RecvHook | None]:
        self.engaged = True
        try:
            given = self.tokens(completion, *asked)
            shape, topk_idx = given.shape, given.topk_idx
            check_pairs(topk_idx, shape.placement.num_experts)
            records = self._records(given)
            owners = torch.where(topk_idx < 0, -1, shape.placement.rank_of_expert[topk_idx])
            request = self._request(records, owners, shape, {})
            number = self._agreement.number
            handle = LowLatencyHandle(shape, len(topk_idx), self._buffer_id, number)
            handle.sent[0], out = topk_idx, Arrived.empty(shape)
        except Exception as error:
            self.refuse(DISPATCH, error)
        begin, got, made, event = self._move(DISPATCH, completion, request)
        load = torch.from_numpy(self._statistics.load(shape.placement))
        work = partial(_fill, got, made, shape, handle, out, [load, given.totals])
        event, handle.hook = self._end(begin, event, work, out.x, completion)
        return out, handle, event, handle.hook

    def combine(
        self, completion: Completion, *asked: Any
    ) -> tuple[Tensor, EventOverlap, RecvHook | None]:
        self.engaged = True
        try:
            given = self.rows(completion, *asked)
            known, out = given.handle, given.out
            picked = find_pairs(given.topk_idx, known.sent[0])
            counts_LR = known.ranges & LOW
            used_LS = _numbers(known.shape.num_slots) < counts_LR.sum(1, keepdim=True)
            ranks_LR = _numbers(self._size).expand_as(counts_LR)
            owners = ranks_LR.flatten().repeat_interleave(counts_LR.flatten())[:, None]
            rows, weights = given.y[used_LS], given.weights.clone()
            if out is None:
                out = memory.empty(known.num_tokens, known.shape.hidden, dtype=rows.dtype)
            more = {"handle": known.number, "cast": NO_CAST, "dtype": ROW_DTYPES.index(rows.dtype)}
            request = self._request(rows, owners, known.shape, more)
        except Exception as error:
            self.refuse(COMBINE, error)
        begin, got, _, event = self._move(COMBINE, completion, request)
        known.lent = ()
        work = partial(_sum, got, picked, weights, known, out)
        event, hook = self._end(begin, event, work, out, completion)
        return out, event, hook

    def _records(self, given: Tokens) -> Tensor:
        """[T, B] bytes: each token's row, scales and experts."""
        x, shape = given.x, given.shape
        columns = [x, given.topk_idx]
        if shape.cast != NO_CAST:
            kind = shape.cast != PLAIN, shape.cast == PACKED
            cast = self._kernels.plan_to_fp8(len(x), shape.hidden, x.dtype, *kind)
            columns[:1] = cast(x)
        return torch.cat([as_bytes(column) for column in columns], 1)

    def _request(
        self, rows: Tensor, owners_NK: Tensor, shape: SlotShape, more: dict[str, int]
    ) -> DispatchRequest:
        """Send rows to ranks, each once; -1 is none. `more` are words that ranks must agree on."""
        marks_NR = (owners_NK[:, :, None] == _numbers(self._size)).any(1)
        per_rank = marks_NR.sum(0, dtype=torch.int32)
        also = {
            "hidden": shape.hidden,
            "dtype": ROW_DTYPES.index(shape.dtype),
            "num_topk": shape.num_topk,
            "num_experts": shape.placement.num_experts,
            "num_max": shape.num_max,
            "cast": shape.cast,
            **more,
        }
        num_experts = self.local.any_num_experts
        request = DispatchRequest.by_layout(rows, marks_NR, per_rank, num_experts, Config(), -1)
        return request._replace(also=also)

    def _move(
        self, kind: int, completion: Completion, request: DispatchRequest
    ) -> tuple[int, Tensor, Handle, EventOverlap]:
        """Make a call of the engine, which tells the others from here on if this rank fails."""
        begin, later, self.engaged = time.monotonic_ns(), Completion(completion.is_later), False
        got, made, event = self._calls.dispatch(request, later, STAGE_OF[kind])
        self.numbers[kind] = made.call
        return begin, got.x, made, event

    def _end(
        self,
        begin: int,
        event: EventOverlap,
        work: Callable[[], None],
        result: Tensor,
        completion: Completion,
    ) -> tuple[EventOverlap, RecvHook | None]:
        """Put what has come to its place: now, on the Buffer's thread, or by the hook."""

        def receive() -> None:
            if event.event is not None:
                event.event.current_stream_wait()
            with torch.inference_mode(result.is_inference()):  # as it was made
                work()
            if completion.waits is not None:  # all were waited for as long
                completion.waits.numpy()[:] += time.monotonic_ns() - begin

        if completion.is_later:
            return self.later(RecvHook(receive, event.event), completion)
        receive()
        return EventOverlap(), None


def _numbers(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def check_pairs(topk_idx_TK: Tensor, num_experts: int) -> None:
    """Raises ValueError for a pair that is no expert, or one that its token names twice."""
    bad = ((topk_idx_TK < -1) | (topk_idx_TK >= num_experts)).flatten().nonzero()
    if len(bad):
        raise validate.bad_expert(topk_idx_TK, int(bad[0]), num_experts)
    same_TKK = topk_idx_TK[:, :, None] == topk_idx_TK[:, None]
    twice = (same_TKK.tril(-1).any(2) & (topk_idx_TK >= 0)).flatten().nonzero()
    if len(twice):
        raise repeated_pair(topk_idx_TK, int(twice[0]))


def find_pairs(topk_idx_TK: Tensor, sent_TK: Tensor) -> Tensor:
    """[T, K]: the row that comes back for each pair, -1 for none. Raises ValueError for a pair that
    was not sent.
    """
    same_TKK = (topk_idx_TK[:, :, None] == sent_TK[:, None]) & (topk_idx_TK >= 0)[:, :, None]
    unsent = ((topk_idx_TK != -1) & ~same_TKK.any(2)).flatten().nonzero()
    if len(unsent):
        raise unsent_pair(topk_idx_TK, int(unsent[0]))
    return same_TKK.to(torch.int64).argmax(2).masked_fill(topk_idx_TK < 0, -1)


def _fill(
    records_NB: Tensor,
    made: Handle,
    shape: SlotShape,
    handle: LowLatencyHandle,
    out: Arrived,
    totals: list[Tensor | None],
) -> None:
    """Put the tokens that came into the slots of their experts, by (source rank, token)."""
    num_local, num_ranks = handle.ranges.shape
    row, scales, ids = records_NB.split(list(shape.widths), 1)
    # A clone: one row is contiguous wherever it begins.
    experts_NK = ids.clone(memory_format=torch.contiguous_format).view(torch.int64)
    local_NK = shape.placement.local_table(shape.rank)[experts_NK].masked_fill(experts_NK < 0, -1)
    token, k = (local_NK >= 0).nonzero(as_tuple=True)
    expert = local_NK[token, k]
    order = expert.argsort(stable=True)
    token, expert = token[order], expert[order]
    per_rank = torch.tensor(made.flow.recv_counts, device="cpu")
    source = _numbers(num_ranks).repeat_interleave(per_rank)[token]
    each_LR = torch.bincount(expert * num_ranks + source, minlength=num_local * num_ranks)
    each_LR = each_LR.view(num_local, num_ranks)
    counts_L = each_LR.sum(1)
    slot = _numbers(len(token)) - (counts_L.cumsum(0) - counts_L)[expert]
    out.x.view(torch.uint8)[expert, slot] = row[token]
    if out.scales is not None:
        out.scales.view(torch.uint8)[expert, slot] = scales[token]
    out.counts.copy_(counts_L)
    handle.src_info[expert, slot] = made.ledger.src_idx[token]
    handle.ranges.copy_((each_LR.cumsum(1) - each_LR) << 32 | each_LR)
    for total in totals:
        if total is not None:
            total.numpy()[:] += out.counts.numpy()


def _sum(
    rows_ND: Tensor, picked_TK: Tensor, weights_TK: Tensor, handle: LowLatencyHandle, out_TD: Tensor
) -> None:
    """The weighted sum of each token's rows, in top-k order, rounded once."""
    shape, sent = handle.shape, handle.sent[0].flatten()
    pairs = (sent >= 0).nonzero()[:, 0]
    owner = shape.placement.rank_of_expert[sent[pairs]].long()
    local = shape.placement.local_of_expert[sent[pairs]]
    arrived = (owner * shape.placement.most_experts + local).argsort(stable=True)
    row_of = torch.zeros_like(sent)
    row_of[pairs[arrived]] = _numbers(len(pairs))
    total = torch.zeros(out_TD.shape, dtype=wide_dtype(rows_ND.dtype), device="cpu")
    firsts = _numbers(len(picked_TK)) * shape.num_topk
    for picked, weights in zip(picked_TK.T, weights_TK.T):
        has = picked >= 0
        row = rows_ND[row_of[(firsts + picked)[has]]].to(total.dtype)
        total[has] += row * weights[has, None].to(total.dtype)
    if rows_ND.dtype is not out_TD.dtype:  # LogFMT: sums of float32 are rounded on their own
        total = total.to(rows_ND.dtype)
    out_TD.copy_(total)
