"""Ranks of a part take fewer rows than they have room for: what each does, and what it must get."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases.clock import scaled
from tokenyard.comm import connect
from tokenyard.comm.base import Exchange
from tokenyard.testing import assert_same

ROOM = 70_000


def shorter(group: Any) -> list[torch.Tensor]:
    whole = connect(group, scaled(60))
    part = whole.part(range(whole.size), "shorter")
    got = []
    for most in (0, 3, ROOM):
        counts = [max(0, most - rank) for rank in range(part.size)]
        counts[part.rank] = 0
        rooms = [ROOM * (rank != part.rank) for rank in range(part.size)]
        out = torch.zeros(sum(rooms), 1, dtype=torch.uint8)
        sent = torch.full((sum(counts), 1), 1 + part.rank, dtype=torch.uint8)
        part.all_to_all(Exchange(out, sent, rooms, counts, "test", at_most=True))
        got.append(out)
    part.close()
    return got


def check(results: list[list[torch.Tensor]]) -> None:
    for rank, outs in enumerate(results):
        for most, out in zip((0, 3, ROOM), outs):
            want = torch.zeros(len(results), ROOM, dtype=torch.uint8)
            for source, row in enumerate(want):
                row[: max(0, most - rank)] = 1 + source
            others = [one for one in range(len(results)) if one != rank]
            assert_same(out.view(-1, ROOM), want[others])
