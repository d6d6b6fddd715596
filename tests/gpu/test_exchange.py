"""Dispatch and combine on 1, 2 and 8 GPUs over NCCL and over symmetric memory, against `spec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenyard
from tokenyard import spec
from tokenyard.testing import assert_same, numbered_tokens, routing

NUM_EXPERTS, HIDDEN = 16, 1024


def given(rank: int, turn: int) -> tuple[torch.Tensor, ...]:
    tokens = 37 * (rank % 3)
    topk_idx, weights = routing("holes", tokens, 4, NUM_EXPERTS, seed=100 * turn + rank)
    return numbered_tokens(tokens, HIDDEN, first=1000 * rank + turn), topk_idx, weights


def job(group: Any, transport: str, async_finish: bool, on_comm: bool) -> None:
    rank, size = group.rank(), group.size()
    world = spec.World.even(NUM_EXPERTS, size)
    how: dict[str, Any] = {"async_finish": async_finish, "allocate_on_comm_stream": on_comm}
    with tokenyard.Buffer(group, transport=transport) as buffer:
        for turn in range(5):
            every = [given(one, turn) for one in range(size)]
            x, topk_idx, weights = (one.cuda() for one in every[rank])
            previous = buffer.capture() if async_finish else None
            got: Any = buffer.dispatch(
                x,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_experts=NUM_EXPERTS,
                previous_event=previous,
                **how,
            )
            sums = buffer.combine(
                got.recv_x,
                got.handle,
                previous_event=None if not async_finish else got.event,
                **how,
            )
            if async_finish:
                sums.event.current_stream_wait()
            layouts = [spec.layout(one[1], world) for one in every]
            want = spec.dispatch(
                [one[0] for one in every],
                layouts,
                world,
                topk_idxs=[one[1] for one in every],
                topk_weights=[one[2] for one in every],
            )
            assert_same(got.recv_x.cpu(), want[rank].x)
            assert_same(got.recv_topk_idx.cpu(), want[rank].topk_idx)
            assert_same(got.recv_topk_weights.cpu(), want[rank].topk_weights)
            assert_same(sums.x.cpu(), spec.combine([one.x for one in want], layouts, world)[rank])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize(
    "async_finish, on_comm", [(False, False), (True, False), (True, True)], ids=str
)
def test_exchange(
    run: Callable[..., None], num_devices: int, transport: str, async_finish: bool, on_comm: bool
) -> None:
    run(job, num_devices, transport, async_finish, on_comm)
