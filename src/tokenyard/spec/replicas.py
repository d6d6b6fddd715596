"""Experts with several copies: which copy gets a token, and what follows from that.

A copy is a physical expert. Ranks hold them in slots: rank 0's slots come first, then rank 1's.
Once `choose` has replaced logical experts by physical ones, layout, dispatch, combine, the
low-latency mode and all gradients are those of `exchange`, in the world of the physical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.spec.exchange import World


@dataclass(frozen=True)
class ReplicaWorld:
    """The logical experts that each rank holds, slot by slot, and the node of each rank."""

    experts_of_rank: tuple[tuple[int, ...], ...]
    node_of_rank: tuple[int, ...]

    @property
    def physical(self) -> World:
        """Where the copies live.

        >>> ReplicaWorld(((0, 1), (1,)), (0, 0)).physical
        World(rank_of_expert=(0, 0, 1), node_of_rank=(0, 0))
        """
        owners = [rank for rank, held in enumerate(self.experts_of_rank) for _ in held]
        return World(tuple(owners), self.node_of_rank)

    @property
    def expert_of_slot(self) -> list[int]:
        return [expert for held in self.experts_of_rank for expert in held]


def choose(topk_idx: Tensor, rank: int, world: ReplicaWorld) -> Tensor:
    """The physical experts of the tokens of one rank.

    If some copies are on the sender's node, they alone are considered. Of n copies, in the order of
    their numbers, token t of rank r goes to copy (r + t) mod n. So neither other tokens nor other
    ranks have a say, and the same call always makes the same choice.

    Expert 0 is on ranks 0 and 1, and twice on rank 2, which is another node:

    >>> world = ReplicaWorld(((0, 1), (0, 2), (0, 0)), node_of_rank=(0, 0, 1))
    >>> choose(torch.tensor([[0, 1], [0, 2], [-1, 0]]), 0, world).tolist()
    [[0, 1], [2, 3], [-1, 0]]
    >>> choose(torch.tensor([[0, 2], [0, -1]]), 2, world).tolist()
    [[4, 3], [5, -1]]
    """
    owners, experts = world.physical.rank_of_expert, world.expert_of_slot
    chosen = torch.full_like(topk_idx, -1)
    for token, row in enumerate(topk_idx.tolist()):
        for k, expert in enumerate(row):
            if expert == -1:
                continue
            copies = [slot for slot, one in enumerate(experts) if one == expert]
            home = world.node_of_rank[rank]
            near = [slot for slot in copies if world.node_of_rank[owners[slot]] == home]
            candidates = near or copies
            chosen[token, k] = candidates[(rank + token) % len(candidates)]
    return chosen


def sum_replicas(counts: Sequence[int], world: ReplicaWorld) -> list[int]:
    """Counts by physical expert, added up by logical expert.

    >>> sum_replicas([5, 1, 7], ReplicaWorld(((0, 1), (0,)), (0, 0)))
    [12, 1]
    """
    experts = world.expert_of_slot
    return [
        sum(count for count, one in zip(counts, experts) if one == expert)
        for expert in range(max(experts) + 1)
    ]


def sum_replica_gradients(grads: Sequence[Tensor], world: ReplicaWorld) -> list[Tensor]:
    """`grads[r]` is [L, ...], the gradients of rank r's slots. Each copy gets the sum over all
    copies of its expert: those of a rank are added by slot and rounded; where several ranks have
    some, these sums are added as `combine` adds rows.

    >>> world = ReplicaWorld(((0, 1), (0,)), (0, 0))
    >>> [g.tolist() for g in sum_replica_gradients(
    ...     [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0]])], world)]
    [[[11.0], [2.0]], [[11.0]]]
    """
    dtype = grads[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    nodes = sorted(set(world.node_of_rank))
    out = [grad.clone() for grad in grads]
    for expert in sorted(set(world.expert_of_slot)):
        own: dict[int, Tensor] = {}
        for rank, held in enumerate(world.experts_of_rank):
            parts = [grads[rank][local].to(wide) for local, one in enumerate(held) if one == expert]
            if parts:
                own[rank] = sum(parts[1:], parts[0]).to(dtype)
        zero = torch.zeros(grads[0].shape[1:], dtype=wide)
        by_node = []
        for node in nodes:
            parts = [own[rank].to(wide) for rank in own if world.node_of_rank[rank] == node]
            by_node.append(sum(parts, zero))
        if len(nodes) > 1:
            by_node = [part.to(dtype).to(wide) for part in by_node]
        total = sum(by_node, zero).to(dtype) if len(own) > 1 else next(iter(own.values()))
        for rank, held in enumerate(world.experts_of_rank):
            for local, one in enumerate(held):
                if one == expert:
                    out[rank][local] = total
    return out
