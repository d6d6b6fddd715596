"""permute and unpermute of each kernel set against `spec`, and what they say of bad input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import grouped_mm

import tokenyard
from tests.cases.kernel_sets import FOR_CPUS, SETS
from tests.cases.lanes import at_night
from tokenyard import spec
from tokenyard.testing import ROUTINGS, assert_same, numbered_tokens, poisoned, routing, run_virtual
from tokenyard.types import ROW_DTYPES, Permuted

SUMMABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=SETS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    with poisoned():
        yield request.param


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def local_ids(num_rows: int, topk: int, num_experts: int, seed: int = 0) -> Tensor:
    """Local ids as they arrive: a row has any number of experts here, the rest are elsewhere."""
    ids = torch.rand(num_rows, 3 * num_experts + topk, generator=rng(seed)).argsort(1)[:, :topk]
    return torch.where(ids < num_experts, ids, -1)


def assert_meets_spec(got: Permuted, want: spec.Permuted) -> None:
    for field in ("x", "scales", "row_of", "offsets"):
        assert_same(getattr(got, field), getattr(want, field), field)


def noise(num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Any bits: permute must not care, and NaN payloads must arrive."""
    size = (num_rows, hidden * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=rng()).view(dtype)


@pytest.mark.parametrize("alignment", [1, 8, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_permute(name: str, kind: str, alignment: int) -> None:
    topk_idx, _ = routing(kind, 50, 3, 6)
    x, scales = numbered_tokens(50, 33), numbered_tokens(50, 3, first=50, dtype=torch.float32)
    got = tokenyard.permute(x, topk_idx, 6, expert_alignment=alignment, scales=scales, kernels=name)
    assert_meets_spec(got, spec.permute(x, topk_idx, 6, expert_alignment=alignment, scales=scales))


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_permute_moves_bytes(name: str, dtype: torch.dtype) -> None:
    x, scales = noise(20, 7, dtype), noise(20, 3, torch.int32)
    topk_idx = local_ids(20, 4, 5)
    got = tokenyard.permute((x, scales), topk_idx, 5, kernels=name)  # the pair of dispatch
    want = spec.permute(x.view(torch.uint8), topk_idx, 5, scales=scales)
    assert got.x.dtype == dtype
    assert_same(got.x.view(torch.uint8), want.x)
    assert_same(got.scales, want.scales)


@pytest.mark.parametrize(
    "topk_idx, num_experts",
    [
        pytest.param(torch.zeros(0, 3, dtype=torch.int64), 4, id="no-rows"),
        pytest.param(torch.full((9, 2), -1), 4, id="all-elsewhere"),
        pytest.param(torch.full((9, 2), -1), 0, id="a-rank-without-experts"),
        pytest.param(torch.zeros(9, 1, dtype=torch.int64), 1, id="one-expert"),
        pytest.param(torch.tensor([[0], [-1], [2]]), 3, id="top-1"),
        pytest.param(torch.tensor([[70, 3]]), 80, id="more-experts-than-rows"),
        pytest.param(torch.tensor([[1, 1, 1]]), 2, id="an-expert-twice-in-a-row"),
        pytest.param(local_ids(9, 4, 5).int(), 5, id="int32"),
        pytest.param(local_ids(4, 9, 5).T, 5, id="transposed-ids"),
        pytest.param(local_ids(9, 8, 5)[:, ::2], 5, id="ids-apart"),
    ],
)
@pytest.mark.parametrize("alignment", [1, 4])
def test_permute_named_cases(name: str, topk_idx: Tensor, num_experts: int, alignment: int) -> None:
    x = numbered_tokens(len(topk_idx), 5)
    got = tokenyard.permute(x, topk_idx, num_experts, expert_alignment=alignment, kernels=name)
    want = spec.permute(x, topk_idx, num_experts, expert_alignment=alignment)
    assert_meets_spec(got, want)


STRIDED = [
    pytest.param(lambda x: x[:, 2:9], id="rows-apart"),
    pytest.param(lambda x: x[::2].repeat(2, 1), id="fewer-rows"),
    pytest.param(lambda x: x[:, ::3], id="elements-apart"),
    pytest.param(lambda x: x[:, 4:5], id="a-column"),
    pytest.param(lambda x: x[:1].expand(12, 12), id="expanded"),
    pytest.param(lambda x: x.T, id="transposed"),
]


@pytest.mark.parametrize("view", STRIDED)
def test_strided_rows(name: str, view: Any) -> None:
    x, scales = view(numbered_tokens(12, 12)), view(numbered_tokens(12, 12, dtype=torch.float32))
    topk_idx = local_ids(len(x), 4, 5)
    got = tokenyard.permute(x, topk_idx, 5, scales=scales, kernels=name)
    assert_meets_spec(got, spec.permute(x, topk_idx, 5, scales=scales))
    back = tokenyard.unpermute(x, topk_idx, kernels=name)  # ids are rows of x as well as any
    assert_same(back, spec.unpermute(x, topk_idx))


@pytest.mark.parametrize("name", FOR_CPUS, indirect=True)
@pytest.mark.parametrize("hidden", [512, 515])
@pytest.mark.parametrize("offset", [0, 3])
def test_permute_of_much(name: str, hidden: int, offset: int) -> None:
    """Enough for streaming stores, on lines' boundaries and beside them."""
    x = numbered_tokens(700, hidden + offset)[:, offset:]
    topk_idx = local_ids(700, 8, 9)
    assert (topk_idx >= 0).sum() * hidden * 2 > 1 << 20
    got = tokenyard.permute(x, topk_idx, 9, expert_alignment=16, kernels=name)
    assert_meets_spec(got, spec.permute(x, topk_idx, 9, expert_alignment=16))


def test_permute_into_the_users_memory(name: str) -> None:
    x, topk_idx = numbered_tokens(30, 17), local_ids(30, 4, 5)
    want = spec.permute(x, topk_idx, 5, expert_alignment=8).x
    whole = torch.full((len(want) + 2, 25), 7.0, dtype=torch.bfloat16)
    got = tokenyard.permute(x, topk_idx, 5, expert_alignment=8, out=whole[:, 4:21], kernels=name).x
    assert got.data_ptr() == whole[:, 4:].data_ptr()
    assert_same(got.clone(), want)
    assert_same(whole[: len(want), 4:21].clone(), want)
    whole[: len(want), 4:21] = 7.0
    assert (whole == 7.0).all()  # nothing beside it was touched


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
@pytest.mark.parametrize("hidden", at_night([1, 16, 33, 128, 300], gate=(1, 33, 128)))
def test_unpermute(name: str, hidden: int, dtype: torch.dtype, weighted: bool) -> None:
    row_of = local_ids(40, 6, 9)  # any rows of y, some of them often, some rows of none
    y = torch.randn(9, hidden, generator=rng()).to(dtype)
    weights = torch.randn(40, 6, generator=rng(1)) if weighted else None
    if weights is not None:
        weights[row_of == -1] = math.nan  # never read
    got = tokenyard.unpermute(y, row_of, weights=weights, kernels=name)
    assert_same(got, spec.unpermute(y, row_of, weights=weights))


@pytest.mark.parametrize("weights_dtype", SUMMABLE, ids=str)
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
def test_weights_of_any_dtype(name: str, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    row_of, y = local_ids(20, 4, 6), torch.randn(6, 9, generator=rng()).to(dtype)
    weights = torch.randn(4, 20, generator=rng(1), dtype=torch.float64).to(weights_dtype).T
    got = tokenyard.unpermute(y, row_of, weights=weights, kernels=name)
    assert_same(got, spec.unpermute(y, row_of, weights=weights))


@pytest.mark.parametrize("row_of", [torch.zeros(0, 3), torch.full((5, 3), -1.0)], ids=["0", "-1"])
@pytest.mark.parametrize("num_rows", [0, 4])
def test_unpermute_of_nothing(name: str, num_rows: int, row_of: Tensor) -> None:
    got = tokenyard.unpermute(torch.ones(num_rows, 40), row_of.long(), kernels=name)
    assert_same(got, torch.zeros(len(row_of), 40))


@pytest.mark.parametrize("name", FOR_CPUS, indirect=True)
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
@pytest.mark.parametrize("offset", [0, 8])
def test_unpermute_of_much(name: str, dtype: torch.dtype, offset: int) -> None:
    """Enough for streaming stores, which want lines: on their boundary, and beside it."""
    num_rows, hidden = 60, 9216
    row_of, y = local_ids(num_rows, 6, 20), torch.randn(20, hidden, generator=rng()).to(dtype)
    weights = torch.rand(num_rows, 6, generator=rng(1))
    memory = torch.empty(num_rows * hidden + 64, dtype=dtype)
    out = memory[offset : offset + num_rows * hidden].view(num_rows, hidden)
    assert out.nbytes > 1 << 20
    got = tokenyard.unpermute(y, row_of, weights=weights, out=out, kernels=name)
    assert got.data_ptr() == out.data_ptr()
    assert_same(out, spec.unpermute(y, row_of, weights=weights))


@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
def test_unpermute_of_every_kind_of_number(name: str, dtype: torch.dtype) -> None:
    """Zeros of both signs, denormals, the largest numbers, infinities, NaN, ties in rounding."""
    info = torch.finfo(dtype)
    values = torch.tensor(
        [
            *(0.0, -0.0, info.tiny, info.tiny / 2, info.max, -info.max, info.eps, 1 + info.eps),
            *(1.0, 3.0, 256.0, 257.0, math.inf, -math.inf, math.nan),
        ],
        dtype=torch.float64,
    ).to(dtype)
    y = torch.cartesian_prod(values, values).T.contiguous()
    row_of = torch.tensor([[0, 1], [1, 0], [0, -1]])
    for weights in (None, torch.tensor([[1.0, -1.0], [0.5, 3.0], [0.0, math.inf]])):
        got = tokenyard.unpermute(y, row_of, weights=weights, kernels=name)
        assert_same(got, spec.unpermute(y, row_of, weights=weights))


@pytest.mark.parametrize("hidden", [1, 16, 128])
def test_products_are_rounded_before_they_are_added(name: str, hidden: int) -> None:
    """(1 + e) * (1 + e) - (1 + 2e) is e * e if fused, 0 if not."""
    e = 2.0**-12
    y = torch.tensor([[-1 - 2 * e], [1 + e]]).expand(2, hidden)
    weights = torch.tensor([[1.0, 1 + e]])
    got = tokenyard.unpermute(y, torch.tensor([[0, 1]]), weights=weights, kernels=name)
    assert_same(got, torch.zeros(1, hidden))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", SETS)
def test_there_and_back(name: str, data: st.DataObject) -> None:
    num_experts, topk = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    ids = data.draw(st.lists(st.integers(-1, num_experts - 1), max_size=9 * topk))
    topk_idx = torch.tensor(ids[: len(ids) // topk * topk], dtype=torch.int64).view(-1, topk)
    hidden = data.draw(st.sampled_from([1, 5, 16, 130]))
    dtype = data.draw(st.sampled_from(SUMMABLE))
    alignment = data.draw(st.sampled_from([1, 3, 8]))
    x = torch.randn(len(topk_idx), hidden, generator=rng(len(ids))).to(dtype)
    weights = torch.randn(topk_idx.shape, generator=rng(7))
    with poisoned():
        got = tokenyard.permute(x, topk_idx, num_experts, expert_alignment=alignment, kernels=name)
        back = tokenyard.unpermute(got.x, got.row_of, weights=weights, kernels=name)
    want = spec.permute(x, topk_idx, num_experts, expert_alignment=alignment)
    assert_meets_spec(got, want)
    assert_same(back, spec.unpermute(want.x, want.row_of, weights=weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_offsets_feed_grouped_mm(name: str, dtype: torch.dtype, alignment: int) -> None:
    topk_idx = local_ids(60, 4, 6)
    topk_idx[topk_idx == 2] = -1  # an expert without rows
    x = torch.randn(60, 32, generator=rng()).to(dtype)
    experts = torch.randn(6, 32, 48, generator=rng(1)).to(dtype)
    got = tokenyard.permute(x, topk_idx, 6, expert_alignment=alignment, kernels=name)
    y = tokenyard.unpermute(grouped_mm(got.x, experts, offs=got.offsets), got.row_of, kernels=name)
    want = torch.zeros(60, 48, dtype=torch.float64)
    for row, k in (topk_idx >= 0).nonzero().tolist():
        want[row] += x[row].double() @ experts[topk_idx[row, k]].double()
    # 32 products of about 1 each, rounded once by grouped_mm and once by unpermute.
    torch.testing.assert_close(y.double(), want, rtol=0.02, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("quantised", [False, True], ids=["rows", "pairs"])
def test_between_dispatch_and_combine(name: str, quantised: bool) -> None:
    """What dispatch returned goes in as it is; expert e multiplies by e + 1."""

    def job(group: Any) -> None:
        x = numbered_tokens(24, 16, first=24 * group.rank(), dtype=torch.float32)
        scales = numbered_tokens(24, 2, first=24 * group.rank(), dtype=torch.float32)
        topk_idx, weights = routing("skewed", 24, 4, 12, seed=group.rank())
        with tokenyard.Buffer(group, kernels=name) as buffer:
            got = buffer.dispatch(
                (x, scales) if quantised else x,
                topk_idx=topk_idx,
                topk_weights=weights,
                num_experts=12,
            )
            rows = tokenyard.permute(got.recv_x, got.recv_topk_idx, 4, kernels=name)
            counts = torch.diff(rows.offsets, prepend=torch.zeros(1, dtype=torch.int32))
            assert counts.tolist() == got.num_recv_tokens_per_expert_list
            gains = torch.arange(1.0, 5.0).repeat_interleave(counts) + 4 * group.rank()
            if quantised:
                assert_same(rows.scales, rows.x[:, :2].contiguous())
            out = tokenyard.unpermute(
                rows.x * gains[:, None],
                rows.row_of,
                weights=got.recv_topk_weights,
                out=buffer.get_next_combine_buffer(got.handle),
                kernels=name,
            )
            sums = buffer.combine(out, got.handle).x
        want = x * (weights * (topk_idx + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(sums, want, rtol=1e-5, atol=1e-5)  # added in another order

    run_virtual(job, 3)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_do_not_change_bits(pools: list[int], num_threads: int) -> None:
    topk_idx, weights = local_ids(1501, 8, 5), torch.rand(1501, 8, generator=rng())
    x = numbered_tokens(1501, 4097)

    def both() -> tuple[Tensor, Tensor]:
        with poisoned():
            got = tokenyard.permute(
                x, topk_idx, 5, expert_alignment=1024, scales=None, kernels="numba"
            )
            back = tokenyard.unpermute(got.x, got.row_of, weights=weights, kernels="numba")
        return got.x, back

    torch.set_num_threads(num_threads)
    many = both()
    assert pools == [num_threads] * 3  # to copy, to pad, to sum
    torch.set_num_threads(1)
    assert_same(many, both())
    assert len(pools) == 3


@pytest.mark.parametrize("bad", [6, -2, 2**31 - 1, 2**40, -(2**62)])
def test_bad_expert(name: str, bad: int) -> None:
    topk_idx = local_ids(20, 4, 6)
    topk_idx[3, 1] = topk_idx[9, 0] = bad
    with pytest.raises(ValueError) as caught:
        tokenyard.permute(numbered_tokens(20, 4), topk_idx, 6, kernels=name)
    assert str(caught.value) == f"topk_idx[3, 1] is {bad}, want -1..5 (num_experts=6)"


@pytest.mark.parametrize("bad", [9, -2, 2**40, -(2**62)])
def test_bad_row_of(name: str, bad: int) -> None:
    row_of, out = local_ids(20, 4, 6), torch.full((20, 5), 7.0)
    row_of[3, 1] = row_of[9, 0] = bad
    with pytest.raises(ValueError) as caught:
        tokenyard.unpermute(torch.ones(9, 5), row_of, out=out, kernels=name)
    assert str(caught.value) == f"row_of[3, 1] is {bad}, want -1..8 (y has 9 rows)"
    assert (out == 7.0).all()


SHARES = "out shares memory with what is read, want memory of its own"
LARGE = torch.ones(9, 8)
X, IDX = torch.ones(3, 4), torch.tensor([[0, 1], [1, -1], [0, 0]])


@pytest.mark.parametrize(
    "change, text",
    [
        ({"x": [1.0]}, "x is a list, want a torch.Tensor"),
        ({"x": X[0]}, "x has shape [4], want [rows, hidden]"),
        ({"x": X[:, :0]}, "x has hidden size 0, want at least 1"),
        (
            {"x": X.long()},
            "x has dtype int64, want float64, float32, float16, bfloat16, float8_e4m3fn, "
            "float8_e5m2, int8, uint8",
        ),
        ({"x": (X,)}, "x is a tuple of 1, want a tensor or the pair (x, scales)"),
        ({"x": (X, None)}, "x[1] (scales) is None, want a torch.Tensor"),
        ({"x": (X[0], X)}, "x[0] has shape [4], want [rows, hidden]"),
        ({"x": (X, X[:2])}, "x[1] (scales) has shape [2, 4], want [3, hidden]"),
        (
            {"x": (X, X), "scales": X},
            "scales are given twice, want x as a tensor or no scales beside it",
        ),
        ({"scales": X.double()}, "scales has dtype float64, want float32, int32"),
        ({"scales": X[:, :0]}, "scales has hidden size 0, want at least 1"),
        ({"topk_idx": IDX[:2]}, "topk_idx has shape [2, 2], want [3, topk]"),
        ({"topk_idx": IDX.float()}, "topk_idx has dtype float32, want int32, int64"),
        ({"topk_idx": IDX[:, :0]}, "topk_idx has top-k 0, want at least 1"),
        (
            {"topk_idx": IDX.to("meta")},
            "permute: x is on cpu and topk_idx on meta, want all on meta or none",
        ),
        ({"num_experts": -1}, "num_experts is -1, want at least 0"),
        ({"num_experts": 2**40}, f"num_experts is {2**40}, want at most {2**20}"),
        ({"num_experts": 1}, "topk_idx[0, 1] is 1, want -1..0 (num_experts=1)"),
        ({"expert_alignment": 0}, "expert_alignment is 0, want at least 1"),
        ({"expert_alignment": 8.0}, "expert_alignment is 8.0, want an integer"),
        (
            {"expert_alignment": 2**31 - 1},
            f"6 pairs of 2 experts in multiples of {2**31 - 1} take up to {2**32 + 2} rows, "
            f"want at most {2**31 - 1}",
        ),
        ({"out": torch.ones(3, 4)}, "out has 3 rows, want at least 5"),
        ({"out": X[:, :2]}, "out has shape [3, 2], want [rows, 4]"),
        ({"out": X.double()}, "out has dtype float64, want float32"),
        ({"out": torch.ones(4, 8).T}, "out has strides [1, 8], want [at least 4, 1]"),
        ({"x": LARGE[:3, :4], "out": LARGE[2:, :4]}, SHARES),
        ({"x": LARGE[:3, :4], "out": LARGE[:, 3:7]}, SHARES),
        ({"out": X[:1].expand(8, 4)}, "out has strides [0, 1], want [at least 4, 1]"),
        (
            {"out": torch.ones(8, 8).as_strided((8, 4), (3, 1))},
            "out has strides [3, 1], want [at least 4, 1]",
        ),
        ({"kernels": "cuda"}, "unknown kernel set 'cuda'; available: auto, numba, reference"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_of_permute(change: dict[str, Any], text: str) -> None:
    call = {"x": X, "topk_idx": IDX, "num_experts": 2, **change}
    with pytest.raises(ValueError) as caught:
        tokenyard.permute(**call)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "change, text",
    [
        ({"y": None}, "y is None, want a torch.Tensor"),
        ({"y": X[0]}, "y has shape [4], want [rows, hidden]"),
        ({"y": X.int()}, "y has dtype int32, want float64, float32, float16, bfloat16"),
        ({"y": X[:, :0]}, "y has hidden size 0, want at least 1"),
        ({"row_of": IDX.int()}, "row_of has dtype int32, want int64"),
        ({"row_of": IDX[0]}, "row_of has shape [2], want [rows, topk]"),
        ({"row_of": IDX[:, :0]}, "row_of has top-k 0, want at least 1"),
        ({"y": X[:1]}, "row_of[0, 1] is 1, want -1..0 (y has 1 rows)"),
        ({"weights": X}, "weights has shape [3, 4], want [3, 2]"),
        (
            {"weights": IDX},
            "weights has dtype int64, want float64, float32, float16, bfloat16",
        ),
        ({"out": X[:2]}, "out has shape [2, 4], want [3, 4]"),
        ({"out": X.half()}, "out has dtype float16, want float32"),
        ({"out": X[:1].expand(3, 4)}, "out has strides [0, 1], want [at least 4, 1]"),
        ({"out": X.to("meta")}, "out is on device meta, want cpu"),
        ({"out": X}, SHARES),
        ({"kernels": "cuda"}, "unknown kernel set 'cuda'; available: auto, numba, reference"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_of_unpermute(change: dict[str, Any], text: str) -> None:
    call = {"y": X, "row_of": IDX, **change}
    with pytest.raises(ValueError) as caught:
        tokenyard.unpermute(**call)
    assert str(caught.value) == text
