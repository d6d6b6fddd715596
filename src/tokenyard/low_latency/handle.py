"""What lasts of a low-latency dispatch until its combine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenyard.low_latency.shape import SlotShape
from tokenyard.replicas import num_logical
from tokenyard.runtime.completion import RecvHook
from tokenyard.runtime.copies import Once
from tokenyard.wire import int64s

DISPATCH, COMBINE = 0, 1  # the kinds of calls
STAGE_OF = ("low-latency dispatch", "low-latency combine")  # by kind of call


class LowLatencyHandle(Once):
    """The memory of a low-latency dispatch. It reads as DeepEP's tuple too:
    (src_info, layout_range, num_max, hidden, num_experts).

    Its numbers lie in one piece of memory, layout_range and `sent` in int64, then src_info in
    int32; their tensors are made when they are read.
    """

    hook: RecvHook | None = None  # is over when rows have arrived, if that was left for later
    lent: tuple[Tensor, ...] = ()  # buffers for zero_copy that were given since the last combine

    def __init__(self, shape: SlotShape, num_tokens: int, buffer_id: int, number: int) -> None:
        """`buffer_id` is of the Buffer and rank that made it: others refuse it. All ranks must
        combine the same `number`, that of the dispatch.
        """
        self.shape, self.num_tokens = shape, num_tokens
        self.buffer_id, self.number = buffer_id, number
        self._sent_at = shape.num_local * shape.num_ranks
        self._src_at = self._sent_at + 2 * num_tokens * shape.num_topk
        self.memory = int64s.new(self._src_at + shape.num_local * shape.num_slots // 2 + 1)
        begin = int64s.address(self.memory)
        # Of layout_range, `sent` and src_info. No copy has them, since a handle is its own copy.
        self.addresses = begin, begin + 8 * self._sent_at, begin + 8 * self._src_at

    @cached_property
    def ranges(self) -> Tensor:
        """layout_range in the handle's own memory, from which combine makes addresses."""
        return self._words()[: self._sent_at].view(self.shape.num_local, self.shape.num_ranks)

    @cached_property
    def layout_range(self) -> Tensor:
        """[L, R] int64, begin << 32 | count of the rows from each source rank: a copy."""
        told, found = self.ranges.clone().numpy(), self.ranges.numpy()
        if self.hook is not None:  # rows may come between these lines, or later
            self.hook.then.append(partial(np.copyto, told, found))
            np.copyto(told, found)
        return torch.from_numpy(told)

    @cached_property
    def sent(self) -> Tensor:
        """[2, T, K] int64: topk_idx, and each pair's place among those of its expert."""
        words = self._words()[self._sent_at : self._src_at]
        return words.view(2, self.num_tokens, self.shape.num_topk)

    @cached_property
    def src_info(self) -> Tensor:
        """[L, S] int32, the token's index on its source rank."""
        num_local, num_slots = self.shape.num_local, self.shape.num_slots
        words = self._words()[self._src_at :].view(torch.int32)
        return words[: num_local * num_slots].view(num_local, num_slots)

    def _words(self) -> Tensor:
        return torch.frombuffer(self.memory, dtype=torch.int64)

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
            f"<tokenyard.LowLatencyHandle of dispatch call {self.number}: {self.num_tokens} "
            f"tokens sent, {shape.num_local} experts of {shape.num_slots} slots, "
            f"hidden {shape.hidden}>"
        )
