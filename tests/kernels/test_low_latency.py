"""The low-latency steps of the sets for CPUs: same bytes and verdicts, nothing past the end."""

from __future__ import annotations

import pytest
import torch

from tests.cases.kernel_sets import FOR_CPUS
from tests.cases.slots import CASTS, EXPERTS, MOST, RANKS, received, room, shape_of, there_and_back
from tokenyard import kernels
from tokenyard.testing import assert_same, poisoned
from tokenyard.validate import SUMMABLE
from tokenyard.wire.fp8 import NO_CAST
from tokenyard.wire.slots import SlotPairs, Stray


@pytest.mark.parametrize("num_tokens", [0, 1, MOST])
@pytest.mark.parametrize("cast", CASTS)
def test_sets_write_the_same(cast: str, num_tokens: int) -> None:
    got = there_and_back("numba", CASTS[cast], num_tokens)
    assert_same(got, there_and_back("reference", CASTS[cast], num_tokens))


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
def test_long_rows(dtype: torch.dtype, shift: int) -> None:
    """Longer than one program takes; they begin on the boundary of 16 bytes, and beside it."""
    given = (NO_CAST, dtype, 2056), 2, 3, dtype, shift
    assert_same(there_and_back("numba", *given), there_and_back("reference", *given))


def test_many_tokens() -> None:
    """More than one program, or one step of it, takes."""
    given = (NO_CAST, torch.bfloat16, 3), 140, 150
    with poisoned():
        got = there_and_back("numba", *given)
    assert_same(got, there_and_back("reference", *given))


@pytest.mark.parametrize("name", FOR_CPUS)
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


@pytest.mark.parametrize("name", FOR_CPUS)
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


@pytest.mark.parametrize("name", FOR_CPUS)
def test_words_that_no_rank_writes(name: str) -> None:
    """What came from another rank is compared with what it may be, and named, before it is used."""
    found, shape = kernels.load(name), shape_of(0, NO_CAST, torch.float32, 16)
    idx = torch.tensor([[1, 4, -1], [5, -1, 1]])
    block, sent = room(shape.block_bytes, 0), idx.new_zeros(2, *idx.shape)
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
