"""Collectives of the user's, on the groups that Buffers use too."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.steps import Collective


class Begun(NamedTuple):
    work: dist.Work
    out: Tensor
    want: Tensor


def begin(group: dist.ProcessGroup, step: Collective, number: int, place: int) -> Begun:
    """`number` is the step's, `place` this rank's in the group."""
    size = len(step.members)
    first = torch.arange(100.0 * number, 100.0 * number + size)  # what the first rank gives
    mine, out = first + 10 * place, torch.zeros(size)
    if step.kind == "all_reduce":
        out = mine.clone()
        want = size * first + 10 * sum(range(size))
        return Begun(dist.all_reduce(out, group=group, async_op=True), out, want)
    if step.kind == "all_to_all":
        want = first[place] + 10.0 * torch.arange(size)
        return Begun(dist.all_to_all_single(out, mine, group=group, async_op=True), out, want)
    if step.kind == "broadcast":
        out = mine.clone()
        work = dist.broadcast(out, step.members[0], group=group, async_op=True)
        return Begun(work, out, first)
    return Begun(dist.barrier(group=group, async_op=True), out, out)
