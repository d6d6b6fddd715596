"""A round of the low-latency steps, dispatch and combine, on all ranks of one process."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenyard import kernels
from tokenyard.testing import numbered_tokens, routing
from tokenyard.topology import Placement
from tokenyard.types import ROW_DTYPES
from tokenyard.wire.fp8 import NO_CAST, PACKED, PLAIN, ROUNDED
from tokenyard.wire.slots import SlotPairs, SlotResults, SlotShape

RANKS = 3


MOST = 6


EXPERTS = 7


TOPK = 3


WHERE = torch.tensor([2, 0, 2, 2, 0, 0, 2], dtype=torch.int32)  # rank 1 has none


CASTS = {
    "as-they-are": (NO_CAST, torch.bfloat16, 33),
    "float64": (NO_CAST, torch.float64, 5),
    "fp8": (PLAIN, torch.bfloat16, 256),
    "fp8-rounded": (ROUNDED, torch.float16, 128),
    "fp8-packed": (PACKED, torch.float32, 512),
}


def shape_of(
    rank: int,
    cast: int,
    dtype: torch.dtype,
    hidden: int,
    num_max: int = MOST,
) -> SlotShape:
    return SlotShape(
        rank=rank,
        num_ranks=RANKS,
        num_max=num_max,
        hidden=hidden,
        num_topk=TOPK,
        dtype=dtype,
        dtype_code=ROW_DTYPES.index(dtype),
        cast=cast,
        placement=Placement(WHERE, RANKS),
    )


def room(num_bytes: int, shift: int) -> Tensor:
    return torch.zeros(shift + num_bytes, dtype=torch.uint8)[shift:]


def there_and_back(
    name: str,
    kind: tuple[int, torch.dtype, int],
    num_tokens: int,
    most: int = MOST,
    back_dtype: torch.dtype = torch.bfloat16,
    shift: int = 0,
) -> list[Tensor]:
    """Everything that the steps write, on all ranks; what they need not write is 0.

    Memory that would be another rank's begins `shift` bytes after a boundary.
    """
    found, written = kernels.load(name), []
    shapes = [shape_of(rank, *kind, most) for rank in range(RANKS)]
    tokens = [num_tokens, 0, most]
    given = [routing("holes", count, TOPK, EXPERTS, seed=rank) for rank, count in enumerate(tokens)]
    blocks, sents = [], []
    for rank, (shape, (idx, _)) in enumerate(zip(shapes, given)):
        x = numbered_tokens(tokens[rank], shape.hidden, first=10 * rank, dtype=shape.dtype)
        block, sent = room(shape.block_bytes, shift), idx.new_zeros(2, *idx.shape)
        assert found.stage_slots(x, idx, shape, block, sent) == -1
        blocks.append(block)
        sents.append(sent)
    back: list[list[Tensor]] = []
    tables: list[Tensor] = []
    for shape in shapes:
        got = received(shape)
        found.fill_slots(blocks, tokens, shape, got)
        written += [one for one in got if one is not None]
        y = torch.where(got.src_info[:, :, None] >= 0, got.x.double(), 0.0).to(back_dtype)
        sizes = shape.most_back, shape.hidden * back_dtype.itemsize
        outs = [room(math.prod(sizes), shift).view(sizes) for _ in shapes]
        table = idx.new_zeros(RANKS, shape.placement.most_experts + 3)[:, 2:-1]
        found.stage_back(y, got.layout_range, outs, table)
        back.append(outs)
        tables.append(table)
    for rank, (shape, (idx, weights), sent) in enumerate(zip(shapes, given, sents)):
        picked, out = torch.zeros_like(idx), y.new_zeros(len(idx), shape.hidden)
        assert found.pick_slots(idx, sent, picked) == -1
        rows = [outs[rank].view(back_dtype) for outs in back]
        mine = torch.stack([table[rank] for table in tables])
        written.append(found.sum_slots(rows, mine, SlotPairs(idx, picked, weights), shape, out))
    written += [*blocks, *sents, *(out for outs in back for out in outs), *tables]
    return written


def received(shape: SlotShape) -> SlotResults:
    scales = None
    if shape.cast != NO_CAST:
        width = shape.scale_bytes // 4
        scales = torch.zeros(*shape.x_shape[:2], width, dtype=shape.scales_dtype)
    return SlotResults(
        torch.zeros(shape.x_shape, dtype=shape.row_dtype),
        scales,
        torch.zeros(shape.num_local, dtype=torch.int32),
        torch.zeros(shape.x_shape[:2], dtype=torch.int32),
        torch.zeros(shape.num_local, RANKS, dtype=torch.int64),
    )
