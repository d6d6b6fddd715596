"""How often ranks that share no memory meet in a low-latency call: as in any call of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.comm.torch_dist import GlooPart
from tokenyard.shm.mailbox import Mailbox

HIDDEN, TOKENS = 7168, 64


def count_exchanges(group: Any, transport: str) -> tuple[list[int], list[int], float]:
    """In each call: on connections, and in the mailbox of a node."""
    nodes = 2 if transport == "hierarchical" else None
    idx = torch.arange(TOKENS)[:, None] % 6
    weights = torch.ones(TOKENS, 1)
    sent, mailed = [0], [0]
    start, exchange = GlooPart.start, Mailbox.exchange

    def counted_start(self: GlooPart, *args: Any) -> Any:
        sent[-1] += 1
        return start(self, *args)

    def counted_exchange(self: Mailbox, *args: Any) -> Any:
        mailed[-1] += 1
        return exchange(self, *args)

    with tokenyard.Buffer(
        group, transport=transport, ranks_per_node=nodes, low_latency_mode=True, timeout=scaled(60)
    ) as buffer:
        counting: tuple[Any, Any] = (counted_start, counted_exchange)
        GlooPart.start, Mailbox.exchange = counting  # type: ignore[method-assign]
        try:
            for _ in range(2):
                x = torch.full((TOKENS, HIDDEN), 1.0 + group.rank())
                got: Any = buffer.low_latency_dispatch(x, idx, TOKENS, 6, use_fp8=False)
                sent.append(0)
                mailed.append(0)
                y = buffer.low_latency_combine(got.recv_x, idx, weights, got.handle).combined_x
                sent.append(0)
                mailed.append(0)
                assert torch.equal(y, x)
                del got
        finally:
            GlooPart.start, Mailbox.exchange = start, exchange  # type: ignore[method-assign]
    return sent[:-1], mailed[:-1], float(y.sum())


@pytest.mark.processes
def test_two_exchanges_a_call(processes: Pools) -> None:
    ranks = processes(3)
    for sent, mailed, _ in ranks.run(count_exchanges, "collective"):
        assert max(sent) <= 2
        assert max(mailed) == 0
    for rank, (sent, mailed, _) in enumerate(ranks.run(count_exchanges, "hierarchical")):
        words = 2 if rank == 2 else 1  # rank 2 is alone on its node, on both rails
        assert max(sent[2:]) <= words, sent  # few rows go with the words, once there is room
        assert max(mailed[2:]) <= 1, mailed
