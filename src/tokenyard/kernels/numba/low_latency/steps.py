"""The low-latency mode's steps: lay tokens out in a block, fill slots, and the way back.

Everything is an address and some sizes, and blocks may lie in other ranks' memory. `slot_calls`
makes whole calls of these steps for ranks that share memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import LIKE, copy_bytes, pointer
from tokenyard.kernels.numba.llvm.sums import sum_scaled
from tokenyard.kernels.numba.quantize import to_fp8_groups
from tokenyard.kernels.numba.rows import copy_row, streams
from tokenyard.wire.fp8 import GROUP, NO_CAST
from tokenyard.wire.slots import LOW, SlotResults, SlotShape, Stray

_INT32 = np.empty(0, np.int32)
_INT64 = np.empty(0, np.int64)
_FLOAT32 = np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def number_pairs(topk_idx, num_tokens, num_topk, num_experts, sent):
    """Copy topk_idx, and after it each pair's place among those of its expert.

    -1, or p where pair p is no expert, or -2 - p where it names its token's expert again.
    """
    seen = np.zeros(num_experts, np.int64)
    experts, copy = pointer(topk_idx, _INT64), pointer(sent, _INT64)
    numel = num_tokens * num_topk
    for t in range(num_tokens):
        for i in range(t * num_topk, (t + 1) * num_topk):
            expert = experts[i]
            if expert < -1 or expert >= num_experts:
                return i
            copy[i], copy[numel + i] = expert, -1
            if expert >= 0:
                for j in range(t * num_topk, i):
                    if experts[j] == expert:
                        return -2 - i
                copy[numel + i] = seen[expert]
                seen[expert] += 1
    return -1


@njit(nogil=True, cache=True)
def stage_rows(x, num_tokens, num_topk, sent, block, rows_at, row_bytes, scales_at, cast, like):
    """Into a block: topk_idx, and rows as they are or cast. In FP8 an element is a byte."""
    copy_bytes(block, sent, 8 * num_tokens * num_topk)
    if cast == NO_CAST:
        copy_bytes(block + rows_at, x, num_tokens * row_bytes)
    else:
        num_groups = num_tokens * (row_bytes // GROUP)
        to_fp8_groups(x, block + rows_at, block + scales_at, num_groups, cast, 0, like)


@njit(nogil=True, cache=True)
def fill_from(
    source,
    block,
    num_tokens,
    num_topk,
    num_experts,
    local_of_expert,
    num_ranks,
    num_slots,
    rows_at,
    row_bytes,
    scales_at,
    scale_bytes,
    x,
    scales,
    counts,
    src_info,
    layout_range,
):
    """One source's rows after those of the sources before it. `counts` is where experts stand.

    Whether the block is one that a rank may have written: its experts' numbers become addresses.
    """
    table, ends = pointer(local_of_expert, _INT64), pointer(counts, _INT32)
    experts, tokens = pointer(block, _INT64), pointer(src_info, _INT32)
    ranges = pointer(layout_range, _INT64)
    streaming = streams(row_bytes, num_tokens * num_topk * row_bytes)
    for t in range(num_tokens):
        row, scale = block + rows_at + t * row_bytes, block + scales_at + t * scale_bytes
        for i in range(t * num_topk, (t + 1) * num_topk):
            expert = experts[i]
            if expert == -1:
                continue
            if expert < 0 or expert >= num_experts:
                fence_stores()
                return False
            local = table[expert]
            if local < 0:
                continue
            if ends[local] >= num_slots:
                fence_stores()
                return False
            slot = local * num_slots + ends[local]
            copy_row(x + slot * row_bytes, row, row_bytes, streaming)
            if scale_bytes > 0:
                copy_bytes(scales + slot * scale_bytes, scale, scale_bytes)
            tokens[slot] = t
            ranges[local * num_ranks + source] += 1
            ends[local] += 1
    fence_stores()
    return True


@njit(nogil=True, cache=True)
def begin_ranges(source, num_local, num_ranks, counts, layout_range):
    """No rows of this source yet: they begin where each expert stands."""
    ends, ranges = pointer(counts, _INT32), pointer(layout_range, _INT64)
    for local in range(num_local):
        ranges[local * num_ranks + source] = np.int64(ends[local]) << 32


@njit(nogil=True, cache=True)
def count_rows(layout_range, num_local, num_ranks, source):
    """The rows of one source, of all experts."""
    ranges, total = pointer(layout_range, _INT64), np.int64(0)
    for local in range(num_local):
        total += ranges[local * num_ranks + source] & LOW
    return total


@njit(nogil=True, cache=True)
def give_back(y, num_slots, row_bytes, layout_range, num_local, num_ranks, source, out, row, table):
    """Copy the rows of one source to `out`, from `row` on, and note where each expert's begin.

    The row after the last. Without `out` nothing is copied: the table says where rows are in y.
    """
    ranges, first = pointer(layout_range, _INT64), pointer(table, _INT64)
    total = count_rows(layout_range, num_local, num_ranks, source)
    streaming = streams(row_bytes, total * row_bytes)
    for local in range(num_local):
        given = ranges[local * num_ranks + source]
        begin, count = given >> 32, given & LOW
        if out == 0:
            first[local] = local * num_slots + begin
            continue
        first[local] = row
        if count > 0:
            place = y + (local * num_slots + begin) * row_bytes
            copy_row(out + row * row_bytes, place, count * row_bytes, streaming)
            row += count
    fence_stores()
    return row


@njit(nogil=True, cache=True)
def pick_pairs(topk_idx, sent, picked, num_tokens, num_topk):
    """The place of each pair's row; the first pair that dispatch did not send, or -1."""
    experts, was, to = pointer(topk_idx, _INT64), pointer(sent, _INT64), pointer(picked, _INT64)
    numel = num_tokens * num_topk
    for t in range(num_tokens):
        for i in range(t * num_topk, (t + 1) * num_topk):
            expert = experts[i]
            to[i] = -1
            if expert == -1:
                continue
            found = i if was[i] == expert else -1  # as a rule it is what dispatch was given
            for j in range(t * num_topk, (t + 1) * num_topk):
                if found < 0 and was[j] == expert:
                    found = j
            if found < 0:
                return i
            to[i] = was[numel + found]
    return -1


@njit(nogil=True, cache=True)
def sum_tokens(
    rows,
    limits,
    tables,
    masked,
    rank_of_expert,
    local_of_expert,
    row_bytes,
    topk_idx,
    picked,
    weights,
    num_tokens,
    num_topk,
    hidden,
    out,
    like,
    factors,
):
    """rows, limits, tables and masked are arrays, a word for each rank: where its rows begin, how
    many may be read there, where it says which are whose, and whether it is left out. factors has
    room for K weights.

    A rank whose table leads past its rows, or -1.
    """
    owner_of, local_of = pointer(rank_of_expert, _INT32), pointer(local_of_expert, _INT32)
    experts, picks = pointer(topk_idx, _INT64), pointer(picked, _INT64)
    given, sources = pointer(weights, _FLOAT32), np.empty(num_topk, np.int64)
    for t in range(num_tokens):
        count = 0
        for i in range(t * num_topk, (t + 1) * num_topk):
            if picks[i] < 0:
                continue
            owner = owner_of[experts[i]]
            if masked[owner] != 0:
                continue
            first = pointer(tables[owner], _INT64)[local_of[experts[i]]]
            if first < 0 or first >= limits[owner] - picks[i]:
                return owner
            sources[count] = rows[owner] + (first + picks[i]) * row_bytes
            factors[count] = given[i]
            count += 1
        place = out + t * row_bytes
        sum_scaled(place, sources.ctypes.data, factors.ctypes.data, count, hidden, 0, like)
    return -1


def wide_scratch(num_topk: int, size: int) -> np.ndarray:
    """Room for a token's weights, as wide as the sums of elements of this size."""
    return np.empty(num_topk, np.float64 if size == 8 else np.float32)


def stage_slots(
    x_TD: Tensor, topk_idx_TK: Tensor, shape: SlotShape, block_B: Tensor, sent_2TK: Tensor
) -> int:
    num_tokens, num_topk = topk_idx_TK.shape
    num_experts, sent = shape.placement.num_experts, sent_2TK.data_ptr()
    bad = number_pairs(topk_idx_TK.data_ptr(), num_tokens, num_topk, num_experts, sent)
    if bad == -1:
        stage_rows(
            x_TD.data_ptr(),
            num_tokens,
            num_topk,
            sent,
            block_B.data_ptr(),
            shape.rows_at,
            shape.row_bytes,
            shape.scales_at,
            shape.cast,
            cast_like(shape),
        )
    return bad


def cast_like(shape: SlotShape) -> np.ndarray:
    """What the cast reads; where there is none any will do."""
    return LIKE[torch.bfloat16 if shape.cast == NO_CAST else shape.dtype]


def fill_slots(
    blocks: Sequence[Tensor], tokens: Sequence[int], shape: SlotShape, out: SlotResults
) -> None:
    out.counts.zero_()
    counts, ranges = out.counts.data_ptr(), out.layout_range.data_ptr()
    table = shape.placement.local_table(shape.rank).data_ptr()
    for source, block in enumerate(blocks):
        begin_ranges(source, shape.num_local, shape.num_ranks, counts, ranges)
        may_be = 0 <= tokens[source] <= shape.num_max and fill_from(
            source,
            block.data_ptr(),
            tokens[source],
            shape.num_topk,
            shape.placement.num_experts,
            table,
            shape.num_ranks,
            shape.num_slots,
            shape.rows_at,
            shape.row_bytes,
            shape.scales_at,
            shape.scale_bytes,
            out.x.data_ptr(),
            0 if out.scales is None else out.scales.data_ptr(),
            counts,
            out.src_info.data_ptr(),
            ranges,
        )
        if not may_be:
            raise Stray(source)


def stage_back(
    y_LSD: Tensor, layout_range_LR: Tensor, outs: Sequence[Tensor], tables_RL: Tensor
) -> None:
    num_local, num_slots, hidden = y_LSD.shape
    for source, out_NB in enumerate(outs):
        give_back(
            y_LSD.data_ptr(),
            num_slots,
            hidden * y_LSD.element_size(),
            layout_range_LR.data_ptr(),
            num_local,
            len(outs),
            source,
            out_NB.data_ptr(),
            0,
            tables_RL[source].data_ptr(),
        )


def pick_slots(topk_idx_TK: Tensor, sent_2TK: Tensor, picked_TK: Tensor) -> int:
    return pick_pairs(
        topk_idx_TK.data_ptr(), sent_2TK.data_ptr(), picked_TK.data_ptr(), *topk_idx_TK.shape
    )


def sum_slots(
    rows: Sequence[Tensor],
    tables_RL: Tensor,
    topk_idx_TK: Tensor,
    picked_TK: Tensor,
    topk_weights_TK: Tensor,
    shape: SlotShape,
    out_TD: Tensor,
) -> Tensor:
    bases = np.array([one.data_ptr() for one in rows], np.int64)
    limits = np.array([len(one) for one in rows], np.int64)
    tables = np.array([table.data_ptr() for table in tables_RL], np.int64)
    nobody = np.zeros(len(rows), np.int64)
    num_tokens, num_topk = topk_idx_TK.shape
    size = out_TD.element_size()
    stray = sum_tokens(
        bases,
        limits,
        tables,
        nobody,
        shape.placement.rank_of_expert.data_ptr(),
        shape.placement.local_of_expert.data_ptr(),
        shape.hidden * size,
        topk_idx_TK.data_ptr(),
        picked_TK.data_ptr(),
        topk_weights_TK.data_ptr(),
        num_tokens,
        num_topk,
        shape.hidden,
        out_TD.data_ptr(),
        LIKE[out_TD.dtype],
        wide_scratch(num_topk, size),
    )
    if stray >= 0:
        raise Stray(int(stray))
    return out_TD
