"""Buffer.all_gather: every rank gets the rows of all ranks, and sums find their way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.processes import Pools
from tokenyard.testing import Processes, assert_same, run_virtual
from tokenyard.transports import available

pytestmark = pytest.mark.processes

NUM_RANKS = 3


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(NUM_RANKS)


def rows_of(rank: int, num_tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(num_tokens * max(1, torch.Size(shape).numel())) + 50 * rank
    return (numbers % 100).to(dtype).reshape(num_tokens, *shape)


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {
    "one-each": ((1, 1, 1), (4,), torch.float32),
    "uneven": ((3, 0, 5), (8,), torch.bfloat16),
    "nobody": ((0, 0, 0), (8,), torch.float32),
    "numbers": ((2, 1, 3), (), torch.float64),
    "ids": ((2, 0, 1), (3, 2), torch.int64),
    "marks": ((2, 2, 0), (5,), torch.bool),
}


def gather(group: Any, transport: str, case: str) -> None:
    tokens, shape, dtype = CASES[case]
    nodes = 2 if transport == "hierarchical" else None
    with tokenyard.Buffer(group, transport=transport, ranks_per_node=nodes) as buffer:
        size = buffer.group_size
        mine, *others = (
            [rows_of(turn + rank, tokens[rank], shape, dtype) for rank in range(size)]
            for turn in range(2)
        )
        got = buffer.all_gather(mine[buffer.rank])
        assert_same(got.x, torch.cat(mine))
        for again in others:
            assert_same(buffer.all_gather(again[buffer.rank], got.handle).x, torch.cat(again))
        if dtype in (torch.float32, torch.bfloat16) and shape:
            # Each rank's sum over ranks of what they have in the place of its rows.
            own = mine[buffer.rank].double()
            back = buffer.combine(got.x * (buffer.rank + 1), got.handle).x
            assert_same(back, (own * sum(range(1, size + 1))).to(dtype))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", available())
def test_every_rank_has_all_rows(ranks: Processes, transport: str, case: str) -> None:
    ranks.run(gather, transport, case)


@pytest.mark.parametrize("case", CASES)
def test_one_rank_has_its_own_rows(case: str) -> None:
    run_virtual(gather, 1, "collective", case)


def with_placement(group: Any) -> Tensor:
    placement = torch.tensor([2, 0, 0, 2])  # rank 1 has no expert
    with tokenyard.Buffer(group, placement=placement) as buffer:
        return buffer.all_gather(torch.tensor([float(buffer.rank)])).x


def along_a_dispatch(group: Any, transport: str) -> None:
    """The handle of a dispatch in which every token went everywhere, with room for more rows."""
    with tokenyard.Buffer(group, transport=transport) as buffer:
        size = buffer.group_size
        x, topk_idx = rows_of(buffer.rank, 2, (4,), torch.float32), torch.arange(size).repeat(2, 1)
        got = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=torch.ones(2, size),
            num_experts=size,
            num_worst_tokens=3 * size,
        )
        want = torch.cat([rows_of(rank, 2, (4,), torch.float32) for rank in range(size)])
        assert_same(buffer.all_gather(x, got.handle).x, want)


@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_rows_that_a_dispatch_had_room_for_do_not_come(transport: str) -> None:
    run_virtual(along_a_dispatch, 2, transport)


def test_ranks_without_experts_have_all_rows(ranks: Processes) -> None:
    for got in ranks.run(with_placement):
        assert got.tolist() == [0.0, 1.0, 2.0]


def misuse(group: Any, wrong: str) -> str:
    with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
        x = torch.ones(2, 4)
        topk_idx, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        routed: Any = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": 3}
        handle = buffer.dispatch(x, **routed).handle
        try:
            if wrong == "dispatch" and buffer.rank == 1:
                buffer.dispatch(x, **routed)
            elif wrong == "handle":
                buffer.all_gather(x, handle)
            elif buffer.rank == 1:
                buffer.all_gather({"none": None, "scalar": x[0, 0], "hidden": x[:, :2]}[wrong])
            else:
                buffer.all_gather(x)
        except ValueError as error:
            assert buffer.all_gather(x).x.shape == (6, 4)  # the Buffer goes on
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "wrong, rank, text",
    [
        ("none", 1, "all_gather: x is None, want a torch.Tensor, on rank 1"),
        ("none", 0, "rank 1 rejected its input, so no rank went on: all_gather: x is None"),
        ("scalar", 1, "all_gather: x has shape [], want [tokens, ...], on rank 1"),
        ("hidden", 1, "all_gather: ranks differ in hidden size: 2 on rank 1, 4 on rank 0"),
        ("dispatch", 0, "all_gather: ranks differ in what they call: all_gather on rank 0, dis"),
        ("handle", 1, "all_gather: handle is of a dispatch (call 0) in which not every token went"),
    ],
)
def test_misuse_raises_on_all_ranks(ranks: Processes, wrong: str, rank: int, text: str) -> None:
    texts = ranks.run(misuse, wrong)
    assert "nothing" not in texts
    assert texts[rank].startswith(text)
