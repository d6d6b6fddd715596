"""A rank that comes to an opening when another has given up waiting for it, and tries again."""

from __future__ import annotations

import time
from typing import Any

import torch

import tokenyard
from tests.cases.clock import scaled


def tries(group: Any, transport: str, is_first: bool) -> list[str]:
    """What each try of a Buffer gave, until one was open. Rank 1 comes late to the first one over
    the group, or to the second.
    """
    if not is_first:
        tokenyard.Buffer(group, transport=transport).close()
    limit = scaled(1.0)
    if group.rank() == 1:
        time.sleep(1.8 * limit + 1)
    told: list[str] = []
    for _ in range(6):
        try:
            with tokenyard.Buffer(group, transport=transport, timeout=limit) as buffer:
                rows = buffer.all_gather(torch.full((1,), float(group.rank()))).x
                return [*told, str(rows.tolist())]
        except tokenyard.PeerTimeout as error:
            told.append(str(error))
    return told


def check(by_rank: list[list[str]]) -> None:
    """Only rank 0 waited in vain, for rank 1, and all have opened the Buffer together."""
    rows = str([float(rank) for rank in range(len(by_rank))])
    for rank, told in enumerate(by_rank):
        *late, last = told
        assert last == rows, by_rank
        assert bool(late) == (rank != 1), by_rank
        assert all("rank 1, on rank" in text for text in late), by_rank
