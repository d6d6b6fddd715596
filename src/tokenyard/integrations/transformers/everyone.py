"""Ranks that all have the same rows: sums over ranks, and how gradients pass through them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from tokenyard.buffer import Buffer
from tokenyard.types import Handle


class Everyone:
    """Sums over ranks of what all of them have: combine, then dispatch, along one route.

    Each rank looks after an equal share of the rows, and sends it to all. Back along that route
    every rank gets the sum of its share, and there again everybody the whole.
    """

    KEPT = 16  # routes; generation asks for the same again with every token

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._handles: OrderedDict[tuple[Any, ...], Handle] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> Everyone:
        """Itself: a copy of a model goes the same routes."""
        return self

    def sum(self, x: Tensor) -> Tensor:
        handle = self._handle(x)
        share = self.buffer.combine(x, handle).x
        whole = self.buffer.dispatch(share, handle=handle).recv_x
        assert isinstance(whole, Tensor)
        return whole

    def _handle(self, x: Tensor) -> Handle:
        key = (*x.shape, x.dtype)
        if key not in self._handles:
            self._handles[key] = self._route(x)
        self._handles.move_to_end(key)
        while len(self._handles) > self.KEPT:
            self._handles.popitem(last=False)
        return self._handles[key]

    def _route(self, x: Tensor) -> Handle:
        rank, size = self.buffer.rank, self.buffer.group_size
        begin, end = len(x) * rank // size, len(x) * (rank + 1) // size
        to_all = torch.arange(size).repeat(end - begin, 1)
        got = self.buffer.dispatch(
            x[begin:end],
            topk_idx=to_all,
            topk_weights=torch.ones(to_all.shape),
            num_experts=size,
        )
        assert got.handle is not None
        if len(got.recv_x) != len(x):
            raise ValueError(
                f"rank {rank} has {len(x)} tokens and others have not: want tokens='own', "
                "or the same tokens on all ranks"
            )
        return got.handle


class Replicated(torch.autograd.Function):
    """The same on all ranks, of which each uses a part: gradients are summed over ranks.

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
