"""Gradients of experts that have copies: each copy has seen some of its expert's tokens.

The sum over copies is a combine, to the rank of the first copy, and the way back is a dispatch, so
all copies get the same bits. `spec.sum_replica_gradients` says which.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tokenyard.buffer import Buffer
from tokenyard.nn.clipping import own_change
from tokenyard.nn.moving import pieces, send
from tokenyard.nn.share import own_parameters, refuse_adapters_of_copies, shares
from tokenyard.replicas import Replicas
from tokenyard.results import Handle

_WIDTH = 4096  # elements of a row, at most


@torch.no_grad()
def sum_replica_gradients(module: nn.Module) -> None:
    """Add the gradients of each expert's copies up, so that every copy has the expert's gradient.

    All ranks call it after the backward pass, before clipping and the optimiser's step. Copies that
    were equal stay so, if the optimiser treats each number by itself, as SGD and Adam do. Without
    copies it does nothing.
    """
    refuse_adapters_of_copies(module)
    with own_change(module):
        for _, part, share in shares(module):
            if not share.replicas.has_copies:
                continue
            for parameter in own_parameters(part):
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _sum(share.buffer, share.replicas, parameter.grad)


def _sum(buffer: Buffer, replicas: Replicas, grad: Tensor) -> None:
    routes = _Routes(buffer, replicas)
    length = math.prod(grad.shape[1:])  # of a rank without slots torch could not infer it
    flat_LN = grad.contiguous().view(grad.shape[0], length)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    for locals_ in routes.locals_of.values():  # copies of one rank first
        if len(locals_) > 1:
            total = flat_LN[locals_[0]].to(wide)
            for local in locals_[1:]:
                total = total + flat_LN[local].to(wide)
            flat_LN[locals_] = total.to(grad.dtype)
    if routes.most and length:
        for count, width, here in pieces(length, _WIDTH, routes.most * grad.element_size()):
            used = here.stop - here.start
            rows = flat_LN.new_zeros(len(routes.held), count * width)
            if routes.held:
                firsts = [routes.locals_of[expert][0] for expert in routes.held]
                rows[:, :used] = flat_LN[firsts, here]
            handle = routes.handle(count)
            sums = buffer.combine(rows.view(-1, width), handle).x
            back = buffer.dispatch(sums, handle=handle).recv_x
            assert isinstance(back, Tensor)
            for expert, row in zip(routes.held, back.reshape(-1, count * width)):
                flat_LN[routes.locals_of[expert], here] = row[:used]
    if not grad.is_contiguous():
        grad.copy_(flat_LN.view(grad.shape))


class _Routes:
    """The ranks of each expert that has copies on several of them: the first is its home."""

    def __init__(self, buffer: Buffer, replicas: Replicas) -> None:
        self._buffer, self._num_experts = buffer, replicas.num_experts
        rank, num_ranks = buffer.rank, replicas.num_ranks
        self.locals_of: dict[int, list[int]] = {}  # this rank's slots, by expert
        for local, expert in enumerate(replicas.experts_of_rank[rank]):
            self.locals_of.setdefault(expert, []).append(local)
        ranks_of = {
            expert: sorted({slot.rank for slot in replicas.slots_of(expert)})
            for expert, count in enumerate(replicas.num_copies)
            if count > 1
        }
        shared = {expert: ranks for expert, ranks in ranks_of.items() if len(ranks) > 1}
        # As rows arrive: by home, then by expert.
        by_home = sorted(shared, key=lambda expert: (shared[expert][0], expert))
        self.held = [expert for expert in by_home if rank in shared[expert]]
        home = [expert for expert in by_home if shared[expert][0] == rank]
        self._to_ranks = torch.zeros(len(home), num_ranks, dtype=torch.bool, device="cpu")
        for row, expert in enumerate(home):
            self._to_ranks[row, shared[expert]] = True
        held = [expert for ranks in shared.values() for expert in ranks]
        self.most = max((held.count(one) for one in range(num_ranks)), default=0)
        self._handles: dict[int, Handle] = {}

    def handle(self, count: int) -> Handle:
        """The handle of a dispatch of `count` rows an expert, from its home to its copies."""
        if count not in self._handles:
            to_ranks = self._to_ranks.repeat_interleave(count, 0)
            rows = torch.zeros(len(to_ranks), 1, dtype=torch.float32, device="cpu")
            handle = send(self._buffer, rows, to_ranks, self._num_experts).handle
            assert handle is not None
            self._handles[count] = handle
        return self._handles[count]
