"""Which rank is on which node, and which expert on which rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.clock import scaled
from tokenyard.topology import Placement, Topology


def test_topology() -> None:
    assert Topology.even(6, 4).node_of_rank == (0, 0, 0, 0, 1, 1)
    interleaved = Topology.from_marks([9, 9, 4, 9, 4])
    assert interleaved.node_of_rank == (0, 0, 1, 0, 1)
    assert (interleaved.num_ranks, interleaved.num_nodes) == (5, 2)


def test_placement_numbers_a_ranks_experts_from_0() -> None:
    placement = Placement(torch.tensor([2, 0, 2, 2, 0], dtype=torch.int32), 4)
    assert placement.experts_of_rank == [[1, 4], [], [0, 2, 3], []]
    assert placement.local_of_expert.tolist() == [0, 0, 1, 2, 1]
    assert placement.local_table(2).tolist() == [0, -1, 1, 2, -1]
    assert placement.local_table(1).tolist() == [-1] * 5
    assert placement.padded_experts_RL.tolist() == [[1, 4, 5], [5, 5, 5], [0, 2, 3], [5, 5, 5]]


def test_a_table_has_one_address_whichever_thread_asks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call on the user's thread and one on the Buffer's may both be the first to need it."""
    placement, where = Placement.even(4, 2), torch.where
    meeting = threading.Barrier(2, timeout=scaled(60))

    def slow(*args: Any) -> Tensor:
        made = where(*args)
        meeting.wait()
        return made

    monkeypatch.setattr(torch, "where", slow)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(placement.local_table, [0, 0])
    monkeypatch.undo()
    assert one is other
    assert one is placement.local_table(0)
