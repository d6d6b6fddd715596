"""Segments of other ranks: which stay mapped when a rank has given many back."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import transport_of
from tokenyard.shm.attached import AttachedSegments
from tokenyard.shm.control import NUM_DROPS
from tokenyard.testing import Exited, Processes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory"),
]


def outlive(group: Any, number: int) -> Tensor:
    """Rank 1 gives so many segments back, makes its part of a combine, and ends. Rank 0 looks for
    its rows after that: they lie in a block that it has mapped before.
    """
    rank, buffer = group.rank(), tokenyard.Buffer(group, transport="direct", timeout=scaled(30))
    x, ids = torch.ones(6, 64), torch.arange(6)[:, None] % 2
    for last in (False, False, False, True):
        rows: Any = buffer.dispatch_by_expert(x, ids, torch.ones(6, 1), num_experts=2)
        torch.distributed.barrier(group)  # rank 0 has read the rows of this dispatch
        if last and rank == 1:
            pool = transport_of(buffer).node.pool
            held = [pool.take(1000) for _ in range(number)]
            held.clear()
            pool.trim()
        if last and rank == 0:
            looked = _look_after_the_end()
        out = buffer.combine_by_expert(rows.x, rows.handle)
    if rank == 1:
        os._exit(0)
    assert looked
    return out


def _look_after_the_end() -> list[int]:
    """Look at what was given back only when its owner has died. Says whose was looked at."""
    look, looked = AttachedSegments._unmap_dropped, list[int]()

    def late(self: AttachedSegments, rank: int) -> None:
        while not self._liveness.dead_ranks():
            time.sleep(0.01)
        looked.append(rank)
        look(self, rank)

    AttachedSegments._unmap_dropped = late  # type: ignore[method-assign]
    return looked


@pytest.mark.parametrize("number", [1, NUM_DROPS, NUM_DROPS + 6])
def test_a_block_of_a_rank_that_has_ended_can_be_read(number: int) -> None:
    with Processes(2, timeout=scaled(60)) as pair:
        out, ended = pair.run(outlive, number, may_die=True)
    assert ended == Exited(0)
    assert torch.equal(out, torch.ones(6, 64)), out
