"""Ranks that all have the same rows: a slice for each, sums over ranks, and their gradients."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tokenyard.buffer import Buffer
from tokenyard.nn.operators.define import operator
from tokenyard.nn.tickets import number_of
from tokenyard.results import Handle
from tokenyard.runtime.copies import Once


class Everyone(Once):
    """Rows that all ranks have, and sums of them over ranks.

    Each rank is responsible for an equal slice of the rows. `Buffer.all_gather` of the slices makes
    a route. combine along that route gives every rank the sums of its slice; all_gather along it
    gives every rank all rows.
    """

    KEPT = 16  # routes; generation asks for the same again with every token

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._handles: dict[tuple[Any, ...], Handle] = {}

    def slice(self, x: Tensor) -> Tensor:
        rank, size = self.buffer.rank, self.buffer.group_size
        return x[len(x) * rank // size : len(x) * (rank + 1) // size]

    def join(self, rows: Tensor, num_rows: int) -> Tensor:
        """All ranks' slices, num_rows in all."""
        key = num_rows, *rows.shape[1:], rows.dtype
        handle = self._handles.get(key)
        got = self.buffer.all_gather(rows, handle)
        if len(got.x) != num_rows:
            # Ranks whose number happens to be the sum would go on.
            self.buffer.refuse(
                ValueError(
                    f"rank {self.buffer.rank} has {num_rows} tokens and others have not: want the "
                    "same on all ranks, or else tokens='own' or an fsdp_size"
                )
            )
        if handle is None:
            if len(self._handles) == self.KEPT:
                del self._handles[next(iter(self._handles))]
            self._handles[key] = got.handle
        return got.x

    def sum(self, x: Tensor) -> Tensor:
        key = *x.shape, x.dtype
        if key not in self._handles:
            self.join(self.slice(x), len(x))
        return self.join(self.buffer.combine(x, self._handles[key]).x, len(x))


_known: weakref.WeakValueDictionary[int, Everyone] = weakref.WeakValueDictionary()


def everyone_of(buffer: Buffer) -> Everyone:
    """The Everyone of this Buffer, which all layers share: rows of one shape go one route."""
    number = number_of(buffer)
    everyone = _known.get(number)
    if everyone is None:
        everyone = _known[number] = Everyone(buffer)
    return everyone


def slice_of_rank(everyone: Everyone, x: Tensor) -> Tensor:
    """This rank's slice of rows that all have. Its gradient is joined, `join_slices`' is sliced."""
    return _slice_of_rank(x, number_of(everyone.buffer))


def join_slices(everyone: Everyone, rows: Tensor, num_rows: int) -> Tensor:
    return _join_slices(rows, number_of(everyone.buffer), num_rows)


@operator("slice_of_rank")
def _slice_of_rank(x: Tensor, buffer: int) -> Tensor:
    return _known[buffer].slice(x).clone()


@_slice_of_rank.register_fake
def _(x: Tensor, buffer: int) -> Tensor:
    return torch.empty_like(_known[buffer].slice(x))


@operator("join_slices")
def _join_slices(rows: Tensor, buffer: int, num_rows: int) -> Tensor:
    return _known[buffer].join(rows.contiguous(), num_rows)


@_join_slices.register_fake
def _(rows: Tensor, buffer: int, num_rows: int) -> Tensor:
    return rows.new_empty(num_rows, *rows.shape[1:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.buffer, *_ = inputs
    ctx.num_rows = x.shape[0]


_slice_of_rank.register_autograd(
    lambda ctx, grad: (_join_slices(grad, ctx.buffer, ctx.num_rows), None), setup_context=_save
)
_join_slices.register_autograd(
    lambda ctx, grad: (_slice_of_rank(grad, ctx.buffer), None, None), setup_context=_save
)


class Replicated(torch.autograd.Function):
    """A tensor that all ranks have, each of which uses a part: gradients are summed over ranks.

    It and Summed are each other's gradient, so that gradients of gradients pass too.
    """

    @staticmethod
    def forward(ctx: Any, everyone: Everyone, x: Tensor) -> Tensor:
        ctx.everyone = everyone
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, Summed.apply(ctx.everyone, grad.contiguous())


class Summed(torch.autograd.Function):
    """The sum over ranks, on all of them: each one's part gets the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, everyone: Everyone, y: Tensor) -> Tensor:
        ctx.everyone = everyone
        return everyone.sum(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, Replicated.apply(ctx.everyone, grad)
