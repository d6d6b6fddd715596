"""Triton's kernels on a GPU against `spec`, bit for bit: what the interpreter cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard import kernels, spec
from tokenyard.testing import ROUTINGS, assert_same, routing

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)


def there(*tensors: Tensor) -> list[Tensor]:
    return [one.cuda() for one in tensors]


def here(values: object) -> object:
    if isinstance(values, Tensor):
        return values.cpu()
    return tuple(here(one) for one in values) if isinstance(values, tuple) else values


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_triton_is_chosen() -> None:
    assert kernels.choose("cuda") == "triton"


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("num_ranks", [1, 8, 72])
def test_layout_and_route(kind: str, num_ranks: int) -> None:
    topk_idx, _ = routing(kind, 5000, 3, 2 * num_ranks + 1)
    world = spec.World.even(2 * num_ranks + 1, num_ranks)
    owners = torch.tensor(world.rank_of_expert, dtype=torch.int32)
    triton, plain = kernels.load("triton"), kernels.load("reference")
    got, first_bad = triton.layout(topk_idx.cuda(), owners.cuda(), num_ranks, None)
    want = spec.layout(topk_idx, world)
    assert first_bad == -1
    assert_same(here(tuple(got)), tuple(want))
    route = triton.route(got.is_token_in_rank)
    assert_same(here(tuple(route)), tuple(plain.route(want.is_token_in_rank)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_permute_and_unpermute(dtype: torch.dtype, weighted: bool) -> None:
    topk_idx, weights = routing("holes", 300, 6, 9)
    x = torch.randn(300, 1000, generator=rng()).to(dtype)
    got = tokenyard.permute(x.cuda(), topk_idx.cuda(), 9, expert_alignment=16)
    want = spec.permute(x, topk_idx, 9, expert_alignment=16)
    assert_same(got.x.cpu(), want.x)
    assert_same(got.row_of.cpu(), want.row_of)
    back = tokenyard.unpermute(got.x, got.row_of, weights=weights.cuda() if weighted else None)
    assert_same(
        back.cpu(), spec.unpermute(want.x, want.row_of, weights=weights if weighted else None)
    )


def test_products_are_rounded_before_they_are_added() -> None:
    e = 2.0**-12
    y = torch.tensor([[-1 - 2 * e], [1 + e]]).expand(2, 128).contiguous()
    weights = torch.tensor([[1.0, 1 + e]])
    y, row_of = there(y, torch.tensor([[0, 1]]))
    got = tokenyard.unpermute(y, row_of, weights.cuda())
    assert_same(got.cpu(), torch.zeros(1, 128))


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_align(kind: str, block_size: int) -> None:
    topk_ids, _ = routing(kind, 9000, 4, 70)
    got = tokenyard.moe_align_block_size(topk_ids.cuda(), block_size, 70)
    want = spec.moe_align_block_size(topk_ids, block_size, 70)
    assert_same(
        here(tuple(got)), (want.sorted_token_ids, want.expert_ids, want.num_tokens_post_pad)
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", [{}, {"round_scale": True}], ids=["plain", "rounded"])
def test_every_half_to_fp8_and_back(dtype: torch.dtype, options: dict[str, Any]) -> None:
    x = torch.arange(65536).to(torch.uint16).view(dtype).reshape(64, 1024)
    got = tokenyard.per_token_cast_to_fp8(x.cuda(), **options)
    want = spec.cast_to_fp8(x, **options)
    assert_same(here(got), want)
    assert_same(tokenyard.per_token_cast_back(*got).cpu(), spec.cast_back(*want))


@pytest.mark.parametrize("dtype", [torch.uint8, *DTYPES], ids=str)
@pytest.mark.parametrize("shape, axes", [((1031, 517), (1, 0)), ((7, 65, 130), (2, 0, 1))], ids=str)
def test_rearrange(shape: tuple[int, ...], axes: tuple[int, ...], dtype: torch.dtype) -> None:
    src = (torch.rand(shape, generator=rng()) * 99).to(dtype).permute(axes)
    dst = torch.zeros(src.shape, dtype=dtype, device="cuda")
    tokenyard.rearrange(dst, src.contiguous().cuda().permute(*range(src.dim())))
    assert_same(dst.cpu(), src.contiguous())
    dst.zero_()
    moved = (torch.rand(shape, generator=rng()) * 99).to(dtype).cuda().permute(axes)
    tokenyard.rearrange(dst, moved)
    assert_same(dst, moved.contiguous())
