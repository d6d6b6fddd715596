"""moe_align_block_size of each kernel set against `spec`, and what it says of bad input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tokenyard
from tests.cases.kernel_sets import FOR_CPUS, SETS
from tokenyard import spec
from tokenyard.testing import ROUTINGS, assert_same, poisoned, routing


@pytest.fixture(params=SETS)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    with poisoned():
        yield request.param


def assert_meets_spec(topk_ids: Tensor, block_size: int, num_experts: int, name: str) -> None:
    got = tokenyard.moe_align_block_size(topk_ids, block_size, num_experts, kernels=name)
    want = spec.moe_align_block_size(topk_ids, block_size, num_experts)
    assert_same(
        tuple(got), (want.sorted_token_ids, want.expert_ids, want.num_tokens_post_pad), "aligned"
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routings(name: str, kind: str, block_size: int, dtype: torch.dtype) -> None:
    topk_ids, _ = routing(kind, 90, 4, 20)
    assert_meets_spec(topk_ids.to(dtype), block_size, 20, name)


@pytest.mark.parametrize(
    "topk_ids, num_experts",
    [
        pytest.param(torch.zeros(0, 4, dtype=torch.int64), 5, id="no-tokens"),
        pytest.param(torch.full((6, 2), -1), 4, id="all-dropped"),
        pytest.param(torch.full((40, 1), 3), 5, id="one-expert-of-five"),
        pytest.param(torch.zeros(40, 1, dtype=torch.int64), 1, id="one-expert-at-all"),
        pytest.param(torch.tensor([[63, 0, 17]]), 64, id="fewer-pairs-than-experts"),
        pytest.param(torch.arange(8).view(2, 4), 8, id="as-many-pairs-as-experts"),
        pytest.param(torch.zeros(3, 9, dtype=torch.int64), 2, id="an-expert-twice-in-a-token"),
        pytest.param(torch.arange(12).view(3, 4).T, 12, id="transposed"),
        pytest.param(torch.arange(40).view(5, 8)[:, ::2], 40, id="every-other-column"),
        pytest.param(torch.tensor([[7]]).expand(9, 3), 8, id="expanded"),
    ],
)
@pytest.mark.parametrize("block_size", [1, 4, 64])
def test_named_cases(name: str, topk_ids: Tensor, num_experts: int, block_size: int) -> None:
    assert_meets_spec(topk_ids, block_size, num_experts, name)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", SETS)
def test_any_ids(name: str, data: st.DataObject) -> None:
    num_experts, topk = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    ids = data.draw(st.lists(st.integers(-1, num_experts - 1), max_size=12 * topk))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    topk_ids = torch.tensor(ids[: len(ids) // topk * topk], dtype=dtype).view(-1, topk)
    with poisoned():
        assert_meets_spec(topk_ids, data.draw(st.integers(1, 20)), num_experts, name)


@pytest.mark.parametrize("name", FOR_CPUS, indirect=True)
@pytest.mark.parametrize("block_size", [1, 7, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_many_pairs(name: str, kind: str, block_size: int) -> None:
    """As many as the numba set stacks before it lays them out."""
    topk_ids, _ = routing(kind, 4200, 4, 20)
    assert_meets_spec(topk_ids, block_size, 20, name)


def test_reads_as_the_tuple_of_sglang() -> None:
    got = tokenyard.moe_align_block_size(torch.tensor([[1, 0]]), 4, 2)
    sorted_token_ids, expert_ids, num_tokens_post_pad = got
    assert got[0] is sorted_token_ids is got.sorted_token_ids
    assert got[1] is expert_ids is got.expert_ids
    assert got[2] is num_tokens_post_pad is got.num_tokens_post_pad
    assert sorted_token_ids.tolist() == [1, 2, 2, 2, 0, 2, 2, 2]


def many_ids() -> Tensor:
    """As many as make the numba set take three threads."""
    return torch.randint(-1, 37, (400_001, 4), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_do_not_change_places(
    pools: list[int], num_threads: int, dtype: torch.dtype
) -> None:
    topk_ids = many_ids().to(dtype)
    torch.set_num_threads(num_threads)
    with poisoned():
        got = tokenyard.moe_align_block_size(topk_ids, 16, 40, kernels="numba")
    assert pools == [num_threads] * 2  # to count, and to put pairs in their places
    torch.set_num_threads(1)
    assert_same(got, tokenyard.moe_align_block_size(topk_ids, 16, 40, kernels="numba"))
    assert_same(got, tokenyard.moe_align_block_size(topk_ids, 16, 40, kernels="reference"))
    assert len(pools) == 2


def test_threads_name_the_first_bad_id(pools: list[int]) -> None:
    topk_ids = many_ids()
    topk_ids[390_000, 2] = 40
    torch.set_num_threads(2)
    for first in (380_000, 100):  # in the second part, as the one before; then in the first
        topk_ids[first, 1] = 40
        with pytest.raises(ValueError) as caught:
            tokenyard.moe_align_block_size(topk_ids, 16, 40, kernels="numba")
        assert str(caught.value) == f"topk_ids[{first}, 1] is 40, want -1..39 (num_experts=40)"
    assert pools == [2, 2]


@pytest.mark.parametrize("bad", [64, -2, 2**31 - 1, -(2**31), 2**40, -(2**62)])
def test_bad_id(name: str, bad: int) -> None:
    """The first one is named, and none reaches an address."""
    topk_ids, _ = routing("holes", 20, 4, 64)
    topk_ids[3, 1] = topk_ids[9, 0] = bad
    dtypes = [torch.int64] if abs(bad) > 2**31 else [torch.int64, torch.int32]
    for dtype in dtypes:
        with pytest.raises(ValueError) as caught:
            tokenyard.moe_align_block_size(topk_ids.to(dtype), 16, 64, kernels=name)
        assert str(caught.value) == f"topk_ids[3, 1] is {bad}, want -1..63 (num_experts=64)"


IDS = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize(
    "change, text",
    [
        ({"topk_ids": [[0]]}, "topk_ids is a list, want a torch.Tensor"),
        ({"topk_ids": IDS[0]}, "topk_ids has shape [2], want [tokens, topk]"),
        ({"topk_ids": IDS.float()}, "topk_ids has dtype float32, want int32, int64"),
        ({"topk_ids": IDS.short()}, "topk_ids has dtype int16, want int32, int64"),
        ({"topk_ids": IDS[:, :0]}, "topk_ids has top-k 0, want at least 1"),
        ({"block_size": 0}, "block_size is 0, want at least 1"),
        ({"block_size": -64}, "block_size is -64, want at least 1"),
        ({"block_size": 64.0}, "block_size is 64.0, want an integer"),
        ({"block_size": True}, "block_size is True, want an integer"),
        ({"num_experts": 0}, "num_experts is 0, want at least 1"),
        ({"num_experts": "4"}, "num_experts is '4', want an integer"),
        ({"num_experts": 2**40}, f"num_experts is {2**40}, want at most {2**20}"),
        (
            {"block_size": 2**30, "num_experts": 4},
            f"4 pairs of 4 experts in blocks of {2**30} take up to {2**32} entries, "
            f"want at most {2**31 - 1}",
        ),
        (
            {"block_size": 2**30, "num_experts": 5},
            f"4 pairs of 5 experts in blocks of {2**30} take up to {2**32} entries, "
            f"want at most {2**31 - 1}",
        ),
        (
            {"kernels": "numby"},
            "unknown kernel set 'numby'; available: auto, numba, reference",
        ),
        (
            {"kernels": "numba", "topk_ids": IDS.to("meta")},
            "kernels is 'numba' for tensors on meta, want auto or reference",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(change: dict[str, Any], text: str) -> None:
    call = {"topk_ids": IDS, "block_size": 4, "num_experts": 3, **change}
    with pytest.raises(ValueError) as caught:
        tokenyard.moe_align_block_size(**call)
    assert str(caught.value) == text
