"""The specification of align, permute, rearrange and FP8 against other ways to say the same."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenyard.spec import (
    cast_back,
    cast_to_fp8,
    moe_align_block_size,
    pack_ue8m0,
    permute,
    rearrange,
    unpack_ue8m0,
    unpermute,
)

FP8 = torch.float8_e4m3fn


def assert_same(got: Tensor, want: Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(_bits(got), _bits(want))


def assert_same_but_nan(got: Tensor, want: Tensor) -> None:
    """The same bits, and NaN in the same places: torch leaves the sign of a NaN to the machine."""
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert_same(torch.where(number, got.float(), 0.0), torch.where(number, want.float(), 0.0))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_topk(num_rows: int, top_k: int, num_experts: int, *, dropped: float = 0.3) -> Tensor:
    """Distinct experts a row, some of them -1."""
    order = torch.rand(num_rows, max(num_experts, top_k), generator=rng()).argsort(1)[:, :top_k]
    drop = torch.rand(order.shape, generator=rng(1)) < dropped
    return torch.where(drop | (order >= num_experts), -1, order)


def align_by_sorting(topk_ids: Tensor, block: int, num_experts: int) -> tuple[Tensor, Tensor, int]:
    flat = topk_ids.flatten().long()
    numel = flat.numel()
    sorted_ids, order = flat.sort(stable=True)
    order, sorted_ids = order[sorted_ids >= 0], sorted_ids[sorted_ids >= 0]
    counts = torch.bincount(sorted_ids, minlength=num_experts)
    blocks = (counts + block - 1) // block
    shift = (blocks * block).cumsum(0) - blocks * block - (counts.cumsum(0) - counts)
    total = int(blocks.sum()) * block
    slots = torch.full((total,), numel, dtype=torch.int32)
    slots[torch.arange(len(order)) + shift[sorted_ids]] = order.int()
    return slots, torch.arange(num_experts).repeat_interleave(blocks).int(), total


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [1, 4, 7, 64])
@pytest.mark.parametrize(
    "topk_ids, num_experts",
    [
        pytest.param(random_topk(50, 4, 9), 9, id="random"),
        pytest.param(random_topk(50, 4, 9, dropped=0.0), 9, id="none-dropped"),
        pytest.param(random_topk(3, 2, 40), 40, id="fewer-pairs-than-experts"),
        pytest.param(torch.full((20, 1), 3), 5, id="all-to-one"),
        pytest.param(torch.full((6, 2), -1), 4, id="all-dropped"),
        pytest.param(torch.zeros(0, 4, dtype=torch.int64), 4, id="no-tokens"),
        pytest.param(random_topk(4, 30, 6).T, 6, id="transposed"),
    ],
)
def test_align_agrees_with_sorting(
    topk_ids: Tensor, num_experts: int, block: int, dtype: torch.dtype
) -> None:
    got = moe_align_block_size(topk_ids.to(dtype), block, num_experts)
    slots, owners, total = align_by_sorting(topk_ids, block, num_experts)
    unused = got.sorted_token_ids.numel() - total
    numel = topk_ids.numel()
    assert_same(got.num_tokens_post_pad, torch.tensor([total], dtype=torch.int32))
    assert_same(
        got.sorted_token_ids, torch.cat([slots, slots.new_full((unused,), fill_value=numel)])
    )
    assert_same(got.expert_ids, torch.cat([owners, owners.new_full((unused // block,), -1)]))


@pytest.mark.parametrize(
    "numel, num_experts, block, capacity",
    [
        (0, 4, 8, 0),
        (5, 8, 16, 80),  # fewer pairs than experts: a block each
        (7, 8, 16, 112),
        (8, 8, 16, 128),  # 8 + 8 * 15, which is whole blocks
        (9, 8, 16, 144),  # 129, rounded up
        (7, 2, 1, 7),
    ],
)
def test_capacity(numel: int, num_experts: int, block: int, capacity: int) -> None:
    got = moe_align_block_size(torch.zeros(numel, 1, dtype=torch.int64), block, num_experts)
    assert got.sorted_token_ids.shape == (capacity,)
    assert got.expert_ids.shape == (capacity // block,)


def test_capacity_holds_every_routing() -> None:
    for numel, num_experts, block in product(range(5), range(1, 4), range(1, 5)):
        lengths = set()
        for ids in product(range(-1, num_experts), repeat=numel):
            got = moe_align_block_size(
                torch.tensor(ids, dtype=torch.int64).view(-1, 1), block, num_experts
            )
            lengths.add(got.sorted_token_ids.numel())
            assert int(got.num_tokens_post_pad) <= got.sorted_token_ids.numel()
        assert len(lengths) == 1


PERMUTE_CASES = [
    pytest.param(random_topk(40, 3, 5), 5, id="random"),
    pytest.param(random_topk(40, 6, 4, dropped=0.0), 4, id="more-k-than-experts"),
    pytest.param(torch.full((9, 1), 2), 4, id="all-to-one"),
    pytest.param(torch.full((9, 2), -1), 4, id="all-dropped"),
    pytest.param(torch.full((9, 2), -1), 0, id="no-experts"),
    pytest.param(torch.zeros(0, 3, dtype=torch.int64), 4, id="no-rows"),
]


def numbered_rows(num_rows: int, hidden: int = 8) -> Tensor:
    return torch.arange(1, num_rows * hidden + 1, dtype=torch.float32).view(num_rows, hidden)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("topk_idx, num_experts", PERMUTE_CASES)
def test_permute_groups_by_expert_row_k(topk_idx: Tensor, num_experts: int, alignment: int) -> None:
    x = numbered_rows(topk_idx.shape[0])
    scales = -x[:, :2]
    got = permute(x, topk_idx, num_experts, expert_alignment=alignment, scales=scales)
    assert got.scales is not None
    assert (got.row_of.dtype, got.offsets.dtype) == (torch.int64, torch.int32)
    assert torch.equal(got.row_of == -1, topk_idx == -1)
    begin = 0
    for expert, end in enumerate(got.offsets.tolist()):
        rows, _ = (topk_idx == expert).nonzero(as_tuple=True)
        padding = -len(rows) % alignment
        assert end == begin + len(rows) + padding
        assert_same(got.x[begin:end], torch.cat([x[rows], torch.zeros(padding, 8)]))
        assert_same(got.scales[begin:end], torch.cat([scales[rows], torch.zeros(padding, 2)]))
        assert got.row_of[topk_idx == expert].tolist() == list(range(begin, begin + len(rows)))
        begin = end
    assert got.x.shape[0] == got.scales.shape[0] == begin


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("topk_idx, num_experts", PERMUTE_CASES)
def test_permute_experts_unpermute(topk_idx: Tensor, num_experts: int, alignment: int) -> None:
    x = numbered_rows(topk_idx.shape[0])
    weights = torch.randint(1, 9, topk_idx.shape, generator=rng()) / 8
    weights[topk_idx == -1] = math.nan  # never read
    got = permute(x, topk_idx, num_experts, expert_alignment=alignment)
    counts = torch.diff(got.offsets, prepend=torch.zeros(1, dtype=torch.int32))
    y = got.x * torch.arange(1, num_experts + 1).repeat_interleave(counts)[:, None]
    gains = (topk_idx + 1).float()  # expert e multiplies by e + 1, and -1 adds nothing
    assert_same(unpermute(y, got.row_of), x * gains.sum(1, keepdim=True))
    weighted = torch.where(topk_idx == -1, 0.0, gains * weights).sum(1, keepdim=True)
    assert_same(unpermute(y, got.row_of, weights=weights), x * weighted)


def test_offsets_feed_grouped_mm() -> None:
    topk_idx = random_topk(24, 2, 4)
    topk_idx[topk_idx == 2] = -1  # an expert without rows
    x = torch.randint(-4, 5, (24, 16), generator=rng()).bfloat16()
    experts = torch.randint(-2, 3, (4, 16, 32), generator=rng(1)).bfloat16()
    got = permute(x, topk_idx, 4, expert_alignment=8)
    y = torch.nn.functional.grouped_mm(got.x, experts, offs=got.offsets)
    want = torch.zeros(24, 32)
    for row, k in (topk_idx >= 0).nonzero().tolist():
        # Small integers: exact in float32 in any order, and rounded where grouped_mm rounds.
        want[row] += (x[row].float() @ experts[topk_idx[row, k]].float()).bfloat16()
    assert_same(unpermute(y, got.row_of), want.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_permute_moves_bytes(dtype: torch.dtype) -> None:
    x = torch.arange(256).to(torch.uint8).view(4, 64).view(dtype)  # NaN payloads among them
    got = permute(x, torch.tensor([[0], [-1], [1], [0]]), 2)
    assert_same(got.x, x.view(torch.uint8)[[0, 3, 2]].view(dtype))


@pytest.mark.parametrize(
    "values, weights, dtype, want",
    [
        pytest.param([256, 1, 1], None, torch.bfloat16, 258.0, id="rounded-once"),
        pytest.param([2.0**30, 1, -(2.0**30)], None, torch.float32, 0.0, id="in-k-order"),
        pytest.param([2.0**30, -(2.0**30), 1], None, torch.float32, 1.0, id="in-another-k-order"),
        pytest.param([1, 2.0**-40, 0], None, torch.float64, 1 + 2.0**-40, id="float64"),
        pytest.param(
            [-1 - 2.0**-11, 1 + 2.0**-12], [1, 1 + 2.0**-12], torch.float32, 0.0, id="no-fma"
        ),
        pytest.param([3.0, 1.0], [1 / 3, 2.0**-30], torch.bfloat16, 1.0, id="float32-weights"),
    ],
)
def test_unpermute_rounding(
    values: list[float], weights: list[float] | None, dtype: torch.dtype, want: float
) -> None:
    y = torch.tensor(values, dtype=dtype)[:, None]
    row_of = torch.arange(len(values))[None]
    got = unpermute(y, row_of, weights=None if weights is None else torch.tensor([weights]))
    assert_same(got, torch.tensor([[want]], dtype=dtype))


def test_unpermute_starts_from_zero() -> None:
    got = unpermute(torch.tensor([[-0.0]]), torch.tensor([[0], [-1]]))
    assert_same(got, torch.tensor([[0.0], [0.0]]))


def strided(shape: tuple[int, ...], dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A view of the given shape with shuffled axes and steps of either sign, and its base."""
    random = np.random.default_rng(seed)
    axes = random.permutation(len(shape))
    steps = random.choice([-3, -2, -1, 1, 2], len(shape))
    base_shape = [shape[axis] * abs(steps[axis]) + 1 for axis in axes]
    size = math.prod(base_shape) * np.dtype(dtype).itemsize
    base = random.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(base_shape)
    view = base.transpose(np.argsort(axes))
    stepped: Any = (*(slice(None, None, step) for step in steps), ...)
    view = view[stepped]
    cut: Any = (*(slice(0, length) for length in shape), ...)
    return view[cut], base


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16", "V3"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 1, 3), (3, 0, 2), (2, 3, 2, 3)], ids=str)
def test_rearrange_agrees_with_copyto(shape: tuple[int, ...], dtype: str) -> None:
    for seed in range(8):
        dst, base = strided(shape, dtype, seed)
        src, _ = strided(shape, dtype, seed + 100)
        want_view, want_base = strided(shape, dtype, seed)
        np.copyto(want_view, src)
        want = want_base.tobytes()  # the whole base: nothing beside the view may change
        rearrange(dst, src)
        assert base.tobytes() == want


def test_rearrange_uses_negative_strides() -> None:
    views = [strided((3, 4), "f4", seed)[0] for seed in range(8)]
    assert any(min(view.strides) < 0 for view in views)
    dst = np.zeros(4, dtype=np.int64)
    rearrange(dst[::-1], np.arange(4))
    assert dst.tolist() == [3, 2, 1, 0]


def test_rearrange_broadcasts_src() -> None:
    dst = np.zeros((2, 3, 4), dtype=np.float32)
    src = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None], (2, 3, 4))
    rearrange(dst, src)
    assert (dst == src).all()
    out = torch.zeros(2, 3, 4)
    rearrange(out, torch.arange(3.0)[:, None].expand(2, 3, 4))
    assert_same(out, torch.from_numpy(src.copy()))


def test_rearrange_takes_stride_zero_where_it_repeats_nothing() -> None:
    one = torch.zeros(4).as_strided((1, 4), (0, 1))
    rearrange(one, torch.arange(4.0)[None])
    assert one.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    empty = np.empty((3, 0))
    assert empty.strides[0] == 0
    rearrange(empty, np.empty((3, 0)))


@pytest.mark.parametrize(
    "dtype, bits",
    [
        (torch.bfloat16, torch.arange(-32768, 32768, 17).to(torch.int16)),
        (torch.float16, torch.arange(-32768, 32768, 17).to(torch.int16)),
        (torch.float8_e4m3fn, torch.arange(256).to(torch.uint8)),
        (torch.float8_e5m2, torch.arange(256).to(torch.uint8)),
        (torch.float32, torch.tensor([0x7F800001, 0x7FA5A5A5, -1, -0x7FFFFF, 1]).int()),
        (torch.float64, torch.tensor([0x7FF0000000000001, -1, -(2**52) + 1, 1])),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else "",
)
def test_rearrange_keeps_nan_payloads(dtype: torch.dtype, bits: Tensor) -> None:
    src = bits.view(dtype)
    assert src.isnan().any()
    dst = torch.zeros_like(src)
    rearrange(dst, src)
    assert_same(dst, src)
    dst = torch.zeros(len(src), 2, dtype=dtype)
    rearrange(dst[:, 1], src)
    assert_same(dst[:, 1], src)
    assert not dst[:, 0].view(bits.dtype).any()


@pytest.mark.parametrize(
    "dst, src, message",
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"src has shape \(3, 2\), want dst's \(2, 3\)"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.int32),
            r"src is torch.int32, want dst's torch",
        ),
        (np.zeros(2, "f4"), np.zeros(2, "f8"), "src is float64, want dst's float32"),
        (
            torch.zeros(3).expand(2, 3),
            torch.zeros(2, 3),
            "dst has stride 0 on axis 0 of length 2, want length 1",
        ),
        (
            np.broadcast_to(np.zeros((2, 1)), (2, 3)),
            np.zeros((2, 3)),
            "dst has stride 0 on axis 1 of length 3, want length 1",
        ),
        (np.zeros(2), torch.zeros(2), "src is a Tensor, want a ndarray like dst"),
    ],
)
def test_rearrange_refuses(dst: Any, src: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rearrange(dst, src)


def cast_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.view(x.shape[0], -1, 128)
    amax = groups.abs().float().amax(2).clamp(1e-4)
    values = (groups * (448.0 / amax.unsqueeze(2))).to(FP8)
    return values.view(x.shape), amax / 448.0


def all_bfloat16() -> Tensor:
    return torch.arange(65536).to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize("order", ["ascending", "shuffled", "interleaved"])
def test_fp8_of_every_finite_bfloat16(order: str) -> None:
    x = all_bfloat16()
    x = x[x.isfinite()]  # 510 groups; ascending, a group holds one sign and exponent
    if order == "shuffled":
        x = x[torch.randperm(len(x), generator=rng())]
    x = x.view(30, -1) if order != "interleaved" else x.view(-1, 30).T.contiguous()
    values, scales = cast_to_fp8(x)
    want_values, want_scales = cast_in_torch(x)
    assert_same(values, want_values)
    assert_same(scales, want_scales)


def test_fp8_of_every_nan_and_inf_in_bfloat16() -> None:
    every = all_bfloat16()
    special, finite = every[~every.isfinite()], every[every.isfinite()]
    assert len(special) == 256
    x = finite[torch.randperm(len(finite), generator=rng())][: 256 * 128].view(256, 128).clone()
    x[torch.arange(256), torch.arange(256) % 128] = special  # one in each group
    x = torch.cat([x, special.view(2, 128)])
    values, scales = cast_to_fp8(x)
    want_values, want_scales = cast_in_torch(x)
    assert_same_but_nan(values, want_values)
    assert_same_but_nan(scales, want_scales)
    assert (scales.isinf().sum(), scales.isnan().sum()) == (2, 256)
    # An infinite group is 0 but for the inf, which is inf * 0; a group with NaN is NaN throughout.
    infinite = scales.isinf()[:, 0]
    assert (values.float()[infinite].nan_to_num(1.0).abs().sum(1) == 1).all()
    assert values[scales.isnan()[:, 0]].isnan().all()


@pytest.mark.parametrize("magnitude", [1e-42, 1e-6, 1e-4, 1.0, 1e4, 3e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fp8_of_random_rows(dtype: torch.dtype, magnitude: float) -> None:
    x = (torch.randn(16, 512, generator=rng(), dtype=torch.float64) * magnitude).to(dtype)
    values, scales = cast_to_fp8(x)
    want_values, want_scales = cast_in_torch(x)
    assert_same_but_nan(values, want_values)
    assert_same_but_nan(scales, want_scales)


def test_fp8_without_torch_arithmetic() -> None:
    x = torch.randn(8, 256, generator=rng()).bfloat16()
    values, scales = cast_to_fp8(x)
    groups = x.float().numpy().reshape(8, 2, 128)
    amax = np.abs(groups).max(2)
    assert (scales.numpy() == amax / np.float32(448)).all()
    scaled = groups * (np.float32(1) / amax * np.float32(448))[:, :, None]
    assert scaled.dtype == np.float32
    codes = range(0x7F)  # the numbers that are not negative, ascending
    grid = [
        math.ldexp(c & 7, -9) if c < 8 else math.ldexp(8 + (c & 7), (c >> 3) - 10) for c in codes
    ]
    distance = np.abs(np.abs(scaled.astype(np.float64)).reshape(-1, 1) - np.array(grid))
    # The nearest; of two equally near the even one.
    nearest = np.where(distance == distance.min(1, keepdims=True), np.array(codes) & 1, 2).argmin(1)
    want = nearest.reshape(8, 256) | np.where(np.signbit(scaled), 0x80, 0).reshape(8, 256)
    assert (values.view(torch.uint8).numpy() == want).all()


def edges_of_powers() -> Tensor:
    """amax just below, at and just above 448 * 2**k, one to a group."""
    at = torch.tensor([448 * 2.0**k for k in range(-20, 110, 7)])
    below, above = at.nextafter(torch.tensor(0.0)), at.nextafter(torch.tensor(math.inf))
    amax = torch.cat([below, at, above, torch.tensor([0.0, 1e-4, 3.0e38])])
    x = torch.zeros(len(amax), 128)
    x[:, 5] = -amax
    x[:, 6] = amax / 3
    return x


@pytest.mark.parametrize("x", [torch.randn(64, 128, generator=rng()), edges_of_powers()])
def test_round_scale_is_the_smallest_power_of_two(x: Tensor) -> None:
    values, scales = cast_to_fp8(x, round_scale=True)
    for row, scale in enumerate(scales[:, 0].tolist()):
        want = Fraction(max(x[row].abs().max().item(), torch.tensor(1e-4).item())) / 448
        assert math.frexp(scale)[0] == 0.5
        assert Fraction(scale) >= want > Fraction(scale) / 2
    assert_same(values, (x.double() / scales.double()).float().to(FP8))  # no rounding but the last


def test_round_scale_keeps_inf_and_nan() -> None:
    x = torch.ones(2, 128)
    x[0, 0], x[1, 0] = math.inf, math.nan
    values, scales = cast_to_fp8(x, round_scale=True)
    assert scales[0, 0] == math.inf
    assert scales[1, 0].isnan()
    assert values.isnan().sum(1).tolist() == [1, 128]


def test_ue8m0_packs_what_round_scale_gives() -> None:
    x = torch.randn(6, 1024, generator=rng()) * torch.logspace(-6, 6, 6)[:, None]
    values, scales = cast_to_fp8(x, round_scale=True)
    packed_values, packed = cast_to_fp8(x, round_scale=True, use_ue8m0=True)
    assert_same(packed_values, values)
    assert (packed.dtype, packed.shape) == (torch.int32, (6, 2))
    assert_same(unpack_ue8m0(packed), scales)
    assert_same(cast_back(values, packed), cast_back(values, scales))


def test_ue8m0_round_trip_of_every_exponent() -> None:
    scales = torch.tensor([2.0**e for e in range(-126, 126)]).view(-1, 12)
    packed = pack_ue8m0(scales)
    assert packed.min() < 0 < packed.max()  # the highest byte reaches the sign
    want = np.arange(1, 253, dtype=np.uint8).reshape(-1, 12).view("<i4")
    assert (packed.numpy() == want).all()
    assert_same(unpack_ue8m0(packed), scales)


def test_ue8m0_of_inf_and_nan() -> None:
    packed = pack_ue8m0(torch.tensor([[1.0, math.inf, math.nan, -math.nan]]))
    assert packed.view(torch.uint8).tolist() == [[127, 255, 255, 255]]
    assert unpack_ue8m0(packed).tolist() == [[1.0, math.inf, math.inf, math.inf]]


def test_cast_back_rounds_the_float32_product() -> None:
    x = torch.arange(256).to(torch.uint8).view(FP8).repeat(4, 1)
    scales = torch.rand(4, 2, generator=rng()) * 3
    want = x.float().view(4, 2, 128) * scales[:, :, None]
    assert_same_but_nan(cast_back(x, scales), want.view(4, 256).bfloat16())


@pytest.mark.parametrize("round_scale", [False, True])
def test_cast_back_undoes_the_cast(round_scale: bool) -> None:
    x = torch.randn(8, 512, generator=rng()).bfloat16()
    values, scales = cast_to_fp8(x, round_scale=round_scale)
    back = cast_back(values, scales)
    amax = x.float().abs().view(8, 4, 128).amax(2).repeat_interleave(128, 1)
    # Four significant bits, then a subnormal step near 0; bfloat16's own error is in the last term.
    bound = x.float().abs() * 2**-4 + amax * 2**-16 + x.float().abs() * 2**-8
    assert ((back.float() - x.float()).abs() <= bound).all()


def test_fp8_of_nothing() -> None:
    values, scales = cast_to_fp8(torch.zeros(0, 512), round_scale=True, use_ue8m0=True)
    assert (values.shape, scales.shape) == ((0, 512), (0, 1))
    assert cast_back(values, scales).shape == (0, 512)


@pytest.mark.parametrize(
    "hidden, options, message",
    [
        (100, {}, "x has hidden size 100, want a multiple of 128"),
        (
            512,
            {"use_ue8m0": True},
            "use_ue8m0 is True with round_scale=False, want round_scale=True",
        ),
        (
            256,
            {"use_ue8m0": True, "round_scale": True},
            "scales have 2 columns, want a multiple of 4",
        ),
    ],
)
def test_fp8_refuses(hidden: int, options: dict[str, bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cast_to_fp8(torch.zeros(1, hidden), **options)
