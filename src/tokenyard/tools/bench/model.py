"""A step of the MoE layer, forward and backward, beside gathering all tokens on all ranks.

Gathering is the usual way on CPUs: every rank gets every token by all_gather, runs its own experts,
and reduce_scatter adds up; the way back is the same reversed, over gloo. Router, experts and
everything inside a rank are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard
from tokenyard.nn import MoE, RouterConfig, functional
from tokenyard.tools.bench.baselines import absent, all_gather, reduce_scatter
from tokenyard.tools.bench.case import Case, Check, Way
from tokenyard.tools.bench.shape import Shape

GATHERING = "gathering, gloo"


class _Gather(torch.autograd.Function):
    """All ranks' rows; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
        all_gather(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(), grad.shape[1])
        reduce_scatter(out, grad.contiguous())
        return out


class _Scatter(torch.autograd.Function):
    """The sum of all ranks' rows, of which each keeps its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _Gather.backward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Gather.forward(ctx, grad)


def gathering(layer: MoE, x: Tensor) -> Tensor:
    chosen = layer.router(x)
    topk_idx: Any = _Gather.apply(chosen.topk_idx)
    weights: Any = _Gather.apply(chosen.topk_weights)
    rows: Any = _Gather.apply(x)
    local = torch.full((layer.num_experts,), -1)
    local[layer.experts.ids] = torch.arange(len(layer.experts.ids))
    grouped = functional.permute(rows, local[topk_idx], len(layer.experts.ids))
    y = layer.experts(grouped.x, grouped.offsets)
    summed: Any = _Scatter.apply(functional.unpermute(y, grouped.row_of, weights))
    return summed


def step(run: Callable[[Tensor], Tensor], layer: MoE, x: Tensor) -> list[Tensor]:
    """The output, and all gradients."""
    x = x.detach().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    out = run(x)
    out.backward(x.detach())
    grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def _close(got: list[Tensor], want: list[Tensor]) -> bool:
    """Sums are added in another order by ranks that gather, so bits may differ."""
    pairs = zip(got, want, strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)


def model(group: Any, shape: Shape, tokens: int) -> Generator[Case]:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=shape.experts, num_topk=shape.topk)
    with tokenyard.Buffer(group, transport=shape.transport) as buffer:
        layer = MoE(buffer, shape.hidden, shape.intermediate, router)
        x = torch.randn(group.size(), tokens, shape.hidden)[group.rank()]

        def ours() -> list[Tensor]:
            return step(layer, layer, x)

        def theirs() -> list[Tensor]:
            return step(lambda x: gathering(layer, x), layer, x)

        def checks() -> list[Check]:
            return [("output and gradients are those of gathering", _close(ours(), theirs()), True)]

        yield Case(
            label=f"{tokens} tokens",
            ours={"MoE layer, forward and backward": Way(ours)},
            beside={GATHERING: Way(theirs)},
            checks=checks,
            base=GATHERING,
            stats=buffer.stats,
            absent=absent(),
        )
