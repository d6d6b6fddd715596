"""The gradients of unpermute in each kernel set against `spec`, and rows of a fixed number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tokenyard
from tests.cases.kernel_sets import FOR_CPUS, NAMES, SETS
from tokenyard import spec
from tokenyard.ops import permute as ops
from tokenyard.testing import ROUTINGS, assert_same, numbered_tokens, poisoned, routing

SUMMABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=SETS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    with poisoned():
        yield request.param


def case(
    num_rows: int, topk: int, num_experts: int, hidden: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """grad, y, row_of, weights; some rows of y belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_rows, 2 * num_experts + topk, generator=generator).argsort(1)[:, :topk]
    topk_idx = torch.where(ids < num_experts, ids, -1)
    grad = torch.randn(num_rows, hidden, generator=generator).to(dtype)
    places = tokenyard.permute(grad, topk_idx, num_experts, expert_alignment=3)
    y = torch.randn(places.x.shape, generator=generator).to(dtype)
    return grad, y, places.row_of, torch.rand(num_rows, topk, generator=generator)


@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
@pytest.mark.parametrize("hidden", [1, 15, 16, 33])
def test_meets_the_specification(name: str, hidden: int, dtype: torch.dtype) -> None:
    grad, y, row_of, weights = case(20, 4, 5, hidden, dtype)
    got = ops.unpermute_backward(grad, y, row_of, weights, kernels=name)
    assert_same(got, spec.unpermute_backward(grad, y, row_of, weights))


@pytest.mark.parametrize("name", FOR_CPUS, indirect=True)
@pytest.mark.parametrize("hidden", [512, 515])
def test_much(name: str, hidden: int) -> None:
    """Enough for streaming stores; as the reference says, since `spec` would take minutes."""
    grad, y, row_of, weights = case(700, 8, 9, hidden, torch.bfloat16)
    got = ops.unpermute_backward(grad, y, row_of, weights, kernels=name)
    assert y.numel() * 2 > 1 << 20
    assert_same(got, ops.unpermute_backward(grad, y, row_of, weights, kernels="reference"))


def test_rows_may_lie_apart(name: str) -> None:
    grad, y, row_of, weights = case(12, 3, 4, 24, torch.float32)
    want = spec.unpermute_backward(grad[:, 2:19], y[:, 5:22], row_of, weights)
    got = ops.unpermute_backward(grad[:, 2:19], y[:, 5:22], row_of, weights, kernels=name)
    assert_same(got, want)
    expanded = grad[:1, :1].expand(12, 24)  # as .sum().backward() makes it
    got = ops.unpermute_backward(expanded, y, row_of, weights.t().contiguous().t(), kernels=name)
    assert_same(got, spec.unpermute_backward(expanded, y, row_of, weights))


@pytest.mark.parametrize("kind", ["no-rows", "all-elsewhere", "no-results"])
def test_nothing(name: str, kind: str) -> None:
    num_rows, num_places = {"no-rows": (0, 4), "all-elsewhere": (3, 4), "no-results": (3, 0)}[kind]
    grad, y = torch.randn(num_rows, 5), torch.randn(num_places, 5)
    row_of, weights = torch.full((num_rows, 2), -1), torch.rand(num_rows, 2)
    got = ops.unpermute_backward(grad, y, row_of, weights, kernels=name)
    assert_same(got, (torch.zeros(num_places, 5), torch.zeros(num_rows, 2)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weights_of_another_dtype_get_gradients_of_it(name: str, dtype: torch.dtype) -> None:
    grad, y, row_of, weights = case(6, 2, 3, 7, torch.float32)
    _, got = ops.unpermute_backward(grad, y, row_of, weights.to(dtype), kernels=name)
    _, want = spec.unpermute_backward(grad, y, row_of, weights)
    assert_same(got, want.to(dtype))


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    hidden=st.integers(1, 40),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(SUMMABLE),
    name=st.sampled_from(NAMES),
)
def test_any(
    shape: tuple[int, int, int], hidden: int, seed: int, dtype: torch.dtype, name: str
) -> None:
    grad, y, row_of, weights = case(*shape, hidden, dtype, seed)
    got = ops.unpermute_backward(grad, y, row_of, weights, kernels=name)
    assert_same(got, spec.unpermute_backward(grad, y, row_of, weights))


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_permute_to_a_number_of_rows(name: str, kind: str, alignment: int) -> None:
    topk_idx, _ = routing(kind, 50, 3, 6)
    x, scales = numbered_tokens(50, 33), numbered_tokens(50, 3, first=50, dtype=torch.float32)
    want = spec.permute(x, topk_idx, 6, expert_alignment=alignment, scales=scales)
    got = tokenyard.permute(
        x, topk_idx, 6, expert_alignment=alignment, scales=scales, num_rows=200, kernels=name
    )
    for field in ("x", "scales"):
        made, due = getattr(got, field), getattr(want, field)
        assert_same(made[: len(due)], due)
        assert_same(made[len(due) :], torch.zeros_like(made)[len(due) :])
        assert len(made) == 200
    assert_same([got.row_of, got.offsets], [want.row_of, want.offsets])


def test_permute_to_a_number_of_rows_of_out(name: str) -> None:
    x, out = torch.ones(2, 3), torch.full((6, 3), 7.0)
    got = tokenyard.permute(x, torch.tensor([[0], [-1]]), 1, num_rows=4, out=out, kernels=name)
    assert got.x.data_ptr() == out.data_ptr()
    assert out[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 7.0, 7.0]


def test_spread_goes_where_permute_went(name: str) -> None:
    x, topk_idx = numbered_tokens(50, 33), routing("holes", 50, 3, 6)[0]
    got = tokenyard.permute(x, topk_idx, 6, expert_alignment=8)
    assert_same(ops.spread(x, got.row_of, len(got.x), kernels=name), got.x)


def backward(**changed: Any) -> Any:
    good = {
        "grad": torch.ones(2, 3),
        "y": torch.ones(4, 3),
        "row_of": torch.tensor([[0, -1], [3, 1]]),
        "weights": torch.ones(2, 2),
    }
    return ops.unpermute_backward(**{**good, **changed})


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: tokenyard.permute(torch.ones(2, 3), torch.zeros(2, 1).long(), 1, num_rows=1),
            "num_rows is 1, want at least the 2 there are",
        ),
        (
            lambda: tokenyard.permute(torch.ones(2, 3), torch.zeros(2, 1).long(), 1, num_rows=-1),
            "num_rows is -1, want at least 0",
        ),
        (
            lambda: tokenyard.permute(
                torch.ones(2, 3), torch.zeros(2, 1).long(), 1, num_rows=3, out=torch.ones(2, 3)
            ),
            "out has 2 rows, want at least 3",
        ),
        (
            lambda: ops.spread(torch.ones(1, 3), torch.tensor([[0, 2]]), 2),
            "row_of[0, 1] is 2, want -1..1 (num_rows=2)",
        ),
        (
            lambda: backward(row_of=torch.tensor([[0, -1], [4, 1]])),
            "row_of[1, 0] is 4, want -1..3 (y has 4 rows)",
        ),
        (lambda: backward(grad=torch.ones(3, 3)), "row_of has shape [2, 2], want [3, topk]"),
        (lambda: backward(grad=torch.ones(2, 4)), "grad has hidden size 4, want y's 3"),
        (lambda: backward(grad=torch.ones(2, 3).double()), "grad has dtype float64, want float32"),
        (lambda: backward(weights=torch.ones(2, 3)), "weights has shape [2, 3], want [2, 2]"),
    ],
)
def test_bad_input(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        call()
