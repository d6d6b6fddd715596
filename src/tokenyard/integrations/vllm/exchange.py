"""One Buffer over ranks that have tokens of their own, and the ids that they know experts by.

vLLM gives each rank of its expert parallel group consecutive experts, as equally as can be, which
is also a Buffer's default. Mostly the Buffer's ranks are that group. With tensor parallelism all
TP ranks have the same tokens. Then a Buffer joins every TP-th rank of the group, each of them sends
to the experts that these ranks own, and vLLM adds up the results of the TP ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.compat.buffer import Buffer
from tokenyard.integrations.vllm.settings import Settings
from tokenyard.observe import recording
from tokenyard.results import Handle, Rows
from tokenyard.topology import Placement


class Arrived(NamedTuple):
    """What came to this rank's experts: rows, one a (token, local expert), by expert."""

    x: Tensor
    scales: Tensor | None
    offsets: Tensor
    combine: Callable[..., Tensor]  # `Buffer.combine_by_expert` with their handle


class Experts(NamedTuple):
    """How many there are in a layer, as the Buffer's ranks see it."""

    num_known: int  # to the Buffer
    num_local: int
    known_as: Tensor | None  # [E] the id that the Buffer knows each by, -1; None if their own


class Exchange:
    """ep_ranks are those of the group's ranks in the expert parallel group of ep_size ranks."""

    def __init__(
        self, group: Any, ep_ranks: Sequence[int], ep_size: int, settings: Settings
    ) -> None:
        self.ep_ranks, self.ep_size = tuple(ep_ranks), ep_size
        self.buffer = Buffer(
            group,
            transport=settings.transport,
            timeout=settings.timeout,
            balance=settings.balance,
        )
        self._experts: dict[int, Experts] = {}  # by their number in all

    def experts(self, num_experts: int) -> Experts:
        if num_experts not in self._experts:
            placement = Placement.even(num_experts, self.ep_size)
            known = torch.isin(placement.rank_of_expert, torch.tensor(self.ep_ranks, device="cpu"))
            known_as = torch.where(known, known.cumsum(0) - 1, -1)
            self._experts[num_experts] = Experts(
                int(known.sum()),
                len(placement.experts_of_rank[self.ep_ranks[self.buffer.rank]]),
                None if known.all() else known_as,
            )
        return self._experts[num_experts]

    def expert_map(self, num_experts: int) -> list[int]:
        """What vLLM should say of this rank: the local id of each expert, -1 if it is elsewhere."""
        mine = self.ep_ranks[self.buffer.rank]
        return Placement.even(num_experts, self.ep_size).local_table(mine).tolist()

    def send(
        self,
        x: Rows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        balanced: bool = True,
    ) -> Arrived:
        """Each token to the ranks of its experts; and there a row for each (token, expert). With a
        balance experts are those of the node, unless rows must go to the owners: not `balanced`.
        """
        experts, topk_ids = self.experts(num_experts), topk_ids.to(torch.int64)
        if experts.known_as is not None:
            topk_ids = experts.known_as[topk_ids].masked_fill(topk_ids < 0, -1)
        weights, few = topk_weights.float(), self.buffer._few
        if few is not None and isinstance(x, Tensor):
            step = few.dispatch(x, topk_ids, weights, experts.num_known, -1, balanced)
            if step is not None:
                return Arrived(step.x, None, step.offsets, step.combine)
        got = self.buffer.dispatch_by_expert(
            x, topk_ids, weights, num_experts=experts.num_known, balanced=balanced
        )
        values, scales = got.x if isinstance(got.x, tuple) else (got.x, None)
        combine = partial(self.buffer.combine_by_expert, handle=got.handle)
        return Arrived(values, scales, got.offsets, combine)

    def send_back(
        self, y: Tensor, arrived: Arrived, weigh: bool = True, out: Tensor | None = None
    ) -> Tensor:
        """[T, D] the sums of what experts made of each token's rows, y [M, D], times the weights
        that were sent, if `weigh`. They are written to `out`, if it is given.
        """
        if out is None:
            return arrived.combine(y, weigh=weigh)
        if out.dtype == y.dtype and out.is_contiguous() and not validate.overlap(out, y):
            return arrived.combine(y, weigh=weigh, out=out)
        return out.copy_(arrived.combine(y, weigh=weigh))

    def gather(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Handle]:
        """Each of these [T, ...] of all ranks, by rank; and the way back for their sums."""
        first, *others = tensors
        got = self.buffer.all_gather(first)
        return [got.x, *(self.buffer.all_gather(one, got.handle).x for one in others)], got.handle

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile, or load, what a request will need: one token to every rank and back."""
        x = torch.zeros(1, 128, dtype=dtype, device="cpu")
        ids = torch.arange(self.ep_size, device="cpu")[None]
        weights = torch.ones(1, self.ep_size, dtype=torch.float32, device="cpu")
        with recording.paused():
            arrived = self.send(x, ids, weights, self.ep_size)
        self.send_back(arrived.x, arrived)
