"""Buffers of one group that are called at the same time: what a rank does."""

from __future__ import annotations

from typing import Any

import torch

import tokenyard
from tests.cases.clock import scaled

TURNS = 100


def dispatch(buffer: tokenyard.Buffer, value: float, is_async: bool = False) -> Any:
    topk_idx = torch.arange(64)[:, None] % 4
    return buffer.dispatch(
        torch.full((64, 256), value),
        topk_idx=topk_idx,
        topk_weights=torch.ones(64, 1),
        num_experts=4,
        async_finish=is_async,
    )


def two_buffers(group: Any, transport: str) -> str:
    """One moves rows while the other, and a third that is opened meanwhile, are called."""
    with (
        tokenyard.Buffer(group, transport=transport, timeout=scaled(60)) as first,
        tokenyard.Buffer(group, transport=transport, timeout=scaled(60)) as second,
    ):
        for turn in range(TURNS):
            one = dispatch(first, float(turn), is_async=True)
            if turn % 20 == 10:
                with tokenyard.Buffer(group, transport=transport, timeout=scaled(60)) as third:
                    assert (dispatch(third, -1.0).recv_x == -1).all()
            two = dispatch(second, turn + 0.5)
            one.event.current_stream_wait()
            if not ((one.recv_x == turn).all() and (two.recv_x == turn + 0.5).all()):
                return f"rows went astray in turn {turn}"
    return "ok"
