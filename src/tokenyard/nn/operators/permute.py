"""permute and unpermute: rows to their experts inside a rank, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.nn.operators.define import operator
from tokenyard.ops import permute as ops


@operator("permute")
def permute(
    x: Tensor, topk_idx: Tensor, num_experts: int, expert_alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows by expert, row_of and offsets; num_rows is -1 for as many as there are."""
    got = ops.permute(
        x,
        topk_idx,
        num_experts,
        expert_alignment=expert_alignment,
        num_rows=None if num_rows < 0 else num_rows,
    )
    return got.x, got.row_of, got.offsets


@permute.register_fake
def _(
    x: Tensor, topk_idx: Tensor, num_experts: int, expert_alignment: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    length = torch.library.get_ctx().new_dynamic_size() if num_rows < 0 else num_rows
    return (
        x.new_empty(length, x.shape[1]),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int64),
        topk_idx.new_empty(num_experts, dtype=torch.int32),
    )


@operator("spread")
def spread(x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    """out[row_of[n, k]] = x[n], zeros where nothing goes."""
    return ops.spread(x, row_of, num_rows)


@spread.register_fake
def _(x: Tensor, row_of: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


@operator("unpermute")
def unpermute(y: Tensor, row_of: Tensor, weights: Tensor | None) -> Tensor:
    return ops.unpermute(y, row_of, weights=weights)


@unpermute.register_fake
def _(y: Tensor, row_of: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty(row_of.shape[0], y.shape[1])


@operator("unpermute_backward")
def unpermute_backward(
    grad: Tensor, y: Tensor, row_of: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the weights."""
    return ops.unpermute_backward(grad, y, row_of, weights)


@unpermute_backward.register_fake
def _(grad: Tensor, y: Tensor, row_of: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])


def _permute_backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
    return unpermute(grad, *ctx.saved_tensors, None), None, None, None, None


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _spread_backward(ctx: Any, grad: Tensor) -> Any:
    return unpermute(grad, *ctx.saved_tensors, None), None, None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, row_of, weights = inputs
    ctx.num_rows = y.shape[0]
    if weights is None:
        ctx.save_for_backward(row_of)  # what is linear in y does not need it again
    else:
        ctx.save_for_backward(row_of, y, weights)


def _unpermute_backward(ctx: Any, grad: Tensor) -> Any:
    row_of, *saved = ctx.saved_tensors
    if not saved:
        return spread(grad, row_of, ctx.num_rows), None, None
    y, weights = saved
    grad_y, grad_weights = unpermute_backward(grad, y, row_of, weights)
    return grad_y, None, grad_weights


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_backward_backward(ctx: Any, by_y: Tensor, by_weights: Tensor) -> Any:
    """grad_y is linear in (grad, weights), grad_weights in (grad, y)."""
    grad, y, row_of, weights = ctx.saved_tensors
    to_grad = unpermute(by_y, row_of, weights) + unpermute(y, row_of, by_weights)
    to_y, _ = unpermute_backward(grad, y, row_of, by_weights)
    _, to_weights = unpermute_backward(grad, by_y, row_of, weights)
    return to_grad, to_y, None, to_weights


permute.register_autograd(_permute_backward, setup_context=_save_permute)
spread.register_autograd(_spread_backward, setup_context=_save_spread)
unpermute.register_autograd(_unpermute_backward, setup_context=_save_unpermute)
unpermute_backward.register_autograd(_unpermute_backward_backward, setup_context=_save_all)
