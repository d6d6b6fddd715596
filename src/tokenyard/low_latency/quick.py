"""Low-latency calls of shapes that were seen before, in few steps of Python.

A call of a plain kind (no cast, no hook, not asynchronous, no statistics) whose tensors look like
those of an earlier one needs no checks but of its numbers, and the compiled functions make those.
Such a call is made here, on the same posts and tables as others (`shared.py`). Whatever is unusual
is left to `engine`: the whole call if nothing was sent, else what is left to receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.engine.plans import MOST_PLANS
from tokenyard.low_latency.handle import LowLatencyHandle, PendingCombine
from tokenyard.low_latency.inputs import Fp8, form
from tokenyard.low_latency.posts import Post
from tokenyard.low_latency.shared import Halves, SharedSlots, combine_signature
from tokenyard.runtime import memory as local_memory
from tokenyard.shm.segment import Segment
from tokenyard.validate import lies_at
from tokenyard.wire import call_table as at
from tokenyard.wire.fp8 import NO_CAST
from tokenyard.wire.signals import MAIL
from tokenyard.wire.slots import (
    COMBINE,
    DISPATCH,
    IDENTITY,
    ROWS_IDENTITY,
    SIGNATURE,
    SlotResults,
    SlotShape,
)

if TYPE_CHECKING:
    from tokenyard.low_latency.engine import LowLatency


class _Plan(NamedTuple):
    """What follows from the form of a call's tensors."""

    shape: SlotShape
    num_tokens: int
    dtype: torch.dtype
    halves: tuple[Halves, Halves]  # of even and of odd calls
    posts: tuple[Post, Post]
    signature: int
    most_bytes: int  # of a block that is not far too large
    num_elements: int  # of recv_x
    picked: Tensor | None  # of a combine


class QuickCalls:
    """The engine of the mode is handed to each call: it holds this object."""

    def __init__(self, slots: SharedSlots) -> None:
        self._slots = slots
        self._plans: dict[Any, _Plan] = {}

    def forget(self) -> None:
        self._plans.clear()

    def dispatch(
        self,
        engine: LowLatency,
        x: Any,
        topk_idx: Any,
        num_max: Any,
        num_experts: Any,
        fp8: tuple[Any, Any, Any],
    ) -> tuple[Tensor, Tensor, LowLatencyHandle] | None:
        """recv_x, the counts and the handle; None if the engine must make this call."""
        try:
            key = form(x), form(topk_idx), num_max, num_experts, fp8
            plan = self._plans.get(key)
        except (AttributeError, TypeError):  # no tensors, or no numbers
            return None
        if plan is None:
            plan = self._plan_dispatch(engine, key)
        x_at, ids_at = lies_at(x, 2), lies_at(topk_idx, 2)
        if (
            plan is None
            or x_at <= 0
            or ids_at <= 0
            or engine.unread
            or engine.worker.pending is not None
        ):
            return None
        shape, num_tokens, dtype, both_halves, both_posts, *_, num_elements, _ = plan
        number = engine.numbers[DISPATCH] + 1
        halves, post = both_halves[number % 2], both_posts[number % 2]
        block = self._block(plan, post)
        if block is None:
            return None
        send, receive = halves.send_table, halves.receive_table
        send[at.X], send[at.TOPK_IDX] = x_at, ids_at
        try:
            handle = LowLatencyHandle(shape, num_tokens, engine.buffer_id, number)
            array, receive[at.X] = engine.results.lend(num_elements * dtype.itemsize, number)
        except (RuntimeError, ValueError, MemoryError):  # none is left
            return None
        counts = local_memory.small(shape.num_local, dtype=torch.int32, device="cpu")
        recv_x = torch.frombuffer(array, dtype=dtype, count=num_elements).view(shape.x_shape)
        ranges_at, sent_at, src_info_at = handle.addresses
        send[at.NUMBER] = receive[at.NUMBER] = number
        send[at.NUM_TOKENS], send[at.BLOCK] = num_tokens, block.address
        receive[at.COUNTS], receive[at.LAYOUT_RANGE] = counts.data_ptr(), ranges_at
        send[at.SENT], receive[at.SRC_INFO] = sent_at, src_info_at
        receive[at.SCALES] = receive[at.TOTALS] = 0
        engine.engaged = True
        posts = self._slots.posts  # as `Posts.begin` does
        posts.made[DISPATCH] = number
        posts.before[post.place] = posts.mails[MAIL], posts.made[COMBINE]
        if halves.send():  # nothing is sent: the engine begins anew, and finds out why
            engine.engaged = False
            return None
        engine.numbers[DISPATCH] = number
        if halves.receive():
            out = SlotResults(recv_x, None, counts, handle.src_info, handle.layout_range)
            engine.go_on(DISPATCH, number, self._slots.receive_dispatch, shape, out, None)
        engine.engaged = False
        return recv_x, counts, handle

    def combine(
        self,
        engine: LowLatency,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        handle: LowLatencyHandle,
    ) -> Tensor | None:
        """The sums; None if the engine must make this call."""
        slots = self._slots
        try:
            key = form(x), form(topk_idx), form(topk_weights), handle.shape, handle.num_tokens
            plan = self._plans.get(key)
        except (AttributeError, TypeError):
            return None
        if plan is None:
            plan = self._plan_combine(engine, key)
        y_at, ids_at, weights_at = lies_at(x, 3), lies_at(topk_idx, 2), lies_at(topk_weights, 2)
        if (
            plan is None
            or handle.hook is not None
            or y_at <= 0
            or ids_at <= 0
            or weights_at <= 0
            or handle.buffer_id != engine.buffer_id
            or engine.unread
            or engine.worker.pending is not None
        ):
            return None
        shape, num_tokens, dtype, both_halves, both_posts, *_, picked = plan
        assert picked is not None
        number = engine.numbers[COMBINE] + 1
        halves, post = both_halves[number % 2], both_posts[number % 2]
        block = self._block(plan, post)
        if block is None or post.head[ROWS_IDENTITY] != block.identity:
            return None
        send, receive = halves.send_table, halves.receive_table
        send[at.Y] = receive[at.Y] = y_at
        send[at.TOPK_IDX] = receive[at.TOPK_IDX] = ids_at
        receive[at.WEIGHTS] = weights_at
        out = local_memory.small(num_tokens, shape.hidden, dtype=dtype, device="cpu")
        tables = shape.num_ranks * shape.table_bytes
        send[at.NUMBER] = receive[at.NUMBER] = number
        send[at.HANDLE] = receive[at.HANDLE] = handle.number
        send[at.NUM_TOKENS] = receive[at.NUM_TOKENS] = num_tokens
        send[at.LAYOUT_RANGE], send[at.SENT], _ = handle.addresses
        send[at.COPIES_OWN] = 0
        send[at.BLOCK], send[at.ROWS] = block.address, block.address + tables
        send[at.ROOM] = (block.size - tables) // (shape.hidden * dtype.itemsize)
        receive[at.OUT] = out.data_ptr()
        engine.engaged = True
        posts = slots.posts
        posts.made[COMBINE] = number
        posts.before[post.place] = posts.mails[MAIL], posts.made[DISPATCH]
        if halves.send():
            engine.engaged = False
            return None
        engine.numbers[COMBINE] = number
        slots.lent[number % 2], handle.lent = None, ()
        if halves.receive():
            back = PendingCombine(x, dtype, topk_idx, topk_weights, handle, picked, False)
            engine.go_on(COMBINE, number, slots.receive_combine, back, out)
        engine.engaged = False
        return out

    def _block(self, plan: _Plan, post: Post) -> Segment | None:
        """The block of a post that calls like this one have used, which all ranks have mapped."""
        slots, head = self._slots, post.head
        block = slots.blocks[post.place]
        if (
            block is None
            or slots.new
            or block.size > plan.most_bytes
            or block.identity not in slots.mapped
            or head[IDENTITY] != block.identity
            or head[SIGNATURE] != plan.signature
            or slots.posts.owed[post.place]
        ):
            return None
        return block

    def _plan_dispatch(self, engine: LowLatency, key: tuple[Any, ...]) -> _Plan | None:
        """For a form that the engine has checked."""
        x, topk_idx, num_max, num_experts, fp8 = key
        shape = engine.inputs.checked.get((x, topk_idx, num_max, num_experts, Fp8(*fp8)))
        if shape is None or shape.cast != NO_CAST or not shape.num_local:
            return None
        num_tokens = topk_idx[1][0]
        slots = shape.num_local * shape.num_slots
        made = self._plan(
            DISPATCH, shape, num_tokens, None, shape.signature, shape.block_bytes
        )._replace(num_elements=slots * shape.hidden)
        self._plans[key] = made
        return made

    def _plan_combine(self, engine: LowLatency, key: tuple[Any, ...]) -> _Plan | None:
        x, topk_idx, topk_weights, shape, num_tokens = key
        if not shape.num_local:
            return None
        if ((x, topk_idx, topk_weights), shape, num_tokens) not in engine.inputs.checked_back:
            return None
        dtype = x[2]
        row_bytes = shape.hidden * dtype.itemsize
        most = shape.num_ranks * (shape.table_bytes + shape.most_back * row_bytes)
        signature = combine_signature(shape, dtype)
        made = self._plan(COMBINE, shape, num_tokens, dtype, signature, most)
        picked = local_memory.small(num_tokens, shape.num_topk, dtype=torch.int64, device="cpu")
        for halves in made.halves:
            halves.send_table[at.PICKED] = halves.receive_table[at.PICKED] = picked.data_ptr()
        self._plans[key] = made._replace(picked=picked)
        return self._plans[key]

    def _plan(
        self,
        kind: int,
        shape: SlotShape,
        num_tokens: int,
        dtype: torch.dtype | None,
        signature: int,
        most: int,
    ) -> _Plan:
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        slots = self._slots
        even, odd = slots.posts.of(kind, 0), slots.posts.of(kind, 1)
        # Tables of their own: PICKED stays as it is.
        halves = slots.make_calls(even, shape, dtype), slots.make_calls(odd, shape, dtype)
        most_bytes = max(1 << 20, 4 * most)
        used = shape.row_dtype if dtype is None else dtype
        return _Plan(shape, num_tokens, used, halves, (even, odd), signature, most_bytes, 0, None)
