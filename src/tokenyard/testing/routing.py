"""Inputs for tests: routings, tokens whose values tell which they are, experts that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from tokenyard import kernels, validate
from tokenyard.topology import Placement
from tokenyard.types import Layout

ROUTINGS = ("uniform", "skewed", "one", "none", "holes", "doubled")


def routing(
    kind: str, num_tokens: int, num_topk: int, num_experts: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(topk_idx [T, K] int64, topk_weights [T, K] float32).

    uniform   every expert as likely as any other
    skewed    expert e is 1 / (e + 1) as likely as expert 0
    one       every token chooses expert 0, and nothing else
    none      nobody is chosen: all -1
    holes     uniform, with a third of the choices dropped to -1
    doubled   uniform, but every other token names its first expert again and again
    """
    validate.require(kind in ROUTINGS, f"routing is {kind!r}, want one of {', '.join(ROUTINGS)}")
    validate.require(
        num_topk <= num_experts or kind in ("one", "none"),
        f"num_topk is {num_topk}, want at most num_experts ({num_experts})",
    )
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(num_tokens, num_topk, generator=generator)
    if kind in ("one", "none"):
        topk_idx = torch.full((num_tokens, num_topk), -1)
        topk_idx[:, :1] = 0 if kind == "one" else -1
        return topk_idx, weights
    chance = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "skewed":
        # The largest of u ** (1 / p) are a sample without replacement with odds p.
        chance = chance ** (1 + torch.arange(num_experts))
    topk_idx = chance.topk(num_topk, dim=1).indices
    if kind == "holes":
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < 1 / 3] = -1
    if kind == "doubled":  # as dummy batches of zeros do; otherwise a token's experts are distinct
        topk_idx[::2] = topk_idx[::2, :1]
    return topk_idx, weights


def numbered_tokens(
    num_tokens: int, hidden: int, *, first: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """[T, D] noise that depends on the token's global number alone: a misrouted row shows."""
    column = torch.arange(hidden, dtype=torch.float64)
    token = torch.arange(first, first + num_tokens, dtype=torch.float64)[:, None]
    return torch.sin(token * 12.9898 + column * 78.233 + 1.0).to(dtype)


def fake_experts(
    recv_x: Tensor,
    recv_topk_idx: Tensor,
    recv_topk_weights: Tensor,
    experts: list[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x times the sum of weight * (e + 1) over the row's experts on this rank; e is global.

    In x's dtype, or in `dtype`, which a quantised x needs.
    """
    scale = torch.tensor([e + 1.0 for e in experts] + [0.0])  # the last is for -1
    factor = (recv_topk_weights * scale[recv_topk_idx]).sum(1, keepdim=True)
    return (recv_x.double() * factor).to(dtype or recv_x.dtype)


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """The layout of one rank's tokens, without a group: experts spread evenly over one node."""
    count, ranks = _even(num_experts, num_ranks)
    topk_idx = validate.topk_idx(topk_idx, "tokens")
    layout, first_bad = count(topk_idx, ranks, num_ranks, None)
    if first_bad >= 0:
        raise validate.bad_expert(topk_idx, first_bad, num_experts)
    return layout


@cache
def _even(num_experts: int, num_ranks: int) -> tuple[Callable[..., tuple[Layout, int]], Tensor]:
    """The kernel and the table that layout_of needs."""
    validate.num_experts(num_experts, None)
    validate.integer("num_ranks", num_ranks, at_least=1)
    cpu = kernels.load(kernels.choose("cpu"))
    return cpu.layout, Placement.even(num_experts, num_ranks).rank_of_expert
