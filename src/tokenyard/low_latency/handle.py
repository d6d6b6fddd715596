"""What lasts of a low-latency dispatch until its combine, and a combine that is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.replicas import num_logical
from tokenyard.runtime.completion import RecvHook
from tokenyard.wire.slots import SlotShape

STAGE_OF = ("low-latency dispatch", "low-latency combine")  # by kind of call


@dataclass(kw_only=True, eq=False)
class LowLatencyHandle:
    """The memory of a low-latency dispatch. It reads as DeepEP's tuple too:
    (src_info, layout_range, num_max, hidden, num_experts).
    """

    src_info: Tensor  # [L, S] int32, the token's index on its source rank
    layout_range: Tensor  # [L, R] int64, begin << 32 | count of the rows from each source rank
    shape: SlotShape
    sent: Tensor  # [2, T, K] int64: topk_idx, and each pair's place among those of its expert
    buffer_id: int  # the Buffer and rank that made it; others refuse it
    number: int  # of the dispatch; all ranks must combine the same
    hook: RecvHook | None = None  # is over when rows have arrived, if that was left for later
    lent: tuple[Tensor, ...] = ()  # buffers for zero_copy that were given since the last combine

    def _v1(self) -> tuple[Any, ...]:
        shape = self.shape
        return (
            self.src_info,
            self.layout_range,
            shape.num_max,
            shape.hidden,
            num_logical(shape.placement),
        )

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return iter(self._v1())

    def __getitem__(self, index: int) -> Any:
        return self._v1()[index]

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"<tokenyard.LowLatencyHandle of dispatch call {self.number}: {self.sent.shape[1]} "
            f"tokens sent, {shape.num_local} experts of {shape.num_slots} slots, "
            f"hidden {shape.hidden}>"
        )


class PendingCombine(NamedTuple):
    """A combine that was sent and is not received yet: what its second half needs."""

    own: Tensor | None  # [L, S, D] y, if it can be read until the end; else the sender copied it
    dtype: torch.dtype  # of y
    topk_idx: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32
    handle: LowLatencyHandle
    picked: Tensor  # [T, K] int64, for the place of each pair's row among those of its expert
    zero_copy: bool
