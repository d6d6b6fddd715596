"""dispatch and combine: rows to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tokenyard.buffer import Buffer
from tokenyard.errors import CallMismatch
from tokenyard.nn import tickets
from tokenyard.nn.operators.define import operator
from tokenyard.nn.stacks import require_place


@operator("dispatch")
def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    num_experts: int,
    num_worst_tokens: int,
    place: int | None,
    graph: bool,
    balanced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """recv_x, recv_topk_idx, recv_topk_weights and the ticket. graph: a backward pass may come."""
    known = tickets.buffer_of(buffer)
    if place is not None:
        require_place(known, num_experts, place)
    with same_on_all_ranks("x or topk_weights of dispatch", graph):
        got = known.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=num_experts,
            num_worst_tokens=num_worst_tokens,
            tag=int(graph),
            balanced=balanced,
        )
    assert isinstance(got.recv_x, Tensor)
    assert got.recv_topk_idx is not None
    assert got.recv_topk_weights is not None
    assert got.handle is not None
    return got.recv_x, got.recv_topk_idx, got.recv_topk_weights, tickets.issue(got.handle, known)


@dispatch.register_fake
def _(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    _, _, num_worst_tokens, *_ = numbers
    num_rows = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    return (
        x.new_empty(num_rows, x.shape[1]),
        topk_idx.new_empty(num_rows, topk_idx.shape[1]),
        topk_weights.new_empty(num_rows, topk_weights.shape[1]),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@operator("dispatch_again")
def dispatch_again(x: Tensor, ticket: Tensor, buffer: int, num_rows: int) -> Tensor:
    got = tickets.buffer_of(buffer).dispatch(x, handle=tickets.redeem(ticket)).recv_x
    assert isinstance(got, Tensor)
    return got


@dispatch_again.register_fake
def _(x: Tensor, ticket: Tensor, buffer: int, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


@operator("combine")
def combine(y: Tensor, ticket: Tensor, buffer: int, num_tokens: int, graph: bool) -> Tensor:
    with same_on_all_ranks("y of combine", graph):
        got = tickets.buffer_of(buffer).combine(y, tickets.redeem(ticket), tag=int(graph)).x
    if got.shape[0] != num_tokens:
        raise ValueError(f"num_tokens is {num_tokens}, want {got.shape[0]}, those of dispatch's x")
    return got


@combine.register_fake
def _(y: Tensor, ticket: Tensor, buffer: int, num_tokens: int, graph: bool) -> Tensor:
    return y.new_empty(num_tokens, y.shape[1])


@contextmanager
def same_on_all_ranks(what: str, graph: bool) -> Iterator[None]:
    """Explain the CallMismatch of a forward pass whose backward pass some ranks would not make."""
    try:
        yield
    except CallMismatch as error:
        if error.what != "tag":
            raise
        here = "this rank and not on another" if graph else "another rank and not on this one"
        raise CallMismatch(
            f"{what} requires grad on {here}, so that a backward pass would wait for ranks that "
            f"make none: want parameters that are trained on all ranks or on none ({error})",
            what="requires_grad",
        ) from error


@operator("combine_both")
def combine_both(
    y: Tensor,
    weights: Tensor,
    ticket: Tensor,
    buffer: int,
    num_tokens: int,
    need_y: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Sums of rows and sums of weights in one call. Only what is needed travels; if another rank
    needs the other, both do. An empty tensor stands for what is not needed here.
    """
    known, handle = tickets.buffer_of(buffer), tickets.redeem(ticket)
    # If both are equally wide, one rank's rows could meet another's weights without a mismatch.
    alike = y.shape[1] == weights.shape[1]
    try:
        if (need_y and need_weights) or alike:
            got_y, got_weights = _combine_both(known, handle, y, weights)
        elif need_y:
            got_y, got_weights = known.combine(y, handle).x, None
        else:
            got_y, got_weights = None, known.combine(weights, handle).x
    except CallMismatch as error:
        if error.what not in ("hidden", "dtype", "num_topk"):
            raise CallMismatch(
                f"{error}; this is the gradient of nn.functional.dispatch, whose outputs the "
                "losses of all ranks must use, or of none"
            ) from error
        # Ranks used the same handle but need different sums: all raise, so all send both.
        got_y, got_weights = _combine_both(known, handle, y, weights)
    return (
        got_y if need_y and got_y is not None else y.new_empty(0, y.shape[1]),
        got_weights
        if need_weights and got_weights is not None
        else weights.new_empty(0, weights.shape[1]),
    )


def _combine_both(
    buffer: Buffer, handle: Any, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    got = buffer.combine(y, handle, topk_weights=weights)
    return got.x, got.topk_weights


@combine_both.register_fake
def _(y: Tensor, weights: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    _, _, num_tokens, need_y, need_weights = more
    return (
        y.new_empty(num_tokens if need_y else 0, y.shape[1]),
        weights.new_empty(num_tokens if need_weights else 0, weights.shape[1]),
    )


@operator("gather_over_ranks")
def gather_over_ranks(x: Tensor, buffer: int) -> Tensor:
    """[R, D]: all ranks' x, ranks ascending."""
    return tickets.buffer_of(buffer).all_gather(x[None]).x


@gather_over_ranks.register_fake
def _(x: Tensor, buffer: int) -> Tensor:
    return x.new_empty(tickets.buffer_of(buffer).group_size, x.shape[0])


@operator("sum_over_ranks")
def sum_over_ranks(x: Tensor, buffer: int) -> Tensor:
    """[D]: the sum of all ranks' x, in the order of ranks."""
    return gather_over_ranks(x, buffer).sum(0)


@sum_over_ranks.register_fake
def _(x: Tensor, buffer: int) -> Tensor:
    return torch.empty_like(x)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], output[3])
    ctx.num_tokens, ctx.buffer = inputs[0].shape[0], inputs[3]


def _dispatch_backward(ctx: Any, grad_x: Tensor, _: Any, grad_weights: Tensor, __: Any) -> Any:
    topk_idx, ticket = ctx.saved_tensors
    need_x, _, need_weights, *_ = ctx.needs_input_grad
    where = ticket, ctx.buffer, ctx.num_tokens
    # If an expert lives elsewhere, the weight arrived as a constant 0, so it gets no gradient.
    grad_weights = grad_weights.masked_fill(topk_idx < 0, 0.0)
    x, weights = combine_both(grad_x, grad_weights, *where, need_x, need_weights)
    return x if need_x else None, None, weights if need_weights else None, *[None] * 6


def _save_way(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the ticket and the number of rows, for dispatch_again, combine and combine_both."""
    ticket, ctx.buffer = inputs[-3:-1]
    ctx.save_for_backward(ticket)
    ctx.num_rows = inputs[0].shape[0]


def _combine_backward(ctx: Any, grad: Tensor) -> Any:
    grad_y = dispatch_again(grad, *ctx.saved_tensors, ctx.buffer, ctx.num_rows)
    return grad_y, None, None, None, None


def _dispatch_again_backward(ctx: Any, grad: Tensor) -> Any:
    grad_x = combine(grad, *ctx.saved_tensors, ctx.buffer, ctx.num_rows, False)
    return grad_x, None, None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *way, _ = inputs
    _save_way(ctx, tuple(way), output)


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *way, ctx.need_y, ctx.need_weights = inputs
    _save_way(ctx, tuple(way), output)


def _combine_both_backward(ctx: Any, grad_y: Tensor, grad_weights: Tensor) -> Any:
    where = *ctx.saved_tensors, ctx.buffer, ctx.num_rows
    y = dispatch_again(grad_y, *where) if ctx.need_y else None
    weights = dispatch_again(grad_weights, *where) if ctx.need_weights else None
    return y, weights, None, None, None, None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
combine.register_autograd(_combine_backward, setup_context=_save_combine)
dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_save_way)
combine_both.register_autograd(_combine_both_backward, setup_context=_save_both)


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.buffer = inputs


def _sum_backward(ctx: Any, grad: Tensor) -> Any:
    return sum_over_ranks(grad.contiguous(), ctx.buffer), None


sum_over_ranks.register_autograd(_sum_backward, setup_context=_save_sum)
