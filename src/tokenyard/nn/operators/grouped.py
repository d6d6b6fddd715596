"""Each group of rows times a matrix of its own: the matrix products of experts.

torch's own grouped_mm does the work where it can. It has no float64, needs rows whose bytes are a
multiple of 16 and gradients without stride 0, does not write the rows after the last group, and
torch.compile supports it for bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm as torch_grouped_mm

from tokenyard.nn.operators.define import operator

_TAKEN = (torch.float32, torch.bfloat16, torch.float16)
_STEP = 16  # bytes


@operator("grouped_mm")
def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """x [M, A] times weights [L, A, B] -> [M, B]. Group l ends before row offsets[l]."""
    x, weights = x.contiguous(), _matrices(weights)
    if _is_taken(x, *weights.shape[1:]):
        out = torch_grouped_mm(x, weights, offs=offsets)
    else:
        out = x.new_empty(x.shape[0], weights.shape[2])
        for group, begin, end in _groups(offsets):
            torch.mm(x[begin:end], weights[group], out=out[begin:end])
    out[_end(offsets) :] = 0
    return out


@grouped_mm.register_fake
def _(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


@operator("grouped_outer")
def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """x [M, A] and y [M, B] -> [L, A, B]: in each group the sum of its rows' outer products."""
    x, y = x.contiguous(), y.contiguous()
    if x.shape[0] and _is_taken(x, x.shape[1], y.shape[1]):
        return torch_grouped_mm(x.t(), y, offs=offsets)
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    for group, begin, end in _groups(offsets):
        torch.mm(x[begin:end].t(), y[begin:end], out=out[group])
    return out


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


def _is_taken(x: Tensor, *widths: int) -> bool:
    whole = all(width * x.element_size() % _STEP == 0 for width in widths)
    return whole and x.dtype in _TAKEN


def _matrices(weights: Tensor) -> Tensor:
    """Rows or columns side by side."""
    plain = _by_rows(weights) or _by_rows(weights.transpose(1, 2))
    return weights if plain else weights.contiguous()


def _by_rows(weights: Tensor) -> bool:
    """Whether each matrix is contiguous, whatever lies between them."""
    return weights.stride()[1:] == (weights.shape[2], 1)


def _groups(offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, begin, end) of those that have rows."""
    begin = 0
    for group, end in enumerate(offsets.tolist()):
        if begin < end:
            yield group, begin, end
        begin = end


def _end(offsets: Tensor) -> int:
    return int(offsets[-1]) if offsets.shape[0] else 0


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> Any:
    x, weights, offsets = ctx.saved_tensors
    need_x, need_weights, _ = ctx.needs_input_grad
    return (
        grouped_mm(grad, weights.transpose(1, 2), offsets) if need_x else None,
        _grad_of_weights(x, weights, grad, offsets) if need_weights else None,
        None,
    )


def _grad_of_weights(x: Tensor, weights: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """A gradient with the strides of the weights: autograd copies one that has others."""
    if _by_rows(weights):
        return grouped_outer(x, grad, offsets)
    return grouped_outer(grad, x, offsets).transpose(1, 2)


def _grouped_outer_backward(ctx: Any, grad: Tensor) -> Any:
    x, y, offsets = ctx.saved_tensors
    return (
        grouped_mm(y, grad.transpose(1, 2), offsets),
        grouped_mm(x, grad, offsets),
        None,
    )


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_all)
grouped_outer.register_autograd(_grouped_outer_backward, setup_context=_save_all)
