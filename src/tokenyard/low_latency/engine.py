"""The low-latency mode under DeepEP's names: rows by expert in fixed slots.

Calls check what they are given (`inputs`), send, and receive: at once, on the Buffer's thread, or
when a hook is called. Where ranks share memory a call is the compiled one with a layout of its own
(`shared`). Elsewhere it is two calls of the engine (`stepwise`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.engine import Engine
from tokenyard.kernels import Kernels
from tokenyard.low_latency.handle import DISPATCH, LowLatencyHandle
from tokenyard.low_latency.inputs import Inputs
from tokenyard.low_latency.shape import SlotShape
from tokenyard.runtime import memory
from tokenyard.runtime.completion import AT_ONCE, Completion, RecvEvent, RecvHook
from tokenyard.runtime.events import EventOverlap


class Arrived(NamedTuple):
    """What a dispatch brings."""

    x: Tensor  # [L, S, D]
    scales: Tensor | None  # [L, S, scales], FP8 only
    counts: Tensor  # [L] int32

    @staticmethod
    def empty(shape: SlotShape) -> Arrived:
        x, scales = memory.empty(*shape.x_shape, dtype=shape.row_dtype), None
        if shape.scale_bytes:
            width = shape.scale_bytes // shape.scales_dtype.itemsize
            scales = memory.empty(*shape.x_shape[:2], width, dtype=shape.scales_dtype)
        return Arrived(x, scales, memory.empty(shape.num_local, dtype=torch.int32))


class LowLatency(Inputs):
    """What calls do alike; `shared` and `stepwise` make them. All ranks call together."""

    def __init__(self, engine: Engine, kernels: Kernels, shrink: bool, num_bytes: int) -> None:
        super().__init__(engine, kernels, num_bytes)
        self._statistics, self._agreement = engine.statistics, engine.agreement
        self._worker, self._shrink = engine.worker, shrink
        # True from where a call has a number until it has ended, or has told all other ranks why it
        # will not. If an exception leaves the call in between, this rank is out of step with them.
        self.engaged = False
        self.numbers = [0, 0]  # of the last call of each kind

    def dispatch(
        self, completion: Completion, *asked: Any
    ) -> tuple[Arrived, LowLatencyHandle, EventOverlap, RecvHook | None]:
        """Of what `Inputs.tokens` checks."""
        raise NotImplementedError

    def combine(
        self, completion: Completion, *asked: Any
    ) -> tuple[Tensor, EventOverlap, RecvHook | None]:
        """Of what `Inputs.rows` checks."""
        raise NotImplementedError

    def refuse(self, kind: int, error: Exception) -> NoReturn:
        """Make no call, since this rank was given what it cannot do. All ranks raise."""
        raise NotImplementedError

    def wait_to_leave(self) -> None:
        """Before the Buffer is closed: wait until all ranks have mapped memory that it named."""

    def left_out(self) -> list[int]:
        """The ranks that this one goes on without."""
        return []

    def mask(self, rank: int, masked: bool) -> None:
        """Go on without a rank, or wait for it again."""

    def empty_rows(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        """[L, S, D] that a combine need not copy."""
        raise NotImplementedError

    def later(self, hook: RecvHook, completion: Completion) -> tuple[EventOverlap, RecvHook]:
        """Receive on the Buffer's thread, or when the user calls the hook."""
        if completion.return_recv_hook:
            return EventOverlap(None), hook
        return EventOverlap(RecvEvent(self._worker.submit(hook.on_thread), hook)), hook

    def chosen(self, kind: int, topk_idx: Any) -> Any:
        """topk_idx with physical experts, where experts have copies."""
        assert self.local.choice is not None
        try:
            return self.local.choice.before_checks(topk_idx)
        except ValueError as error:
            self.refuse(kind, error)

    def combine_buffer(self, handle: Any) -> Tensor:
        """[L, S, D] for the experts' output, where combine finds it without copying."""
        try:
            known = self.known(handle)
        except ValueError as error:
            raise self._agreement.named("get_next_low_latency_combine_buffer", error) from None
        shape, dtype = known.shape, known.shape.dtype
        if dtype not in validate.SUMMABLE:
            dtype = torch.bfloat16
        lent = self.empty_rows(shape, dtype)
        known.lent = *known.lent, lent
        return lent

    def clean(self, num_max: Any, hidden: Any, num_experts: Any) -> None:
        """Meet all ranks, and find those that are dead: a dispatch without tokens."""
        try:
            width = validate.integer("hidden", hidden, at_least=1)
        except ValueError as error:
            self.refuse(DISPATCH, error)
        x = torch.empty(0, width, dtype=torch.bfloat16, device="cpu")
        topk_idx = torch.empty(0, 1, dtype=torch.int64, device="cpu")
        plain = False, False, False
        self.dispatch(AT_ONCE, x, topk_idx, num_max, num_experts, None, plain)

    def change_mask(self, rank: Any, masked: bool) -> None:
        self._check_shrink()
        validate.integer("rank_to_mask", rank, at_least=0, at_most=self._size - 1)
        validate.require(rank != self._rank, f"rank_to_mask is {rank}, want another rank than this")
        if not masked:  # a call on the Buffer's thread knows nothing of what that rank sends
            self._worker.drain()
        self.mask(rank, bool(masked))

    def unmask_all(self) -> None:
        self._check_shrink()
        self._worker.drain()
        for rank in self.left_out():
            self.mask(rank, False)

    def query_masks(self, status: Any) -> None:
        self._check_shrink()
        status = validate.tensor("mask_status", status, shape=[self._size], dtypes=(torch.int32,))
        status.zero_()
        status[self.left_out()] = 1

    def _check_shrink(self) -> None:
        validate.require(
            self._shrink,
            f"enable_shrink is False, want Buffer(enable_shrink=True), on rank {self._rank}",
        )
