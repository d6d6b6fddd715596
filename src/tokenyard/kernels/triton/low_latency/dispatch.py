"""What a low-latency dispatch does: lay tokens out in a block, and fill slots from all blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.floats import kind_of
from tokenyard.kernels.triton.launch import (
    blocks,
    first_bad,
    kept_numbers,
    launch,
    numbers,
    power_of_two,
    read_first_bad,
)
from tokenyard.kernels.triton.low_latency.granules import (
    LANES,
    check,
    granules,
    move_columns,
    rows_from,
)
from tokenyard.kernels.triton.quantize import cast_into
from tokenyard.kernels.triton.rows import pack
from tokenyard.runtime import memory
from tokenyard.wire.fp8 import NO_CAST, PACKED
from tokenyard.wire.slots import SlotResults, SlotShape, Stray

_PAIRS = 32  # of a program, each compared with as many others at once
_CHOICES = 512  # of tokens that a program looks at in one step


@triton.jit
def _number_kernel(
    topk_idx,
    block,
    sent,
    first_bad,
    num_pairs,
    num_topk,
    num_experts,
    PAIRS: tl.constexpr,
):
    """Copy topk_idx twice, and after it each pair's place among those of its expert.

    [[1, 0], [-1, 1]] -> [[0, 0], [-1, 1]]. A pair is compared with all before it, since that takes
    one launch, and tokens are few. What is bad is twice the pair, plus 1 if it is there again.
    """
    lanes = tl.arange(0, PAIRS)
    pairs = tl.program_id(0) * PAIRS + lanes
    live = pairs < num_pairs
    given = tl.load(topk_idx + pairs, mask=live, other=-1)
    routed = (given >= 0) & (given < num_experts)
    expert = tl.where(routed, given, -1).to(tl.int32)
    begin = pairs // num_topk * num_topk  # of the token
    nth = tl.zeros([PAIRS], tl.int32)
    again = tl.zeros([PAIRS], tl.int32)
    for first in range(0, (tl.program_id(0) + 1) * PAIRS, PAIRS):
        others = first + lanes
        other = tl.load(topk_idx + others, mask=others < num_pairs, other=-1)
        other = tl.where((other >= 0) & (other < num_experts), other, -1).to(tl.int32)
        same = (others[None, :] < pairs[:, None]) & (other[None, :] == expert[:, None])
        nth += tl.sum(same.to(tl.int32), 1)
        again += tl.sum((same & (others[None, :] >= begin[:, None])).to(tl.int32), 1)
    tl.store(block + pairs, given, mask=live)
    tl.store(sent + pairs, given, mask=live)
    tl.store(sent + num_pairs + pairs, tl.where(routed, nth, -1).to(tl.int64), mask=live)
    twice = routed & (again > 0)
    bad = live & (given != -1) & ((routed == 0) | twice)
    code = 2 * pairs.to(tl.int64) + twice.to(tl.int64)
    tl.atomic_min(first_bad + pairs * 0, code, mask=bad, sem="relaxed")


def stage_slots(
    x_TD: Tensor, topk_idx_TK: Tensor, shape: SlotShape, block_B: Tensor, sent_2TK: Tensor
) -> int:
    (num_tokens, num_topk), num_pairs = topk_idx_TK.shape, topk_idx_TK.numel()
    bad = first_bad(topk_idx_TK.device)
    launch(
        _number_kernel,
        (blocks(num_pairs, _PAIRS),),
        topk_idx_TK,
        block_B[: 8 * num_pairs].view(torch.int64),
        sent_2TK,
        bad,
        num_pairs,
        num_topk,
        shape.placement.num_experts,
        PAIRS=_PAIRS,
    )
    rows = block_B[shape.rows_at : shape.rows_at + num_tokens * shape.row_bytes]
    if shape.cast == NO_CAST:
        pack(x_TD.detach().view(torch.uint8), None, rows.view(num_tokens, shape.row_bytes))
    else:
        scales = block_B[shape.scales_at : shape.scales_at + num_tokens * shape.scale_bytes]
        scales = scales.view(torch.int8 if shape.cast == PACKED else torch.float32)
        kind = kind_of(shape.dtype)
        cast_into(x_TD.detach(), rows.view(torch.int8), scales, kind, shape.cast)
    place, twice = divmod(read_first_bad(bad), 2)
    if place < 0:
        return -1
    return -2 - place if twice else place


@triton.jit
def _find_kernel(
    sources,
    experts,
    chosen,
    found,
    stray,
    num_ranks,
    num_max,
    num_topk,
    num_experts,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
):
    """The tokens of a source that chose an expert, in their order, and how many they are.

    `sources` has the address of each rank's block, then how many tokens are in it. `stray` is the
    first source that wrote an id which no expert has.
    """
    both = tl.program_id(0).to(tl.int64)
    source = both % num_ranks
    expert = tl.load(experts + both // num_ranks)
    topk = tl.load(sources + source).to(tl.pointer_type(tl.int64))
    num_tokens = tl.load(sources + num_ranks + source).to(tl.int32)
    k = tl.arange(0, TOPK)
    count = 0
    for first in range(0, num_tokens, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        mask = (tokens < num_tokens)[:, None] & (k < num_topk)[None, :]
        pairs = tokens.to(tl.int64)[:, None] * num_topk + k[None, :]
        ids = tl.load(topk + pairs, mask=mask, other=-1)
        unknown = tl.max(((ids < -1) | (ids >= num_experts)).to(tl.int32), 1)
        tl.atomic_min(stray + tokens * 0, source + tokens * 0, mask=unknown != 0, sem="relaxed")
        hit = tl.max((ids == expert).to(tl.int32), 1)
        place = count + tl.cumsum(hit, 0) - hit
        tl.store(chosen + both * num_max + place, tokens, mask=hit != 0)
        count += tl.sum(hit, 0)
    tl.store(found + both, count)


@triton.jit
def _fill_kernel(
    sources,
    chosen,
    found,
    x,
    scales,
    counts,
    src_info,
    layout_range,
    num_ranks,
    num_max,
    rows_at,
    width,
    scales_at,
    scale_width,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALE_ELEMENT: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The rows of an expert and a source, after those of the sources before it."""
    both = tl.program_id(0).to(tl.int64)
    local, source = both // num_ranks, both % num_ranks
    block, lane = tl.program_id(1), tl.program_id(2)
    ranks = tl.arange(0, RANKS)
    begin = tl.sum(tl.load(found + local * num_ranks + ranks, mask=ranks < source, other=0), 0)
    count = tl.load(found + both)
    staged = tl.load(sources + source)
    rows = rows_from(staged + rows_at, ELEMENT, GROUP)
    x = x.to(tl.pointer_type(ELEMENT))
    for i in range(lane, count, LANES):
        token = tl.load(chosen + both * num_max + i).to(tl.int64)
        slot = local * num_ranks * num_max + begin + i
        write, read = x + slot * width * GROUP, rows + token * width * GROUP
        move_columns(write, read, width, block, GROUP, COLUMNS)
        if block == 0:
            tl.store(src_info + slot, token.to(tl.int32))
            if HAS_SCALES:
                write = scales.to(tl.pointer_type(SCALE_ELEMENT)) + slot * scale_width * SCALE_GROUP
                read = rows_from(staged + scales_at, SCALE_ELEMENT, SCALE_GROUP)
                read = read + token * scale_width * SCALE_GROUP
                move_columns(write, read, scale_width, 0, SCALE_GROUP, SCALE_COLUMNS)
    if (block == 0) & (lane == 0):
        tl.store(layout_range + both, (begin.to(tl.int64) << 32) | count)
        # The last source comes after all others, so it knows their number.
        if source == num_ranks - 1:
            tl.store(counts + local, begin + count)


def fill_slots(
    blocks: Sequence[Tensor], tokens: Sequence[int], shape: SlotShape, out: SlotResults
) -> None:
    device, num_ranks, num_max = out.x.device, shape.num_ranks, shape.num_max
    both = shape.num_local * num_ranks
    for source, count in enumerate(tokens):
        if not 0 <= count <= num_max:
            raise Stray(source)
    addresses = [block.data_ptr() for block in blocks]
    sources = numbers([*addresses, *tokens], device)
    stray = first_bad(device)
    own = kept_numbers(tuple(shape.placement.experts_of_rank[shape.rank]), device)
    chosen = memory.empty(both, num_max, dtype=torch.int32, device=device)
    found = memory.empty(both, dtype=torch.int32, device=device)
    topk = power_of_two(shape.num_topk)
    launch(
        _find_kernel,
        (both,),
        sources,
        own,
        chosen,
        found,
        stray,
        num_ranks,
        num_max,
        shape.num_topk,
        shape.placement.num_experts,
        TOKENS=min(power_of_two(num_max), max(1, _CHOICES // topk)),
        TOPK=topk,
    )
    _fill(sources, chosen, found, addresses, shape, out)
    check(stray)


def _fill(
    sources: Tensor,
    chosen: Tensor,
    found: Tensor,
    addresses: Sequence[int],
    shape: SlotShape,
    out: SlotResults,
) -> None:
    num_ranks, num_max = shape.num_ranks, shape.num_max
    rows = granules(shape.row_bytes, out.x.data_ptr(), *addresses)
    scales = out.x if out.scales is None else out.scales
    scale_rows = granules(shape.scale_bytes, scales.data_ptr(), *addresses)
    launch(
        _fill_kernel,
        (shape.num_local * num_ranks, rows.num_blocks, LANES),
        sources,
        chosen,
        found,
        out.x.view(torch.int8),
        scales.view(torch.int8),
        out.counts,
        out.src_info,
        out.layout_range,
        num_ranks,
        num_max,
        shape.rows_at,
        rows.width,
        shape.scales_at,
        scale_rows.width,
        ELEMENT=rows.element,
        GROUP=rows.group,
        COLUMNS=rows.columns,
        HAS_SCALES=out.scales is not None,
        SCALE_ELEMENT=scale_rows.element,
        SCALE_GROUP=scale_rows.group,
        SCALE_COLUMNS=power_of_two(scale_rows.width * scale_rows.group),
        RANKS=power_of_two(num_ranks),
        LANES=LANES,
    )
