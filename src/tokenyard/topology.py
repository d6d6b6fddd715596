"""Which node each rank is on, and which rank owns each expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor


@lru_cache(maxsize=16)
def even_placement(num_experts: int, num_ranks: int, device: torch.device) -> Placement:
    """`Placement.even`, which virtual ranks and Buffers of one process share."""
    with torch.inference_mode(False):  # later calls may have another mode
        return Placement.even(num_experts, num_ranks, device)


def even_split(num_experts: int, num_ranks: int) -> list[int]:
    """The default placement, as the rank of each expert: each rank owns consecutive experts.

    The first E % R ranks own one expert more. If R divides E, this is DeepEP's e // (E / R).

    >>> even_split(4, 2)
    [0, 0, 1, 1]
    >>> even_split(5, 3)
    [0, 0, 1, 1, 2]
    >>> even_split(2, 3)
    [0, 1]
    """
    each, extra = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(each + (rank < extra))]


def equal_blocks(num_experts: int, num_ranks: int) -> list[int]:
    """The rank of each expert, as torch shards a tensor: the last ranks have fewer, or none.

    >>> equal_blocks(7, 3)
    [0, 0, 0, 1, 1, 1, 2]
    """
    each = -(-num_experts // num_ranks)
    return [expert // each for expert in range(num_experts)]


@dataclass(frozen=True)
class Topology:
    """Which node each rank is on. Nodes are numbered in the order of their lowest rank.

    A rank's *place* is its number among the ranks of its node. *Rail* p consists of the ranks in
    place p of all nodes; if a node has fewer ranks, its ranks take turns. So every rail has one
    rank of each node, and a rank of a small node may be on several rails. With ranks 0, 1, 2 on one
    node, and 3 and 4 on another:

    >>> topology = Topology.of_sizes([3, 2])
    >>> [topology.rail(p) for p in range(topology.num_rails)]
    [(0, 3), (1, 4), (2, 3)]
    >>> topology.rails_of(3), topology.upstream(3)  # who sends it rows for its node
    ([0, 2], [(0, 0), (2, 2)])
    """

    node_of_rank: tuple[int, ...]

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Topology:
        """Consecutive ranks on nodes of these sizes.

        >>> Topology.of_sizes([3, 2, 1]).node_of_rank
        (0, 0, 0, 1, 1, 2)
        """
        return cls(tuple(node for node, size in enumerate(sizes) for _ in range(size)))

    @classmethod
    def even(cls, num_ranks: int, ranks_per_node: int) -> Topology:
        """
        >>> Topology.even(5, 2).node_of_rank
        (0, 0, 1, 1, 2)
        """
        return cls(tuple(rank // ranks_per_node for rank in range(num_ranks)))

    @classmethod
    def from_marks(cls, marks: Sequence[int]) -> Topology:
        """Ranks that carry the same mark (the lowest rank whose memory they can use) share a node.

        >>> Topology.from_marks([77, 12, 77]).node_of_rank
        (0, 1, 0)
        """
        number: dict[int, int] = {}
        return cls(tuple(number.setdefault(mark, len(number)) for mark in marks))

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @cached_property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @cached_property
    def ranks_of_node(self) -> tuple[tuple[int, ...], ...]:
        homes = range(self.num_nodes)
        ranks: list[list[int]] = [[] for _ in homes]
        for rank, node in enumerate(self.node_of_rank):
            ranks[node].append(rank)
        return tuple(map(tuple, ranks))

    @cached_property
    def num_rails(self) -> int:
        return max(map(len, self.ranks_of_node))

    def place(self, rank: int) -> int:
        return self.ranks_of_node[self.node_of_rank[rank]].index(rank)

    def rail(self, number: int) -> tuple[int, ...]:
        """The ranks of a rail, one of each node."""
        return tuple(ranks[number % len(ranks)] for ranks in self.ranks_of_node)

    def rails_of(self, rank: int) -> list[int]:
        """The rails that a rank is on. It sends on the rail of its place, and receives on all."""
        size = len(self.ranks_of_node[self.node_of_rank[rank]])
        return list(range(self.place(rank), self.num_rails, size))

    def source(self, rail: int, node: int) -> int | None:
        """The rank of a node that sends on a rail, if the node is large enough to have one."""
        ranks = self.ranks_of_node[node]
        return ranks[rail] if rail < len(ranks) else None

    def sources(self, rail: int) -> list[int]:
        """The ranks that send on a rail, by node."""
        found = (self.source(rail, node) for node in range(self.num_nodes))
        return [source for source in found if source is not None]

    def upstream(self, rank: int) -> list[tuple[int, int]]:
        """(rail, rank) of all ranks that send this one rows for its node, by rail, then by node."""
        own = self.node_of_rank[rank]
        found = []
        for rail in self.rails_of(rank):
            for node in range(self.num_nodes):
                source = self.source(rail, node)
                if node != own and source is not None:
                    found.append((rail, source))
        return found

    def num_upstream(self, rank: int) -> int:
        """`len(upstream(rank))`, without listing them.

        >>> topology = Topology.of_sizes([3, 2])
        >>> [topology.num_upstream(rank) for rank in range(5)]
        [1, 1, 0, 2, 1]
        """
        sources = sum(self._num_sources[rail] for rail in self.rails_of(rank))
        return sources - 1  # but for itself, on the rail of its place

    @cached_property
    def _num_sources(self) -> tuple[int, ...]:
        """How many ranks send on each rail."""
        sizes = list(map(len, self.ranks_of_node))
        return tuple(sum(size > rail for size in sizes) for rail in range(self.num_rails))


@dataclass(frozen=True, eq=False)
class Placement:
    """Which rank owns each expert. A rank numbers its experts from 0, by ascending global id."""

    rank_of_expert: Tensor  # [E] int32
    num_ranks: int
    local_of_expert: Tensor = field(init=False)  # [E] int32, the id on the owner
    experts_of_rank: list[list[int]] = field(init=False)  # global ids, ascending
    _local_tables: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        local, owned = [], [[] for _ in range(self.num_ranks)]  # type: list[int], list[list[int]]
        for expert, rank in enumerate(self.rank_of_expert.tolist()):
            local.append(len(owned[rank]))
            owned[rank].append(expert)
        device = self.rank_of_expert.device
        object.__setattr__(self, "experts_of_rank", owned)
        object.__setattr__(
            self, "local_of_expert", torch.tensor(local, dtype=torch.int32, device=device)
        )

    @classmethod
    def even(
        cls, num_experts: int, num_ranks: int, device: torch.device | str = "cpu"
    ) -> Placement:
        ranks = even_split(num_experts, num_ranks)
        return cls(torch.tensor(ranks, dtype=torch.int32, device=device), num_ranks)

    @property
    def num_experts(self) -> int:
        return self.rank_of_expert.shape[0]

    @cached_property
    def most_experts(self) -> int:
        """The largest number of experts that a rank owns."""
        return max(len(owned) for owned in self.experts_of_rank)

    @cached_property
    def is_even(self) -> bool:
        """Do all ranks have as many experts, in consecutive blocks?"""
        return self.padded_experts_RL.flatten().tolist() == list(range(self.num_experts))

    @cached_property
    def padded_experts_RL(self) -> np.ndarray:
        """[R, L]: the experts of each rank, filled up with E, which is no expert."""
        padded = [
            owned + [self.num_experts] * (self.most_experts - len(owned))
            for owned in self.experts_of_rank
        ]
        return np.array(padded, np.int64)

    @cached_property
    def padded_experts(self) -> Tensor:
        """`padded_experts_RL` on the device of the experts' ranks."""
        return torch.from_numpy(self.padded_experts_RL).to(self.rank_of_expert.device)

    def local_table(self, rank: int) -> Tensor:
        """[E] int64: an expert's id on `rank`, -1 where it lives elsewhere."""
        if rank not in self._local_tables:
            here = self.rank_of_expert == rank
            made = torch.where(here, self.local_of_expert, -1).to(torch.int64)
            # Kernels keep its address. If two threads make it at once, both must use the first.
            self._local_tables.setdefault(rank, made)
        return self._local_tables[rank]
