"""combine(out=): sums go to memory of the user, with the same bits as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.processes import Pools
from tokenyard.testing import Processes, assert_same, numbered_tokens, routing, run_virtual
from tokenyard.transports import available

pytestmark = pytest.mark.processes

NUM_RANKS, NUM_EXPERTS = 3, 6


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(NUM_RANKS)


def sum_into(group: Any, transport: str, num_tokens: int, hidden: int) -> list[torch.Tensor]:
    """Sums without out, and with it: at once, later, with biases and weights."""
    nodes = 2 if transport == "hierarchical" else None
    told = []
    with tokenyard.Buffer(group, transport=transport, ranks_per_node=nodes) as buffer:
        count = num_tokens + buffer.rank  # another number on each rank
        count = 0 if buffer.rank == 1 else count
        x = numbered_tokens(count, hidden, first=1000 * buffer.rank)
        topk_idx, weights = routing("uniform", count, 2, NUM_EXPERTS, seed=buffer.rank)
        got: Any = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS
        )
        more: Any
        bias = torch.full_like(x, 0.5)
        for more in ({}, {"bias": bias, "topk_weights": got.recv_topk_weights}):
            want = buffer.combine(got.recv_x, got.handle, **more)
            for is_async in (False, True):
                out = torch.full_like(x, torch.nan)
                back = buffer.combine(
                    got.recv_x, got.handle, **more, out=out, async_finish=is_async
                )
                if is_async:
                    back.event.current_stream_wait()
                assert back.x.data_ptr() == out.data_ptr()
                assert_same(out, want.x)
                assert_same(back.topk_weights, want.topk_weights)
                told.append(out)
        # Part of a larger tensor, whose other rows stay as they are.
        large = torch.full((count + 2, hidden), 7.0, dtype=x.dtype)
        buffer.combine(got.recv_x, got.handle, out=large[1:-1])
        assert_same(large[1:-1], told[0])
        assert (large[0] == 7).all()
        assert (large[-1] == 7).all()
    return told


@pytest.mark.parametrize("transport", available())
@pytest.mark.parametrize("num_tokens, hidden", [(5, 40), (300, 512)], ids=["few", "many"])
def test_sums_go_where_the_user_says(
    ranks: Processes, transport: str, num_tokens: int, hidden: int
) -> None:
    ranks.run(sum_into, transport, num_tokens, hidden)


def test_virtual_ranks_take_it_too() -> None:
    run_virtual(sum_into, NUM_RANKS, "collective", 5, 40)
