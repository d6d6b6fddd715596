"""What the low-latency mode moves: blocks of fixed size, and the words that go with them.

Every rank lays its tokens out once, in a *block* that always has room for num_max of them:

    topk_idx [num_max, K] | rows [num_max, D] | scales [num_max, D / 128], FP8 only

The owner of an expert finds its rows by the topk_idx beside them, and copies each into a slot of
that expert, so that no rank has to tell another any counts. A *post* announces a block: it says
what a receiver must know or compare, and the sender writes its number last. S is the number of
slots of an expert, R * num_max.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.errors import TEXT_WORDS
from tokenyard.topology import Placement
from tokenyard.types import digest, round_up
from tokenyard.wire.columns import LINE
from tokenyard.wire.fp8 import GROUP, NO_CAST, PACKED, PLAIN, ROUNDED

DISPATCH, COMBINE = 0, 1  # the kinds of calls

# The words of a post, int64. The first line holds all that the usual case looks at; the last three
# of it name the segment of the block.
NUMBER, FAILED, TOKENS, HANDLE, SIGNATURE, FD, SIZE, IDENTITY = range(8)
ROWS_FD, ROWS_SIZE, ROWS_IDENTITY, ROWS_BEGIN = range(
    8, 12
)  # a combine: the segment of its rows, and where they begin
TERMS = 16  # what the signature is a digest of, for the message when it differs
TEXT = 24
POST_WORDS = TEXT + TEXT_WORDS

DTYPE_TERM = 4  # among the terms


class Stray(Exception):
    """A rank wrote a word that cannot be a size, place or number: nobody may use it as one."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} wrote what no rank writes")
        self.rank = rank


class SlotResults(NamedTuple):
    """Where a dispatch puts what arrives."""

    x: Tensor  # [L, S, D]
    scales: Tensor | None  # [L, S, D / 128] float32, or D / 512 packed int32; FP8 only
    counts: Tensor  # [L] int32
    src_info: Tensor  # [L, S] int32
    layout_range: Tensor  # [L, R] int64


class SlotPairs(NamedTuple):
    """The pairs whose rows a combine sums."""

    topk_idx: Tensor  # [T, K] int64
    picked: Tensor  # [T, K] int64: each pair's place among those of its expert, or -1
    weights: Tensor  # [T, K] float32


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotShape:
    """All that follows from a call's sizes, computed once for all calls of those sizes."""

    rank: int
    num_ranks: int
    num_max: int
    hidden: int
    num_topk: int
    dtype: torch.dtype  # of x
    dtype_code: int
    cast: int
    placement: Placement
    row_dtype: torch.dtype = field(init=False)  # what travels
    row_bytes: int = field(init=False)
    scale_bytes: int = field(init=False)  # of a row
    rows_at: int = field(init=False)
    scales_at: int = field(init=False)
    block_bytes: int = field(init=False)
    terms: tuple[int, ...] = field(init=False)
    signature: int = field(init=False)
    num_local: int = field(init=False)
    num_slots: int = field(init=False)  # of an expert
    table_bytes: int = field(init=False)  # of what a combine tells one rank: a word for each expert
    x_shape: tuple[int, int, int] = field(init=False)  # of recv_x

    def __post_init__(self) -> None:
        row_dtype = self.dtype if self.cast == NO_CAST else torch.float8_e4m3fn
        row_bytes = self.hidden * row_dtype.itemsize
        each = {NO_CAST: 0, PLAIN: 4, ROUNDED: 4, PACKED: 1}[self.cast]
        scale_bytes = self.hidden // GROUP * each
        rows_at = round_up(8 * self.num_max * self.num_topk, LINE)
        scales_at = rows_at + round_up(self.num_max * row_bytes, LINE)
        terms = (
            self.num_max,
            self.hidden,
            self.num_topk,
            self.placement.num_experts,
            self.dtype_code,
            self.cast,
        )
        num_local = len(self.placement.experts_of_rank[self.rank])
        num_slots = self.num_ranks * self.num_max
        for name, value in {
            "row_dtype": row_dtype,
            "row_bytes": row_bytes,
            "scale_bytes": scale_bytes,
            "rows_at": rows_at,
            "scales_at": scales_at,
            "block_bytes": scales_at + round_up(self.num_max * scale_bytes, LINE),
            "terms": terms,
            "signature": digest(repr(terms)) | 1,  # never 0
            "num_local": num_local,
            "num_slots": num_slots,
            "table_bytes": round_up(8 * self.placement.most_experts, LINE),
            "x_shape": (num_local, num_slots, self.hidden),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def most_back(self) -> int:
        """The most rows that a rank may have to give back to another."""
        return self.num_max * min(self.num_topk, self.placement.most_experts)

    @property
    def scales_dtype(self) -> torch.dtype:
        return torch.int32 if self.cast == PACKED else torch.float32
