"""The specification of the low-latency mode against dense sums over all experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenyard.spec import (
    LowLatencyReceived,
    World,
    cast_to_fp8,
    low_latency_combine,
    low_latency_dispatch,
)

NUM_MAX = 6


def one_node(*rank_of_expert: int, num_ranks: int) -> World:
    return World(rank_of_expert, (0,) * num_ranks)


def random_topk(rank: int, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Distinct experts a token, a third of them -1."""
    random = torch.Generator().manual_seed(rank)
    order = torch.rand(num_tokens, num_experts, generator=random).argsort(1)[:, :top_k]
    return torch.where(torch.rand(order.shape, generator=random) < 1 / 3, -1, order)


CASES = [
    pytest.param(World.even(8, 4), [random_topk(r, 5, 3, 8) for r in range(4)], id="even"),
    pytest.param(
        one_node(2, 0, 2, 2, 0, 1, 2, num_ranks=3),
        [random_topk(r, r + 2, 4, 7) for r in range(3)],
        id="uneven-experts",
    ),
    pytest.param(
        one_node(0, 2, 0, num_ranks=3),
        [random_topk(r, 4, 2, 3) for r in range(3)],
        id="a-rank-without-experts",
    ),
    pytest.param(
        one_node(1, 2, 1, num_ranks=3),
        [random_topk(r, 4, 2, 3) for r in range(3)],
        id="first-rank-without-experts",
    ),
    pytest.param(
        World.even(4, 3),
        [random_topk(0, 3, 2, 4), random_topk(1, 0, 2, 4), random_topk(2, 6, 2, 4)],
        id="a-rank-without-tokens",
    ),
    pytest.param(
        World.even(4, 2), [torch.full((NUM_MAX, 1), 2)] * 2, id="full-slots-of-one-expert"
    ),
    pytest.param(World.even(4, 2), [torch.full((3, 2), -1)] * 2, id="all-unrouted"),
    pytest.param(World.even(5, 1), [random_topk(0, 6, 5, 5)], id="one-rank"),
    pytest.param(
        World.even(4, 4, ranks_per_node=2),
        [random_topk(r, 3, 2, 4) for r in range(4)],
        id="two-nodes",
    ),
]


def numbered_tokens(topk_idxs: list[Tensor], hidden: int = 3) -> list[Tensor]:
    """Every element of every rank's tokens is another integer."""
    xs, start = [], 1
    for topk_idx in topk_idxs:
        size = topk_idx.shape[0] * hidden
        xs.append(torch.arange(start, start + size, dtype=torch.float32).view(-1, hidden))
        start += size
    return xs


def eighths(topk_idxs: list[Tensor]) -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(1, 17, t.shape, generator=random) / 8 for t in topk_idxs]


def experts(received: list[LowLatencyReceived], world: World) -> list[Tensor]:
    """Expert e multiplies by e + 1, and leaves NaN in the slots that hold nothing."""
    ys = []
    for rank, got in enumerate(received):
        gain = torch.tensor([e + 1.0 for e in world.experts_of(rank)])
        used = torch.arange(got.x.shape[1]) < got.count[:, None]
        ys.append(torch.where(used[:, :, None], got.x * gain[:, None, None], math.nan))
    return ys


@pytest.mark.parametrize("world, topk_idxs", CASES)
def test_dispatch_fills_slots_by_source_and_token(world: World, topk_idxs: list[Tensor]) -> None:
    xs = numbered_tokens(topk_idxs)
    received = low_latency_dispatch(xs, topk_idxs, world, NUM_MAX)
    assert len(received) == world.num_ranks
    num_slots = world.num_ranks * NUM_MAX
    for rank, got in enumerate(received):
        own = world.experts_of(rank)
        assert got.x.shape == (len(own), num_slots, 3)
        assert got.scales is None
        assert (got.x.dtype, got.count.dtype) == (torch.float32, torch.int32)
        assert (got.src_info.dtype, got.src_info.shape) == (torch.int32, (len(own), num_slots))
        assert got.layout_range.dtype == torch.int64
        assert got.layout_range.shape == (len(own), world.num_ranks)
        for local, expert in enumerate(own):
            tokens = [(t == expert).any(1).nonzero()[:, 0] for t in topk_idxs]
            want = torch.cat([x[chosen] for x, chosen in zip(xs, tokens)])
            count = int(got.count[local])
            assert torch.equal(got.x[local, :count], want)
            assert got.src_info[local, :count].tolist() == torch.cat(tokens).tolist()
            assert not got.x[local, count:].any()
            assert (got.src_info[local, count:] == -1).all()
            ranges = got.layout_range[local]
            assert (ranges & 0xFFFFFFFF).tolist() == [len(chosen) for chosen in tokens]
            begins = [sum(len(chosen) for chosen in tokens[:r]) for r in range(world.num_ranks)]
            assert (ranges >> 32).tolist() == begins


@pytest.mark.parametrize("ue8m0", [False, True], ids=["float32-scales", "packed-scales"])
def test_dispatch_in_fp8(ue8m0: bool) -> None:
    world, hidden = one_node(1, 0, 1, num_ranks=2), 512
    topk_idxs = [random_topk(r, 4, 2, 3) for r in range(2)]
    xs = [torch.randn(4, hidden, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    options = {"round_scale": ue8m0, "use_ue8m0": ue8m0}
    plain = low_latency_dispatch(xs, topk_idxs, world, NUM_MAX)
    received = low_latency_dispatch(xs, topk_idxs, world, NUM_MAX, use_fp8=True, **options)
    width, dtype = (1, torch.int32) if ue8m0 else (4, torch.float32)
    for got, rows in zip(received, plain):
        num_experts, num_slots, _ = rows.x.shape
        assert got.scales is not None
        assert (got.scales.shape, got.scales.dtype) == ((num_experts, num_slots, width), dtype)
        assert got.x.dtype == torch.float8_e4m3fn
        assert torch.equal(got.src_info, rows.src_info)
        assert torch.equal(got.layout_range, rows.layout_range)
        assert got.count.sum() > 0
        for local, count in enumerate(got.count.tolist()):
            values, scales = cast_to_fp8(rows.x[local, :count], **options)
            assert torch.equal(got.x[local, :count].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(got.scales[local, :count], scales)
            assert not got.x[local, count:].view(torch.uint8).any()
            assert not got.scales[local, count:].any()


@pytest.mark.parametrize("masked", [(), (0,), (1, 2)], ids=["all-ranks", "not-0", "not-1-and-2"])
@pytest.mark.parametrize("world, topk_idxs", CASES)
def test_combine_is_the_weighted_sum(
    world: World, topk_idxs: list[Tensor], masked: tuple[int, ...]
) -> None:
    xs, weights = numbered_tokens(topk_idxs), eighths(topk_idxs)
    received = low_latency_dispatch(xs, topk_idxs, world, NUM_MAX)
    ys = experts(received, world)
    combined = low_latency_combine(ys, topk_idxs, weights, received, world, masked=masked)
    gain = torch.tensor(
        [0.0 if rank in masked else e + 1.0 for e, rank in enumerate(world.rank_of_expert)] + [0.0]
    )  # the last is what -1 finds
    assert len(combined) == world.num_ranks
    for x, topk_idx, weight, got in zip(xs, topk_idxs, weights, combined):
        assert got.dtype == torch.float32
        # Integers over 8: exact in float32, in any order.
        assert torch.equal(got, x * (gain[topk_idx] * weight).sum(1, keepdim=True))


@pytest.mark.parametrize(
    "values, weights, dtype, want",
    [
        pytest.param([256, 1, 1], [1, 1, 1], torch.bfloat16, 258.0, id="rounded-once"),
        pytest.param([2.0**30, 1, -(2.0**30)], [1, 1, 1], torch.float32, 0.0, id="top-k-order"),
        pytest.param([2.0**30, -(2.0**30), 1], [1, 1, 1], torch.float32, 1.0, id="another-order"),
        pytest.param(
            [-1 - 2.0**-11, 1 + 2.0**-12, 0],
            [1, 1 + 2.0**-12, 1],
            torch.float32,
            0.0,
            id="no-fma",
        ),
        pytest.param([1, 2.0**-40, 0], [1, 1, 1], torch.float64, 1 + 2.0**-40, id="float64"),
    ],
)
def test_combine_rounding(
    values: list[float], weights: list[float], dtype: torch.dtype, want: float
) -> None:
    world = World.even(3, 3)
    chosen = [2, 0, 1]  # the k-th value comes from this expert, so top-k order is not rank order
    idle = torch.zeros(0, 3, dtype=torch.int64)
    topk_idxs = [idle, torch.tensor([chosen]), idle]
    xs = [torch.zeros(len(t), 1, dtype=dtype) for t in topk_idxs]
    received = low_latency_dispatch(xs, topk_idxs, world, 1)
    ys = [torch.zeros(1, 3, 1, dtype=dtype) for _ in range(3)]
    for expert, value in zip(chosen, values):
        ys[expert][0, 0, 0] = value
    topk_weights = [torch.zeros(0, 3), torch.tensor([weights]), torch.zeros(0, 3)]
    _, got, _ = low_latency_combine(ys, topk_idxs, topk_weights, received, world)
    assert got.dtype == dtype
    assert got.tolist() == [[want]]


def test_dispatch_refuses_more_tokens_than_slots() -> None:
    world = World.even(2, 2)
    topk_idxs = [torch.full((2, 1), -1), torch.full((3, 1), -1)]
    xs = numbered_tokens(topk_idxs)
    with pytest.raises(ValueError, match=r"^x has 3 tokens, want at most 2, on rank 1$"):
        low_latency_dispatch(xs, topk_idxs, world, 2)
    assert len(low_latency_dispatch(xs, topk_idxs, world, 3)) == 2


def test_dispatch_refuses_an_expert_named_twice() -> None:
    world = World.even(4, 2)
    topk_idxs = [torch.tensor([[-1, -1, 0]]), torch.tensor([[0, 1, 2], [3, 1, 3]])]
    with pytest.raises(
        ValueError, match=r"^topk_idx\[1\] names expert 3 2 times, want once at most, on rank 1$"
    ):
        low_latency_dispatch(numbered_tokens(topk_idxs), topk_idxs, world, 2)


@pytest.mark.parametrize(
    "hidden, options, message",
    [
        (100, {}, "x has hidden size 100, want a multiple of 128"),
        (128, {"use_ue8m0": True}, "use_ue8m0 is True with round_scale=False"),
    ],
)
def test_dispatch_refuses_what_fp8_cannot(
    hidden: int, options: dict[str, bool], message: str
) -> None:
    x, topk_idx = torch.zeros(1, hidden), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        low_latency_dispatch([x], [topk_idx], World.even(1, 1), 1, use_fp8=True, **options)
