"""dispatch and combine: rows to the ranks of their experts, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.nn import tickets


@torch.library.custom_op("tokenyard::dispatch", mutates_args=())
def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    num_experts: int,
    num_worst_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """recv_x, recv_topk_idx, recv_topk_weights and the ticket."""
    known = tickets.buffer_of(buffer)
    got = known.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_experts=num_experts,
        num_worst_tokens=num_worst_tokens,
    )
    assert isinstance(got.recv_x, Tensor)
    assert got.recv_topk_idx is not None
    assert got.recv_topk_weights is not None
    assert got.handle is not None
    return got.recv_x, got.recv_topk_idx, got.recv_topk_weights, tickets.issue(got.handle, known)


@dispatch.register_fake
def _(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    num_experts: int,
    num_worst_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(num_rows, x.shape[1]),
        topk_idx.new_empty(num_rows, topk_idx.shape[1]),
        topk_weights.new_empty(num_rows, topk_weights.shape[1]),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("tokenyard::dispatch_again", mutates_args=())
def dispatch_again(x: Tensor, ticket: Tensor, buffer: int, num_rows: int) -> Tensor:
    got = tickets.buffer_of(buffer).dispatch(x, handle=tickets.redeem(ticket)).recv_x
    assert isinstance(got, Tensor)
    return got


@dispatch_again.register_fake
def _(x: Tensor, ticket: Tensor, buffer: int, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op("tokenyard::combine", mutates_args=())
def combine(y: Tensor, ticket: Tensor, buffer: int, num_tokens: int) -> Tensor:
    got = tickets.buffer_of(buffer).combine(y, tickets.redeem(ticket)).x
    if got.shape[0] != num_tokens:
        raise ValueError(f"num_tokens is {num_tokens}, want {got.shape[0]}, those of dispatch's x")
    return got


@combine.register_fake
def _(y: Tensor, ticket: Tensor, buffer: int, num_tokens: int) -> Tensor:
    return y.new_empty(num_tokens, y.shape[1])


@torch.library.custom_op("tokenyard::combine_both", mutates_args=())
def combine_both(
    y: Tensor, weights: Tensor, ticket: Tensor, buffer: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Sums of rows, and sums of weights, in one call."""
    got = tickets.buffer_of(buffer).combine(y, tickets.redeem(ticket), topk_weights=weights)
    assert got.topk_weights is not None
    return got.x, got.topk_weights


@combine_both.register_fake
def _(
    y: Tensor, weights: Tensor, ticket: Tensor, buffer: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    return y.new_empty(num_tokens, y.shape[1]), weights.new_empty(num_tokens, weights.shape[1])


@torch.library.custom_op("tokenyard::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, buffer: int, num_experts: int) -> Tensor:
    """[D]: the sum of all ranks' x, ranks ascending: one token that goes to every rank."""
    known = tickets.buffer_of(buffer)
    got = known.dispatch(
        x[None],
        num_tokens_per_rank=torch.ones(known.group_size, dtype=torch.int32),
        is_token_in_rank=torch.ones(1, known.group_size, dtype=torch.bool),
        num_tokens_per_expert=torch.zeros(num_experts, dtype=torch.int32),
    )
    assert isinstance(got.recv_x, Tensor)
    return got.recv_x.sum(0)


@sum_over_ranks.register_fake
def _(x: Tensor, buffer: int, num_experts: int) -> Tensor:
    return torch.empty_like(x)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[3])
    ctx.num_tokens, ctx.buffer = inputs[0].shape[0], inputs[3]


def _dispatch_backward(ctx: Any, grad_x: Tensor, _: Any, grad_weights: Tensor, __: Any) -> Any:
    topk_idx, ticket = ctx.saved_tensors
    need_x, _, need_weights, *_ = ctx.needs_input_grad
    where = ticket, ctx.buffer, ctx.num_tokens
    # Where an expert lives elsewhere the weight arrived as a 0 that does not depend on it.
    grad_weights = grad_weights.masked_fill(topk_idx < 0, 0.0)
    if need_x and need_weights:
        x, weights = combine_both(grad_x, grad_weights, *where)
    else:
        x = combine(grad_x, *where) if need_x else None
        weights = combine(grad_weights, *where) if need_weights else None
    return x, None, weights, None, None, None


def _save_way(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Of dispatch_again, combine and combine_both: the way back, and how many rows go it."""
    *_, ticket, ctx.buffer, _ = inputs
    ctx.save_for_backward(ticket)
    ctx.num_rows = inputs[0].shape[0]


def _combine_backward(ctx: Any, grad: Tensor) -> Any:
    return dispatch_again(grad, *ctx.saved_tensors, ctx.buffer, ctx.num_rows), None, None, None


def _dispatch_again_backward(ctx: Any, grad: Tensor) -> Any:
    return combine(grad, *ctx.saved_tensors, ctx.buffer, ctx.num_rows), None, None, None


def _combine_both_backward(ctx: Any, grad_y: Tensor, grad_weights: Tensor) -> Any:
    where = *ctx.saved_tensors, ctx.buffer, ctx.num_rows
    y, weights = dispatch_again(grad_y, *where), dispatch_again(grad_weights, *where)
    return y, weights, None, None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
combine.register_autograd(_combine_backward, setup_context=_save_way)
dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_save_way)
combine_both.register_autograd(_combine_both_backward, setup_context=_save_way)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.buffer, ctx.num_experts = inputs


def _sum_backward(ctx: Any, grad: Tensor) -> Any:
    return sum_over_ranks(grad.contiguous(), ctx.buffer, ctx.num_experts), None, None


sum_over_ranks.register_autograd(_sum_backward, setup_context=_save_sum)
