"""Balance within a node: ranks of a node compute for each other, so that none has much more to do.

Ranks of one machine can read each other's weights, so any of them can compute any expert of its
node. Every rank has a *slot* for each of these experts, in the order of `node_slots`. Once
`balance` has replaced experts by slots, everything is that of `exchange` and `by_expert`, in the
world of the slots. A *pair* is one (token, k) with an expert; those of an expert are in the order
(source rank, token, k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.spec.exchange import World
from tokenyard.spec.replicas import ReplicaWorld

MILLION = 1_000_000


class Run(NamedTuple):
    """So many pairs of an expert, one after the other, that a rank computes."""

    rank: int
    pairs: int


def node_slots(world: World) -> ReplicaWorld:
    """The experts in each rank's slots: those of its node, by (owner, owner's local id).

    >>> node_slots(World((1, 0, 2), node_of_rank=(0, 0, 1))).experts_of_rank
    ((1, 0), (1, 0), (2,))
    """
    nodes = world.node_of_rank
    held = [
        tuple(e for r in range(world.num_ranks) if nodes[r] == home for e in world.experts_of(r))
        for home in nodes
    ]
    return ReplicaWorld(tuple(held), nodes)


def most_pairs(total: int, num_ranks: int, slack: float) -> int:
    """The most pairs that a rank shall have: the mean and the slack, rounded up. The slack counts
    in millionths, so that no machine rounds it otherwise.

    >>> most_pairs(100, 2, 0.0), most_pairs(100, 3, 0.0), most_pairs(100, 2, 0.05)
    (50, 34, 53)
    """
    return -(-total * (MILLION + round(slack * MILLION)) // (num_ranks * MILLION))


def assign(counts: Sequence[int], world: World, slack: float) -> list[list[Run]]:
    """The runs of each expert, which has counts[e] pairs: the owner's first, then those of ranks
    that borrow it.

    Each rank keeps the pairs of its own experts, unless it has more than `most_pairs` of its node.
    Such ranks, in their order, give pairs to the rank of the node that has fewest (the lower, of
    two that have as many), as many as that one may have, until they have no more than they may:
    of the experts whose pairs all fit, the one with most (the lower id, of two with as many); if
    none fits, part of the one with most.

    >>> runs = assign([5, 2, 1, 0], World((0, 0, 1, 1), (0, 0)), 0.0)  # 4 each: the 2 fit, 5 do not
    >>> [[tuple(run) for run in of_expert] for of_expert in runs]
    [[(0, 4), (1, 1)], [(1, 2)], [(1, 1)], []]
    """
    kept = list(counts)
    lent: list[list[Run]] = [[] for _ in counts]
    for home in sorted(set(world.node_of_rank)):
        ranks = [r for r in range(world.num_ranks) if world.node_of_rank[r] == home]
        load = {r: sum(counts[e] for e in world.experts_of(r)) for r in ranks}
        most = most_pairs(sum(load.values()), len(ranks), slack)
        for giver in ranks:
            while load[giver] > most:
                taker = min(ranks, key=lambda r: (load[r], r))
                room = min(load[giver] - most, most - load[taker])
                own = sorted(world.experts_of(giver), key=lambda e: (-kept[e], e))
                expert = next((e for e in own if 0 < kept[e] <= room), own[0])
                count = min(kept[expert], room)
                kept[expert] -= count
                load[giver] -= count
                load[taker] += count
                lent[expert].append(Run(taker, count))
    owners = world.rank_of_expert
    own_runs = [[Run(owners[e], count)] if count else [] for e, count in enumerate(kept)]
    return [own + borrowed for own, borrowed in zip(own_runs, lent)]


def balance(topk_idxs: Sequence[Tensor], world: World, slack: float) -> list[Tensor]:
    """The slot of each pair; -1 stays.

    Rank 1 has nothing to do but for expert 2's one pair, and takes the last two of expert 0:

    >>> world = World((0, 0, 1), (0, 0))
    >>> topk_idxs = [torch.tensor([[0, 1], [0, -1]]), torch.tensor([[0, 2], [1, 0]])]
    >>> [one.tolist() for one in balance(topk_idxs, world, 0.0)]
    [[[0, 4], [0, -1]], [[0, 5], [4, 0]]]
    """
    slots = node_slots(world)
    counts = [
        sum(int((topk_idx == e).sum()) for topk_idx in topk_idxs)
        for e in range(len(world.rank_of_expert))
    ]
    ranks = [
        [run.rank for run in runs for _ in range(run.pairs)]
        for runs in assign(counts, world, slack)
    ]
    slot_of = {
        (rank, expert): slot
        for slot, (rank, expert) in enumerate(
            (rank, expert) for rank, held in enumerate(slots.experts_of_rank) for expert in held
        )
    }
    seen = [0] * len(counts)
    chosen = []
    for topk_idx in topk_idxs:
        out = torch.full_like(topk_idx, -1)
        for token, row in enumerate(topk_idx.tolist()):
            for k, expert in enumerate(row):
                if expert != -1:
                    out[token, k] = slot_of[ranks[expert][seen[expert]], expert]
                    seen[expert] += 1
        chosen.append(out)
    return chosen
