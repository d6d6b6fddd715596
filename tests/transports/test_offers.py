"""Offers are values: a transport keeps nothing between an offer and the exchange that it is for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import transport_of
from tests.cases.processes import Pools
from tokenyard.transports import RowsOut
from tokenyard.wire.columns import row_widths


def send_in_another_order(group: Any, transport: str) -> list[list[float]]:
    """Two offers are made before either is used, and the second is used first."""
    nodes = 1 if transport == "hierarchical" else None
    with tokenyard.Buffer(
        group, transport=transport, ranks_per_node=nodes, timeout=scaled(60)
    ) as buffer:
        both = torch.arange(group.size()).expand(3, -1).contiguous()
        weights = torch.ones(both.shape)
        got = buffer.dispatch(
            torch.ones(3, 4), topk_idx=both, topk_weights=weights, num_experts=group.size()
        )
        ways = transport_of(buffer)
        flow = got.handle.flow
        calls = []
        for turn in range(2):
            x = torch.full((3, 4), 10.0 * turn + group.rank())
            offer = ways.offer_rows(flow, row_widths([x]))
            words_RW = np.zeros((group.size(), len(offer.words)), np.int64)
            words_RW[:] = offer.words
            told_RW = ways.exchange(words_RW, "test")
            calls.append(RowsOut([x], flow, offer, told_RW, tokenyard.Config(), "test"))
        arrived: list[Tensor] = []
        for call in reversed(calls):
            (rows,), move = ways.send(call)
            move()
            arrived.append(rows[:, 0])
        return [rows.tolist() for rows in arrived]


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["ring", "hierarchical", "collective"])
def test_offers_may_be_used_in_any_order(transport: str, processes: Pools) -> None:
    for second, first in processes(2).run(send_in_another_order, transport):
        assert second == [10.0] * 3 + [11.0] * 3
        assert first == [0.0] * 3 + [1.0] * 3
