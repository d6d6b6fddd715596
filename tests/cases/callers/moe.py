"""One mixture of experts that every caller of DeepEP is asked for, and what must come of it.

Expert e multiplies a row by e + 1, and by the row's weight. `by_spec` says what a caller that hands
us rows must get, to the bit; `whole` is the same mixture without ranks, for callers that put rows
in an order of their own: its numbers are small multiples of an eighth, whose sums are exact in any
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tokenyard import spec
from tokenyard.testing import assert_same, numbered_tokens, routing


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int
    tokens: tuple[int, ...] = (7, 3, 12, 5)  # by rank
    hidden: int = 16
    num_topk: int = 3
    num_experts: int = 8
    dtype: torch.dtype = torch.float32
    exact: bool = True  # numbers whose sums do not depend on their order
    seed: int = 0

    def experts_of(self, rank: int) -> Tensor:
        return torch.arange(self.num_experts).chunk(self.num_ranks)[rank]

    def scales_of(self, rank: int) -> Tensor:
        """What this rank's experts multiply by."""
        return self.experts_of(rank) + 1.0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad: Tensor  # of the result

    def dense(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """Which experts each token goes to [T, E], and with which weight [T, E]."""
        chosen = torch.zeros(len(self.x), num_experts, dtype=torch.bool)
        weights = torch.zeros(len(self.x), num_experts)
        chosen.scatter_(1, self.topk_idx, True)
        return chosen, weights.scatter(1, self.topk_idx, self.topk_weights)


def inputs(case: Case, rank: int) -> Inputs:
    num_tokens, seed = case.tokens[rank], 100 * case.seed + rank
    first = 1000 * case.seed + sum(case.tokens[:rank])
    topk_idx, weights = routing("uniform", num_tokens, case.num_topk, case.num_experts, seed=seed)
    x = numbered_tokens(num_tokens, case.hidden, first=first, dtype=torch.float32)
    grad = numbered_tokens(num_tokens, case.hidden, first=first + 500, dtype=torch.float32)
    if case.exact:
        x, grad = ((8 * one).floor() + 0.5 for one in (x, grad))  # no zeros: they have two signs
        # Not equal, and none zero: callers choose the largest again, and drop zeros.
        weights = (weights.argsort(1) + 1) / 4
    return Inputs(
        x=x.to(case.dtype), topk_idx=topk_idx, topk_weights=weights, grad=grad.to(case.dtype)
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one rank."""

    y: Tensor
    grad_x: Tensor
    grad_weights: Tensor


def check(got: list[Outcome], want: list[Outcome]) -> None:
    """All ranks, to the bit."""
    assert len(got) == len(want)
    for rank, (one, other) in enumerate(zip(got, want)):
        for field in fields(Outcome):
            name = f"{field.name} of rank {rank}"
            assert_same(getattr(one, field.name), getattr(other, field.name), name)


def run(
    given: Inputs, mixture: Callable[[Tensor, Tensor], Tensor], weights: Tensor | None = None
) -> Outcome:
    """Forward and backward of mixture(x, weights) on leaves of this rank."""
    x = given.x.clone().requires_grad_()
    weights = (given.topk_weights if weights is None else weights).clone().requires_grad_()
    y = mixture(x, weights)
    y.backward(given.grad)
    return Outcome(y=y.detach(), grad_x=x.grad, grad_weights=weights.grad)


def on_rows(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, scales: Tensor) -> Tensor:
    """What experts of one rank make of rows as dispatch gives them: local ids, -1 elsewhere."""
    factor = (topk_weights * torch.cat([scales, torch.zeros(1)])[topk_idx]).sum(1, keepdim=True)
    return (x.float() * factor).to(x.dtype)


def by_expert(x: Tensor, counts: Tensor, scales: Tensor) -> Tensor:
    """Rows that are grouped by expert, without their weights. The counts must be those of all."""
    counts = counts.long()
    assert int(counts.sum()) <= len(x)  # a static shape has rows of nobody at the end
    factor = torch.zeros(len(x), 1)
    factor[: int(counts.sum()), 0] = scales.repeat_interleave(counts)
    return x * factor.to(x.dtype)


def by_spec(case: Case) -> list[Outcome]:
    """Forward and backward, written with `spec`'s functions."""
    world = spec.World.even(case.num_experts, case.num_ranks)
    given = [inputs(case, rank) for rank in range(case.num_ranks)]
    layouts = [spec.layout(one.topk_idx, world) for one in given]
    received = spec.dispatch(
        [one.x for one in given],
        layouts,
        world,
        topk_idxs=[one.topk_idx for one in given],
        topk_weights=[one.topk_weights for one in given],
    )
    leaves = [
        (one.x.clone().requires_grad_(), one.topk_weights.clone().requires_grad_())
        for one in received
    ]
    ys = [
        on_rows(x, received[rank].topk_idx, weights, case.scales_of(rank))
        for rank, (x, weights) in enumerate(leaves)
    ]
    combined = spec.combine([y.detach() for y in ys], layouts, world)
    grad_ys = spec.combine_backward([one.grad for one in given], layouts, world)
    grads = [torch.autograd.grad(y, leaf, grad) for y, leaf, grad in zip(ys, leaves, grad_ys)]
    grad_xs = spec.dispatch_backward([x for x, _ in grads], layouts, world)
    grad_weights = spec.dispatch_backward([weights for _, weights in grads], layouts, world)
    return [
        Outcome(y=y, grad_x=grad_x, grad_weights=grad_w)
        for y, grad_x, grad_w in zip(combined, grad_xs, grad_weights)
    ]


def whole(case: Case, *, dense: bool = False) -> list[Outcome]:
    """Each rank's tokens with all experts at hand; weights are [T, K], or [T, E] if dense."""
    assert case.exact
    scales = torch.arange(case.num_experts) + 1.0
    outcomes = []
    for rank in range(case.num_ranks):
        given = inputs(case, rank)
        chosen, weights = given.dense(case.num_experts)

        def mixture(x: Tensor, weights: Tensor, given: Inputs = given) -> Tensor:
            return x * (weights * scales[given.topk_idx]).sum(1, keepdim=True).to(x.dtype)

        def dense_mixture(x: Tensor, weights: Tensor, chosen: Tensor = chosen) -> Tensor:
            each = torch.where(chosen, weights * scales, 0.0)
            return x * each.sum(1, keepdim=True).to(x.dtype)

        outcomes.append(run(given, dense_mixture, weights) if dense else run(given, mixture))
    return outcomes
