"""Calls of four ranks, one of which comes late on purpose."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases.clock import scaled

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 8, 2, 32, 5
SLOW = 2
NAP = scaled(0.1)  # seconds by which it is late

WAYS: dict[str, dict[str, Any]] = {
    "direct": {"transport": "direct"},
    "ring": {"transport": "ring"},
    "collective": {"transport": "collective"},
    "hierarchical": {"transport": "hierarchical", "ranks_per_node": 2},
}


def call(buffer: Any, rank: int, way: str = "normal") -> None:
    """Dispatch and combine: token t goes to expert t and the next."""
    first = torch.arange(TOKENS)[:, None] % EXPERTS
    idx = torch.cat([first, (first + 1) % EXPERTS], 1)
    x, weights = torch.full((TOKENS, HIDDEN), rank + 1.0), torch.ones(TOKENS, TOPK)
    if way == "low latency":
        got = buffer.low_latency_dispatch(x, idx, 8, EXPERTS, use_fp8=False)
        buffer.low_latency_combine(got.recv_x, idx, weights, got.handle)
    elif way == "by expert":
        rows = buffer.dispatch_by_expert(x, idx, weights, num_experts=EXPERTS)
        buffer.combine_by_expert(rows.x, rows.handle)
    else:
        asynchronous = way == "asynchronous"
        got = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=EXPERTS,
            async_finish=asynchronous,
        )
        event = buffer.combine(got.recv_x, got.handle, async_finish=asynchronous).event
        if asynchronous:
            event.current_stream_wait()
