"""What a low-latency combine does: give rows back, find each pair's row again, and sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.floats import FLOAT64, as_element, as_passed, kind_of, narrow, widen
from tokenyard.kernels.triton.launch import (
    blocks,
    first_bad,
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
from tokenyard.kernels.triton.reduce import column_block
from tokenyard.wire.slots import SlotPairs, SlotShape

_PICKED = 256  # pairs of a program


@triton.jit
def _back_kernel(
    targets,
    y,
    layout_range,
    tables,
    num_ranks,
    num_slots,
    table_stride,
    width,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOCALS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The rows of an expert and a source, after those of the experts before it.

    A range is begin << 32 | count, so that count is what an int32 has room for.
    """
    both = tl.program_id(0).to(tl.int64)
    local, source = both // num_ranks, both % num_ranks
    block, lane = tl.program_id(1), tl.program_id(2)
    others = tl.arange(0, LOCALS)
    before = tl.load(layout_range + others * num_ranks + source, mask=others < local, other=0)
    first = tl.sum(before.to(tl.int32), 0).to(tl.int64)
    given = tl.load(layout_range + both)
    begin, count = local * num_slots + (given >> 32), given.to(tl.int32)
    out = rows_from(tl.load(targets + source), ELEMENT, GROUP)
    y = y.to(tl.pointer_type(ELEMENT))
    for i in range(lane, count, LANES):
        write, read = out + (first + i) * width * GROUP, y + (begin + i) * width * GROUP
        move_columns(write, read, width, block, GROUP, COLUMNS)
    if (block == 0) & (lane == 0):
        tl.store(tables + source * table_stride + local, first)


def stage_back(
    y_LSD: Tensor, layout_range_LR: Tensor, outs: Sequence[Tensor], tables_RL: Tensor
) -> None:
    num_local, num_slots, hidden = y_LSD.shape
    targets = [out.data_ptr() for out in outs]
    rows = granules(hidden * y_LSD.element_size(), y_LSD.data_ptr(), *targets)
    launch(
        _back_kernel,
        (num_local * len(outs), rows.num_blocks, LANES),
        numbers(targets, y_LSD.device),
        y_LSD.detach().view(torch.int8),
        layout_range_LR,
        tables_RL,
        len(outs),
        num_slots,
        tables_RL.stride(0),
        rows.width,
        ELEMENT=rows.element,
        GROUP=rows.group,
        COLUMNS=rows.columns,
        LOCALS=power_of_two(num_local),
        LANES=LANES,
    )


@triton.jit
def _pick_kernel(topk_idx, sent, picked, first_bad, num_pairs, num_topk, PAIRS: tl.constexpr):
    """A token names an expert once, so that one of its pairs at most is found."""
    pairs = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    live = pairs < num_pairs
    expert = tl.load(topk_idx + pairs, mask=live, other=-1)
    begin = pairs // num_topk * num_topk  # of the token
    place = tl.full([PAIRS], -1, tl.int64)
    for k in range(num_topk):
        was = tl.load(sent + begin + k, mask=live, other=-1)
        found = live & (expert >= 0) & (was == expert)
        place = tl.where(found, tl.load(sent + num_pairs + begin + k, mask=found, other=-1), place)
    tl.store(picked + pairs, place, mask=live)
    bad = live & (expert != -1) & (place < 0)
    tl.atomic_min(first_bad + pairs * 0, pairs, mask=bad, sem="relaxed")


def pick_slots(topk_idx_TK: Tensor, sent_2TK: Tensor, picked_TK: Tensor) -> int:
    bad, num_pairs = first_bad(topk_idx_TK.device), topk_idx_TK.numel()
    launch(
        _pick_kernel,
        (blocks(num_pairs, _PICKED),),
        topk_idx_TK,
        sent_2TK,
        picked_TK,
        bad,
        num_pairs,
        topk_idx_TK.shape[1],
        PAIRS=_PICKED,
    )
    return read_first_bad(bad)


@triton.jit
def _sum_kernel(
    sources,
    stray,
    tables,
    rank_of_expert,
    local_of_expert,
    topk_idx,
    picked,
    weights,
    out,
    num_topk,
    num_ranks,
    hidden,
    table_stride,
    KIND: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a block of columns of one token's rows, term by term.

    `sources` has the address of each rank's rows, then how many they are. `stray` is the first rank
    whose table leads past its rows, which are not read then.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros([BLOCK], tl.float64 if KIND == FLOAT64 else tl.float32)
    for k in range(num_topk):
        pair = token * num_topk + k
        place = tl.load(picked + pair)
        if place >= 0:
            expert = tl.load(topk_idx + pair)
            owner = tl.load(rank_of_expert + expert).to(tl.int64)
            first = tl.load(tables + owner * table_stride + tl.load(local_of_expert + expert))
            rows = tl.load(sources + owner).to(tl.pointer_type(ELEMENT))
            there = (first >= 0) & (first < tl.load(sources + num_ranks + owner) - place)
            tl.atomic_min(stray, owner, mask=there == 0, sem="relaxed")
            row = tl.multiple_of(rows, ALIGNED) + (first + place) * hidden
            readable = columns < tl.where(there, hidden, 0)
            term = widen(tl.load(row + columns, mask=readable), KIND)
            total = total + tl.load(weights + pair).to(total.dtype) * term
    tl.store(out + token * hidden + columns, narrow(total, KIND), mask=inside)


def sum_slots(
    rows: Sequence[Tensor], tables_RL: Tensor, pairs: SlotPairs, shape: SlotShape, out_TD: Tensor
) -> Tensor:
    addresses, stray = [one.data_ptr() for one in rows], first_bad(out_TD.device)
    num_tokens, hidden = out_TD.shape
    kind = kind_of(out_TD.dtype)
    block = column_block(hidden, out_TD.element_size())
    launch(
        _sum_kernel,
        (num_tokens, blocks(hidden, block)),
        numbers([*addresses, *map(len, rows)], out_TD.device),
        stray,
        tables_RL,
        shape.placement.rank_of_expert,
        shape.placement.local_of_expert,
        pairs.topk_idx,
        pairs.picked,
        pairs.weights.detach(),
        as_passed(out_TD),
        pairs.topk_idx.shape[1],
        len(rows),
        hidden,
        tables_RL.stride(0),
        KIND=kind,
        ELEMENT=as_element(kind),
        ALIGNED=math.gcd(16, *addresses),
        BLOCK=block,
    )
    check(stray)
    return out_TD
