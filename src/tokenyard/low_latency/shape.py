"""What follows from the sizes of low-latency calls, computed once for all calls of those sizes."""

from __future__ import annotations

import torch

from tokenyard.topology import Placement
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE, column_offsets
from tokenyard.wire.fp8 import GROUP, NO_CAST, PACKED


class SlotShape:
    """L local experts have S slots each, R * num_max: enough for all that R ranks may send."""

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        num_max: int,
        hidden: int,
        num_topk: int,
        dtype: torch.dtype,
        cast: int,
        placement: Placement,
    ) -> None:
        """`dtype` is that of x, `cast` a code of `wire.fp8`."""
        self.rank, self.num_ranks, self.num_max = rank, num_ranks, num_max
        self.hidden, self.num_topk, self.placement = hidden, num_topk, placement
        self.dtype, self.cast = dtype, cast
        self.row_dtype = dtype if cast == NO_CAST else torch.float8_e4m3fn  # what travels
        self.scales_dtype = torch.int32 if cast == PACKED else torch.float32
        self.row_bytes = hidden * self.row_dtype.itemsize
        self.scale_bytes = hidden // GROUP * {NO_CAST: 0, PACKED: 1}.get(cast, 4)  # of a row
        # Bytes of a token in each column of a block: its row, scales and experts.
        self.widths = self.row_bytes, self.scale_bytes, 8 * num_topk
        self.block_bytes = column_offsets(num_max, self.widths)[-1]
        self.num_local = len(placement.experts_of_rank[rank])
        self.num_slots = num_ranks * num_max  # of an expert
        self.x_shape = self.num_local, self.num_slots, hidden  # of recv_x
        # Of what a combine tells one rank: where the rows of each expert begin.
        self.firsts_bytes = round_up(8 * placement.most_experts, LINE)
        # The most rows that a rank may have to give back to another.
        self.most_back = num_max * min(num_topk, placement.most_experts)
