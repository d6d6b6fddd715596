"""Which calls of layers go by an exchange that the Buffer has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tokenyard.buffer import Buffer
from tokenyard.engine.loops import Few
from tokenyard.nn import functional


@contextmanager
def watched(buffer: Buffer) -> Iterator[list[int]]:
    """The number of tokens of each such call, while it lasts."""
    few: Any = buffer._few
    assert type(few) is Few
    seen: list[int] = []

    class Watching:
        forget = few.forget

        def dispatch(self, x: Any, *more: Any, **named: Any) -> Any:
            step = few.dispatch(x, *more, **named)
            if step is not None:
                seen.append(len(x))
            return step

    with _given(buffer, Watching()):
        yield seen


def ordinary(buffer: Buffer) -> Any:
    """While it lasts, layers make ordinary calls."""
    return _given(buffer, None)


def through_experts(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    experts: Any,
) -> Tensor:
    """As layers do it."""
    given = buffer, x, topk_idx, topk_weights, num_experts
    sums = functional.few_through_experts(*given, experts)
    if sums is None:
        rows = functional.dispatch_by_expert(*given)
        y = experts(rows.x, rows.offsets)
        sums = functional.combine_by_expert(buffer, y, rows)
    return sums


@contextmanager
def _given(buffer: Buffer, few: Any) -> Iterator[None]:
    before, buffer._few = buffer._few, few
    try:
        yield
    finally:
        if buffer._few is few:  # and the Buffer is open
            buffer._few = before
