"""(token, k) pairs by expert, in their order: what align and place share.

A program has a *segment* of consecutive pairs. Each counts its pairs by expert, a scan over the
segments says where each one's begin, and each puts its own in their places, a block of pairs at a
time: a pair's place among those of its expert in the block is found by comparing all with all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.launch import blocks, first_bad, launch, power_of_two, read_first_bad
from tokenyard.kernels.triton.layout import scan
from tokenyard.runtime import memory
from tokenyard.types import Aligned

_PAIRS = 32  # that are compared with each other
_OWNED = 32  # blocks whose expert a program looks for
_MOST_COUNTS = 1 << 22  # segments times experts: with a million experts segments are few and long


@triton.jit
def _tally_kernel(ids, tally, first_bad, num_pairs, num_experts, num_steps, PAIRS: tl.constexpr):
    """tally[segment, expert]: pairs of the segment that chose the expert."""
    segment = tl.program_id(0).to(tl.int64)
    for step in range(num_steps):
        pairs = (segment * num_steps + step) * PAIRS + tl.arange(0, PAIRS)
        live = pairs < num_pairs
        expert = tl.load(ids + pairs, mask=live, other=-1).to(tl.int64)
        routed = (expert >= 0) & (expert < num_experts)
        safe = tl.where(routed, expert, 0)
        tl.atomic_add(tally + segment * num_experts + safe, 1, mask=routed, sem="relaxed")
        bad = live & (expert != -1) & (routed == 0)
        tl.atomic_min(first_bad + safe * 0, pairs, mask=bad, sem="relaxed")


@triton.jit
def _ends_kernel(totals, begins, ends, num_experts, multiple, EXPERTS: tl.constexpr):
    """Where each expert's places begin and end, its share rounded up. One program: experts are few.

    totals [2, 0, 3], multiple 2: begins [0, 2, 2], ends [2, 2, 6]
    """
    before = tl.zeros([1], tl.int32)
    for first in range(0, num_experts, EXPERTS):
        experts = first + tl.arange(0, EXPERTS)
        inside = experts < num_experts
        total = tl.load(totals + experts, mask=inside, other=0)
        share = (total + (multiple - 1)) // multiple * multiple
        end = before + tl.cumsum(share, 0)
        tl.store(begins + experts, end - share, mask=inside)
        tl.store(ends + experts, end, mask=inside)
        before = before + tl.sum(share, 0)


@triton.jit
def _place_kernel(
    ids,
    tally,
    begins,
    out,
    num_pairs,
    num_experts,
    num_steps,
    INVERSE: tl.constexpr,
    ONE_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The place of each pair, -1 where it has none; or, if INVERSE, the pair of each place.

    `tally` says how many of its expert's pairs come before the segment's. If there are several
    steps the program goes on counting in it: only it reads that row, by atomics, since other
    threads wrote it.
    """
    segment = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PAIRS)
    for step in range(num_steps):
        first = (segment * num_steps + step) * PAIRS
        pairs = first + lanes
        live = pairs < num_pairs
        expert = tl.load(ids + pairs, mask=live, other=-1)
        routed = (expert >= 0) & (expert < num_experts)
        expert = tl.where(routed, expert, -1).to(tl.int32)
        safe = tl.where(routed, expert, 0)
        counter = tally + segment * num_experts + safe
        if ONE_STEP:
            before = tl.load(counter, mask=routed, other=0)
        else:
            before = tl.atomic_add(counter, 0, mask=routed, sem="relaxed")
            # All threads have read the counters before one adds to them.
            tl.debug_barrier()
        same = expert[:, None] == expert[None, :]
        earlier = tl.sum((same & (lanes[None, :] < lanes[:, None])).to(tl.int32), 1)
        if not ONE_STEP:
            later = tl.sum((same & (lanes[None, :] > lanes[:, None])).to(tl.int32), 1)
            # The last pair of an expert adds for all of them, before the next step reads.
            tl.atomic_add(counter, earlier + 1, mask=routed & (later == 0), sem="relaxed")
            tl.debug_barrier()
        place = tl.load(begins + safe, mask=routed, other=0) + before + earlier
        if INVERSE:
            tl.store(out + place, pairs.to(tl.int32), mask=routed)
        else:
            tl.store(out + pairs, tl.where(routed, place, -1).to(tl.int64), mask=live)


@triton.jit
def _owner_kernel(
    ends,
    expert_ids,
    num_blocks,
    block_size,
    num_experts,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A block's expert is the first that ends after the block's begin; -1 if none does."""
    places = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    begin = places.to(tl.int64) * block_size
    expert = tl.zeros([BLOCKS], tl.int32)
    for first in range(0, num_experts, EXPERTS):
        experts = first + tl.arange(0, EXPERTS)
        end = tl.load(ends + experts, mask=experts < num_experts, other=-1)
        past = (experts < num_experts)[None, :] & (end[None, :] <= begin[:, None])
        expert += tl.sum(past.to(tl.int32), 1)
    tl.store(
        expert_ids + places,
        tl.where(expert < num_experts, expert, -1),
        mask=places < num_blocks,
    )


class ByExpert:
    """The pairs of `ids`, counted."""

    def __init__(self, ids: Tensor, num_experts: int, multiple: int) -> None:
        device = ids.device
        most = max(1, _MOST_COUNTS // max(1, num_experts))
        pieces = blocks(ids.numel(), _PAIRS)
        num_steps = blocks(pieces, most)
        self._grid = (blocks(pieces, num_steps) if pieces else 0,)
        self._given = ids
        self._sizes = ids.numel(), num_experts, num_steps
        self._tally = torch.zeros(self._grid[0], num_experts, dtype=torch.int32, device=device)
        self.first_bad = first_bad(device)
        launch(
            _tally_kernel, self._grid, ids, self._tally, self.first_bad, *self._sizes, PAIRS=_PAIRS
        )
        bounds = memory.empty(2, num_experts, dtype=torch.int32, device=device)
        self._begins, self.ends = bounds.unbind(0)
        if num_experts:
            launch(
                _ends_kernel,
                (1,),
                scan(self._tally),
                self._begins,
                self.ends,
                num_experts,
                multiple,
                EXPERTS=min(1024, power_of_two(num_experts)),
            )

    def place(self, out: Tensor, inverse: bool) -> None:
        arguments: tuple[Any, ...] = (self._given, self._tally, self._begins, out, *self._sizes)
        how = {"INVERSE": inverse, "ONE_STEP": self._sizes[2] == 1, "PAIRS": _PAIRS}
        launch(_place_kernel, self._grid, *arguments, **how)


def align(
    topk_ids_TK: Tensor, block_size: int, num_experts: int, capacity: int
) -> tuple[Aligned, int]:
    device, numel = topk_ids_TK.device, topk_ids_TK.numel()
    pairs = ByExpert(topk_ids_TK, num_experts, block_size)
    sorted_ids = torch.full((capacity,), numel, dtype=torch.int32, device=device)
    pairs.place(sorted_ids, inverse=True)
    num_blocks = capacity // block_size
    expert_ids = memory.empty(num_blocks, dtype=torch.int32, device=device)
    launch(
        _owner_kernel,
        (blocks(num_blocks, _OWNED),),
        pairs.ends,
        expert_ids,
        num_blocks,
        block_size,
        num_experts,
        BLOCKS=_OWNED,
        EXPERTS=min(32, power_of_two(num_experts)),
    )
    return Aligned(sorted_ids, expert_ids, pairs.ends[-1:]), read_first_bad(pairs.first_bad)
