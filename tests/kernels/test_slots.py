"""The low-latency steps of each kernel set: equal bytes, equal verdicts, nothing past the end."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from tokenyard import kernels
from tokenyard.testing import assert_same, numbered_tokens, poisoned, routing
from tokenyard.topology import Placement
from tokenyard.types import ROW_DTYPES
from tokenyard.validate import SUMMABLE
from tokenyard.wire.fp8 import NO_CAST, PACKED, PLAIN, ROUNDED
from tokenyard.wire.slots import SlotPairs, SlotResults, SlotShape, Stray

RANKS, MOST, EXPERTS, TOPK = 3, 6, 7, 3
WHERE = torch.tensor([2, 0, 2, 2, 0, 0, 2], dtype=torch.int32)  # rank 1 has none
OTHERS = [name for name in kernels.available() if name != "reference"]
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
    device: str = "cpu",
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
        placement=Placement(WHERE.to(device), RANKS),
    )


def room(num_bytes: int, shift: int, device: str) -> Tensor:
    return torch.zeros(shift + num_bytes, dtype=torch.uint8, device=device)[shift:]


def there_and_back(
    name: str,
    kind: tuple[int, torch.dtype, int],
    num_tokens: int,
    most: int = MOST,
    back_dtype: torch.dtype = torch.bfloat16,
    shift: int = 0,
    device: str = "cpu",
) -> list[Tensor]:
    """Everything that the steps write, on all ranks; what they need not write is 0.

    Memory that would be another rank's begins `shift` bytes after a boundary.
    """
    found, written = kernels.load(name), []
    shapes = [shape_of(rank, *kind, most, device) for rank in range(RANKS)]
    tokens = [num_tokens, 0, most]
    given = [
        [one.to(device) for one in routing("holes", count, TOPK, EXPERTS, seed=rank)]
        for rank, count in enumerate(tokens)
    ]
    blocks, sents = [], []
    for rank, (shape, (idx, _)) in enumerate(zip(shapes, given)):
        x = numbered_tokens(tokens[rank], shape.hidden, first=10 * rank, dtype=shape.dtype)
        block, sent = room(shape.block_bytes, shift, device), idx.new_zeros(2, *idx.shape)
        assert found.stage_slots(x.to(device), idx, shape, block, sent) == -1
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
        outs = [room(math.prod(sizes), shift, device).view(sizes) for _ in shapes]
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
    return [one.cpu() for one in written]


def received(shape: SlotShape) -> SlotResults:
    zeros = partial(torch.zeros, device=shape.placement.rank_of_expert.device)
    scales = None
    if shape.cast != NO_CAST:
        width = shape.scale_bytes // 4
        scales = zeros(*shape.x_shape[:2], width, dtype=shape.scales_dtype)
    return SlotResults(
        zeros(shape.x_shape, dtype=shape.row_dtype),
        scales,
        zeros(shape.num_local, dtype=torch.int32),
        zeros(shape.x_shape[:2], dtype=torch.int32),
        zeros(shape.num_local, RANKS, dtype=torch.int64),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, MOST])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", OTHERS)
def test_sets_write_the_same(name: str, cast: str, num_tokens: int) -> None:
    got = there_and_back(name, CASTS[cast], num_tokens)
    assert_same(got, there_and_back("reference", CASTS[cast], num_tokens))


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_long_rows(name: str, dtype: torch.dtype, shift: int) -> None:
    """Longer than one program takes; they begin on the boundary of 16 bytes, and beside it."""
    given = (NO_CAST, dtype, 2056), 2, 3, dtype, shift
    assert_same(there_and_back(name, *given), there_and_back("reference", *given))


@pytest.mark.parametrize("name", OTHERS)
def test_many_tokens(name: str) -> None:
    """More than one program, or one step of it, takes."""
    given = (NO_CAST, torch.bfloat16, 3), 140, 150
    with poisoned():
        got = there_and_back(name, *given)
    assert_same(got, there_and_back("reference", *given))


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize(
    "idx, verdict",
    [
        ([[0, 1, 2], [3, 4, 7]], 5),
        ([[0, 1, 2], [-2, 4, 6]], 3),
        ([[2**40, 1, 2], [9, 9, 9]], 0),
        ([[0, 1, 2], [3, 5, 3]], -2 - 5),
        ([[-1, -1, -1], [3, -1, -1]], -1),
    ],
)
def test_pairs_that_are_no_experts(name: str, idx: list[list[int]], verdict: int) -> None:
    shape, topk_idx = shape_of(0, NO_CAST, torch.float32, 4), torch.tensor(idx)
    block = torch.zeros(shape.block_bytes, dtype=torch.uint8)
    sent = topk_idx.new_zeros(2, 2, 3)
    stage = kernels.load(name).stage_slots
    assert stage(torch.ones(2, 4), topk_idx, shape, block, sent) == verdict


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize(
    "idx, verdict, places",
    [
        ([[4, 1], [1, 0]], -1, [[0, 0], [1, 0]]),
        ([[1, -1], [-1, 1]], -1, [[0, -1], [-1, 1]]),
        ([[4, 1], [1, 4]], 3, None),
        ([[4, 1], [-2, 0]], 2, None),
    ],
)
def test_pairs_are_found_again(
    name: str, idx: list[list[int]], verdict: int, places: list[list[int]] | None
) -> None:
    sent = torch.tensor([[[4, 1], [1, 0]], [[0, 0], [1, 0]]])
    picked = torch.zeros(2, 2, dtype=torch.int64)
    assert kernels.load(name).pick_slots(torch.tensor(idx), sent, picked) == verdict
    assert places is None or picked.tolist() == places


@pytest.mark.parametrize("name", kernels.available())
def test_words_that_no_rank_writes(name: str) -> None:
    """What came from another rank is compared with what it may be, and named, before it is used."""
    found, shape = kernels.load(name), shape_of(0, NO_CAST, torch.float32, 16)
    idx = torch.tensor([[1, 4, -1], [5, -1, 1]])
    block, sent = room(shape.block_bytes, 0, "cpu"), idx.new_zeros(2, *idx.shape)
    assert found.stage_slots(torch.ones(2, 16), idx, shape, block, sent) == -1
    for count in (-1, MOST + 1, 1 << 44):
        with pytest.raises(Stray) as caught:
            found.fill_slots([block] * RANKS, [2, count, 2], shape, received(shape))
        assert caught.value.rank == 1
    for expert in (-2, EXPERTS, 1 << 44):
        lying = block.clone()
        lying[:8].view(torch.int64)[0] = expert
        with pytest.raises(Stray) as caught:
            found.fill_slots([block, block, lying], [2] * RANKS, shape, received(shape))
        assert caught.value.rank == 2
    rows, tables = [torch.ones(4, 16)] * RANKS, idx.new_zeros(RANKS, 4)
    picked, weights = torch.zeros_like(idx), torch.ones(2, 3)
    assert found.pick_slots(idx, sent, picked) == -1
    pairs, out = SlotPairs(idx, picked, weights), torch.empty(2, 16)
    found.sum_slots(rows, tables, pairs, shape, out)
    for first in (-1, 4, 3, 1 << 44):  # the second pair of expert 1 is the row after that
        tables[0, 0] = first
        with pytest.raises(Stray) as caught:
            found.sum_slots(rows, tables, pairs, shape, out)
        assert caught.value.rank == 0
