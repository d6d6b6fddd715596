"""The low-latency mode's steps: lay tokens out in a block, fill slots, and the way back.

A step takes the address of a table (`wire.call_table`); blocks may lie in other ranks' memory. For
ranks that share memory `calls` makes whole calls of these steps. The launchers below are for
callers that bring blocks from rank to rank by other means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.pointers import (
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    LIKE,
    copy_bytes,
    pointer,
)
from tokenyard.kernels.numba.llvm.sums import sum_scaled
from tokenyard.kernels.numba.quantize import to_fp8_groups
from tokenyard.kernels.numba.rows import copy_row, streams
from tokenyard.wire import call_table as at
from tokenyard.wire import int64s
from tokenyard.wire.call_table import new_table
from tokenyard.wire.fp8 import GROUP, NO_CAST
from tokenyard.wire.slots import SlotPairs, SlotResults, SlotShape, Stray
from tokenyard.wire.verdicts import LOW


@njit(nogil=True, cache=True)
def number_pairs(table):
    """Copy topk_idx to SENT, and after it each pair's place among those of its expert.

    -1, or p where pair p is no expert, or -2 - p where it names its token's expert again.
    """
    words = pointer(table, INT64)
    num_tokens, num_topk = words[at.NUM_TOKENS], words[at.NUM_TOPK]
    num_experts, numel = words[at.NUM_EXPERTS], num_tokens * num_topk
    experts, copy = pointer(words[at.TOPK_IDX], INT64), pointer(words[at.SENT], INT64)
    seen = np.zeros(num_experts, np.int64)
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
def stage_rows(table, like):
    """Write this rank's block: topk_idx, and rows as they are or cast to FP8, a byte an element."""
    words = pointer(table, INT64)
    num_tokens, row_bytes = words[at.NUM_TOKENS], words[at.ROW_BYTES]
    x, block, cast = words[at.X], words[at.BLOCK], words[at.CAST]
    copy_bytes(block, words[at.SENT], 8 * num_tokens * words[at.NUM_TOPK])
    rows = block + words[at.ROWS_AT]
    if cast == NO_CAST:
        copy_bytes(rows, x, num_tokens * row_bytes)
    else:
        num_groups = num_tokens * (row_bytes // GROUP)
        to_fp8_groups(x, rows, block + words[at.SCALES_AT], num_groups, cast, 0, like)


@njit(nogil=True, cache=True)
def fill_from(table, source, block, num_tokens):
    """Put one source's rows after those of the sources before it, and count them in COUNTS.

    Whether the block is one that a rank may have written: its experts' numbers become addresses.
    """
    words = pointer(table, INT64)
    num_topk, num_experts = words[at.NUM_TOPK], words[at.NUM_EXPERTS]
    num_ranks, num_slots = words[at.SIZE], words[at.NUM_SLOTS]
    row_bytes, scale_bytes = words[at.ROW_BYTES], words[at.SCALE_BYTES]
    x, scales = words[at.X], words[at.SCALES]
    rows, rows_scales = block + words[at.ROWS_AT], block + words[at.SCALES_AT]
    own, experts = pointer(words[at.OWN_EXPERTS], INT64), pointer(block, INT64)
    ends, tokens = pointer(words[at.COUNTS], INT32), pointer(words[at.SRC_INFO], INT32)
    ranges = pointer(words[at.LAYOUT_RANGE], INT64)
    streaming = streams(row_bytes, num_tokens * num_topk * row_bytes)
    for t in range(num_tokens):
        row, scale = rows + t * row_bytes, rows_scales + t * scale_bytes
        for i in range(t * num_topk, (t + 1) * num_topk):
            expert = experts[i]
            if expert == -1:
                continue
            if expert < 0 or expert >= num_experts:
                fence_stores()
                return False
            local = own[expert]
            if local < 0:
                continue
            # So many only if a token names an expert twice, which no correct rank sends.
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
def begin_ranges(table, source):
    """This source has no rows yet: its ranges begin where each expert's rows end."""
    words = pointer(table, INT64)
    num_local, num_ranks = words[at.NUM_LOCAL], words[at.SIZE]
    ends, ranges = pointer(words[at.COUNTS], INT32), pointer(words[at.LAYOUT_RANGE], INT64)
    for local in range(num_local):
        ranges[local * num_ranks + source] = np.int64(ends[local]) << 32


@njit(nogil=True, cache=True)
def count_rows(table, source):
    """The rows of one source, of all experts."""
    words = pointer(table, INT64)
    ranges, total = pointer(words[at.LAYOUT_RANGE], INT64), np.int64(0)
    for local in range(words[at.NUM_LOCAL]):
        total += ranges[local * words[at.SIZE] + source] & LOW
    return total


@njit(nogil=True, cache=True)
def give_back(table, source, out, row, firsts):
    """Copy the rows of one source to `out`, from `row` on, and note in `firsts` where each expert's
    begin.

    Returns the row after the last. Without `out` nothing is copied, and the notes are about y.
    """
    words = pointer(table, INT64)
    num_local, num_ranks, num_slots = words[at.NUM_LOCAL], words[at.SIZE], words[at.NUM_SLOTS]
    y, row_bytes = words[at.Y], words[at.ROW_BYTES]
    ranges, first = pointer(words[at.LAYOUT_RANGE], INT64), pointer(firsts, INT64)
    streaming = streams(row_bytes, count_rows(table, source) * row_bytes)
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
def pick_pairs(table):
    """Find the place of each pair's row; the first pair that dispatch did not send, or -1."""
    words = pointer(table, INT64)
    num_tokens, num_topk = words[at.NUM_TOKENS], words[at.NUM_TOPK]
    experts, was = pointer(words[at.TOPK_IDX], INT64), pointer(words[at.SENT], INT64)
    to, numel = pointer(words[at.PICKED], INT64), num_tokens * num_topk
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
def sum_tokens(table, rows, limits, tables, masked, like, wide):
    """Sum each token's rows into OUT. The arrays have a word for each rank: where its rows begin,
    how many may be read there, where it says which are whose, and whether it is left out.

    A rank whose table leads past its rows, or -1.
    """
    words = pointer(table, INT64)
    num_tokens, num_topk, hidden = words[at.NUM_TOKENS], words[at.NUM_TOPK], words[at.HIDDEN]
    row_bytes, out = words[at.ROW_BYTES], words[at.OUT]
    owner_of = pointer(words[at.RANK_OF_EXPERT], INT32)
    local_of = pointer(words[at.LOCAL_OF_EXPERT], INT32)
    given = pointer(words[at.WEIGHTS], FLOAT32)
    experts, picks = pointer(words[at.TOPK_IDX], INT64), pointer(words[at.PICKED], INT64)
    sources, factors = np.empty(num_topk, np.int64), np.empty(num_topk, wide.dtype)
    for t in range(num_tokens):
        count = 0
        for i in range(t * num_topk, (t + 1) * num_topk):
            if picks[i] < 0:
                continue
            owner = owner_of[experts[i]]
            if masked[owner] != 0:
                continue
            first = pointer(tables[owner], INT64)[local_of[experts[i]]]
            # Not first + picks[i]: with a stray word that sum could overflow.
            if first < 0 or first >= limits[owner] - picks[i]:
                fence_stores()
                return owner
            sources[count] = rows[owner] + (first + picks[i]) * row_bytes
            factors[count] = given[i]
            count += 1
        place = out + t * row_bytes
        sum_scaled(place, sources.ctypes.data, factors.ctypes.data, count, hidden, 0, like)
    fence_stores()
    return -1


def cast_like(shape: SlotShape) -> np.ndarray:
    """What the cast reads; where there is none any will do."""
    return LIKE[torch.bfloat16 if shape.cast == NO_CAST else shape.dtype]


def wide_like(dtype: torch.dtype) -> np.ndarray:
    """An element as wide as the sums of rows of this dtype."""
    return FLOAT64 if dtype == torch.float64 else FLOAT32


def stage_slots(
    x_TD: Tensor, topk_idx_TK: Tensor, shape: SlotShape, block_B: Tensor, sent_2TK: Tensor
) -> int:
    table = new_table(shape)
    table[at.X] = x_TD.data_ptr()
    table[at.TOPK_IDX] = topk_idx_TK.data_ptr()
    table[at.NUM_TOKENS], table[at.NUM_TOPK] = topk_idx_TK.shape
    table[at.SENT] = sent_2TK.data_ptr()
    table[at.BLOCK] = block_B.data_ptr()
    bad = number_pairs(int64s.address(table))
    if bad == -1:
        stage_rows(int64s.address(table), cast_like(shape))
    return bad


def fill_slots(
    blocks: Sequence[Tensor], tokens: Sequence[int], shape: SlotShape, out: SlotResults
) -> None:
    table = new_table(shape)
    table[at.X] = out.x.data_ptr()
    table[at.SCALES] = 0 if out.scales is None else out.scales.data_ptr()
    table[at.COUNTS] = out.counts.data_ptr()
    table[at.SRC_INFO] = out.src_info.data_ptr()
    table[at.LAYOUT_RANGE] = out.layout_range.data_ptr()
    address = int64s.address(table)
    out.counts.zero_()
    for source, (block, count) in enumerate(zip(blocks, tokens)):
        begin_ranges(address, source)
        may_be = 0 <= count <= shape.num_max
        if not (may_be and fill_from(address, source, block.data_ptr(), count)):
            raise Stray(source)


def stage_back(
    y_LSD: Tensor, layout_range_LR: Tensor, outs: Sequence[Tensor], tables_RL: Tensor
) -> None:
    table = new_table()
    table[at.NUM_LOCAL], table[at.NUM_SLOTS], hidden = y_LSD.shape
    table[at.SIZE] = len(outs)
    table[at.ROW_BYTES] = hidden * y_LSD.element_size()
    table[at.Y] = y_LSD.data_ptr()
    table[at.LAYOUT_RANGE] = layout_range_LR.data_ptr()
    for source, out_NB in enumerate(outs):
        give_back(int64s.address(table), source, out_NB.data_ptr(), 0, tables_RL[source].data_ptr())


def pick_slots(topk_idx_TK: Tensor, sent_2TK: Tensor, picked_TK: Tensor) -> int:
    table = new_table()
    table[at.TOPK_IDX] = topk_idx_TK.data_ptr()
    table[at.NUM_TOKENS], table[at.NUM_TOPK] = topk_idx_TK.shape
    table[at.SENT] = sent_2TK.data_ptr()
    table[at.PICKED] = picked_TK.data_ptr()
    return pick_pairs(int64s.address(table))


def sum_slots(
    rows: Sequence[Tensor], tables_RL: Tensor, pairs: SlotPairs, shape: SlotShape, out_TD: Tensor
) -> Tensor:
    bases = np.array([one.data_ptr() for one in rows], np.int64)
    limits = np.array([len(one) for one in rows], np.int64)
    tables = np.array([one.data_ptr() for one in tables_RL], np.int64)
    nobody = np.zeros(len(rows), np.int64)
    table = new_table(shape)
    table[at.ROW_BYTES] = shape.hidden * out_TD.element_size()
    table[at.NUM_TOKENS], table[at.NUM_TOPK] = pairs.topk_idx.shape
    table[at.TOPK_IDX] = pairs.topk_idx.data_ptr()
    table[at.PICKED] = pairs.picked.data_ptr()
    table[at.WEIGHTS] = pairs.weights.data_ptr()
    table[at.OUT] = out_TD.data_ptr()
    like, wide = LIKE[out_TD.dtype], wide_like(out_TD.dtype)
    stray = sum_tokens(int64s.address(table), bases, limits, tables, nobody, like, wide)
    if stray >= 0:
        raise Stray(int(stray))
    return out_TD
