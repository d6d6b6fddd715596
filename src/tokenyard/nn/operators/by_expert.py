"""dispatch and combine of rows by expert, each in one call of the Buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.nn import tickets
from tokenyard.nn.operators.define import operator
from tokenyard.nn.operators.exchange import combine_both, dispatch_again, same_on_all_ranks
from tokenyard.nn.operators.permute import unpermute, unpermute_backward
from tokenyard.nn.stacks import require_place


@operator("dispatch_by_expert")
def dispatch_by_expert(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    buffer: int,
    num_experts: int,
    expert_alignment: int,
    place: int | None,
    graph: bool,
    balanced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows by expert, their offsets, row_of, the weights that arrived, and the ticket. graph: a
    backward pass may come.
    """
    known = tickets.buffer_of(buffer)
    if place is not None:
        require_place(known, num_experts, place)
    with same_on_all_ranks("x or topk_weights of dispatch_by_expert", graph):
        got = known.dispatch_by_expert(
            x,
            topk_idx,
            topk_weights,
            num_experts=num_experts,
            expert_alignment=expert_alignment,
            tag=int(graph),
            balanced=balanced,
        )
    by_expert = got.handle.by_expert
    assert by_expert is not None
    assert isinstance(got.x, Tensor)
    # Copies: combine goes by the handle's own, whatever becomes of these.
    row_of, weights = by_expert.row_of.clone(), by_expert.topk_weights.clone()
    return got.x, got.offsets, row_of, weights, tickets.issue(got.handle, known)


@dispatch_by_expert.register_fake
def _(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    buffer, num_experts, *_, balanced = numbers
    known = tickets.buffer_of(buffer)
    sizes = torch.library.get_ctx()
    num_rows, num_tokens = sizes.new_dynamic_size(), sizes.new_dynamic_size()
    experts = known.get_node_experts if balanced else known.get_local_experts
    num_local = len(experts(num_experts))
    return (
        x.new_empty(num_rows, x.shape[1]),
        topk_idx.new_empty(num_local, dtype=torch.int32),
        topk_idx.new_empty(num_tokens, topk_idx.shape[1]),
        topk_weights.new_empty(num_tokens, topk_idx.shape[1]),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


@operator("combine_by_expert")
def combine_by_expert(
    y: Tensor,
    row_of: Tensor,
    topk_weights: Tensor,
    ticket: Tensor,
    buffer: int,
    num_tokens: int,
    graph: bool,
) -> Tensor:
    """row_of and topk_weights are those of dispatch_by_expert: the gradients need them."""
    with same_on_all_ranks("y or topk_weights of combine_by_expert", graph):
        known = tickets.buffer_of(buffer)
        got = known.combine_by_expert(y, tickets.redeem(ticket), tag=int(graph))
    if got.shape[0] != num_tokens:
        raise ValueError(f"num_tokens is {num_tokens}, want {got.shape[0]}, those of dispatch's x")
    return got


@combine_by_expert.register_fake
def _(y: Tensor, *more: Any) -> Tensor:
    *_, num_tokens, _ = more
    return y.new_empty(num_tokens, y.shape[1])


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, row_of, _, ticket = output
    ctx.save_for_backward(row_of, ticket)
    ctx.num_tokens, ctx.buffer = inputs[0].shape[0], inputs[3]


def _dispatch_backward(ctx: Any, grad_x: Tensor, *others: Tensor) -> Any:
    """Add up the gradients of each token's rows, inside this rank first, then over ranks."""
    row_of, ticket = ctx.saved_tensors
    need_x, _, need_weights, *_ = ctx.needs_input_grad
    grad_weights = others[2].masked_fill(row_of < 0, 0.0)
    where = ticket, ctx.buffer, ctx.num_tokens
    rows = unpermute(grad_x, row_of, None)
    x, weights = combine_both(rows, grad_weights, *where, need_x, need_weights)
    return x if need_x else None, None, weights if need_weights else None, *[None] * 6


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.buffer = inputs[4]


def _combine_backward(ctx: Any, grad: Tensor) -> Any:
    """Dispatch the gradient of the sums again; each pair's row gets it times the pair's weight."""
    y, row_of, weights, ticket = ctx.saved_tensors
    rows = dispatch_again(grad, ticket, ctx.buffer, row_of.shape[0])
    grad_y, grad_weights = unpermute_backward(rows, y, row_of, weights)
    return grad_y, None, grad_weights, *[None] * 4


dispatch_by_expert.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
combine_by_expert.register_autograd(_combine_backward, setup_context=_save_combine)
