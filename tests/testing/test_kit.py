"""The kit for tests: comparisons, poison, and routings."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.cases.processes import Pools
from tokenyard.testing import ROUTINGS, assert_same, layout_of, numbered_tokens, poisoned, routing


@pytest.mark.parametrize(
    "got, want, text",
    [
        (torch.zeros(2), torch.zeros(1), r"shape \[2\], want \[1\]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype torch.float32, want"),
        (torch.tensor([0.0, -0.0]), torch.zeros(2), r"value\[1\] is -0.0, want 0.0 \(1 of 2"),
        (torch.tensor([float("nan")]), torch.zeros(1), r"value\[0\] is nan, want 0.0"),
        ([1, 2], [1, 3], r"value\[1\] is 2, want 3"),
        ([1], [1, 3], "value has length 1, want 2"),
        (None, torch.zeros(1), "value is None, want a tensor"),
        (3, [3], "value is 3, want a sequence"),
    ],
)
def test_assert_same_sees_every_difference(got: object, want: object, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_same(got, want)


def test_assert_same_accepts_equal_bits() -> None:
    values = torch.tensor([1.5, -0.0, float("inf"), float("nan")])
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        assert_same(values.to(dtype), values.to(dtype))
    assert_same([torch.tensor([True]), 3, None], [torch.tensor([True]), 3, None])


def test_poison_fills_what_nobody_wrote() -> None:
    from tokenyard.runtime import memory

    with poisoned():
        assert memory.empty(3, 2, dtype=torch.bfloat16).isnan().all()
        assert memory.empty(3, 8).view(torch.float32).isnan().all()
        assert memory.empty_array(4, "int32").tolist() == [-(2**31)] * 4
    assert memory.empty_array.__module__ == "numpy"


@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings_choose_distinct_experts_but_for_one(kind: str) -> None:
    topk_idx, weights = routing(kind, 200, 4, 16, seed=3)
    assert (topk_idx.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert topk_idx.shape == weights.shape == (200, 4)
    assert (topk_idx.min() >= -1) & (topk_idx.max() < 16)
    for token, row in enumerate(topk_idx.tolist()):
        chosen = [e for e in row if e != -1]
        doubled = kind == "doubled" and token % 2 == 0
        assert len(set(chosen)) == (1 if doubled else len(chosen))
    assert_same(routing(kind, 200, 4, 16, seed=3), (topk_idx, weights))


def test_routings_have_their_tempers() -> None:
    def share(kind: str) -> torch.Tensor:
        """Of the choices: how many are expert 0, how many nobody."""
        topk_idx, _ = routing(kind, 2000, 2, 16)
        return torch.stack([(topk_idx == 0).float().mean(), (topk_idx == -1).float().mean()])

    assert_same(share("one"), torch.tensor([0.5, 0.5]))
    assert_same(share("none"), torch.tensor([0.0, 1.0]))
    assert 0.05 < share("uniform")[0] < 0.075  # 1 in 16
    assert share("skewed")[0] > 0.2
    assert 0.3 < share("holes")[1] < 0.37
    with pytest.raises(ValueError, match="routing is 'fair', want one of uniform, skewed"):
        routing("fair", 1, 1, 1)


def test_numbered_tokens_know_who_they_are() -> None:
    all_of_them = numbered_tokens(100, 8, dtype=torch.float64)
    assert_same(numbered_tokens(30, 8, first=70, dtype=torch.float64), all_of_them[70:])
    assert len({tuple(row) for row in all_of_them.tolist()}) == 100


def test_layout_of_needs_no_group() -> None:
    got = layout_of(torch.tensor([[0, 3], [-1, 2]]), num_experts=4, num_ranks=2)
    assert got.is_token_in_rank.tolist() == [[True, True], [False, True]]
    assert got.num_tokens_per_rank.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"topk_idx\[0, 1\] is 4, want -1..3 \(num_experts=4\)"):
        layout_of(torch.tensor([[0, 4]]), num_experts=4, num_ranks=2)
    with pytest.raises(ValueError, match="num_ranks is 0, want at least 1"):
        layout_of(torch.tensor([[0, 3]]), num_experts=4, num_ranks=0)


_answers: list[weakref.ref[torch.Tensor]] = []  # of the rank that runs a job


def _answer(group: Any) -> torch.Tensor:
    x = torch.ones(3)
    _answers.append(weakref.ref(x))
    return x


def _is_held(group: Any) -> bool:
    return _answers.pop()() is not None


@pytest.mark.processes
def test_a_rank_lets_go_of_what_it_has_answered(processes: Pools) -> None:
    ranks = processes(1)
    assert_same(ranks.run(_answer), [torch.ones(3)])
    assert ranks.run(_is_held) == [False]
