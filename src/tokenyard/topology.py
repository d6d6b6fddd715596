"""Where things live: ranks on nodes, experts on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


def even_split(num_experts: int, num_ranks: int) -> list[int]:
    """The rank of each expert when nobody says otherwise: consecutive blocks, as equal as can be.

    The first E % R ranks own one expert more. Where R divides E this is DeepEP's e // (E / R).

    >>> even_split(4, 2)
    [0, 0, 1, 1]
    >>> even_split(5, 3)
    [0, 0, 1, 1, 2]
    >>> even_split(2, 3)
    [0, 1]
    """
    each, extra = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(each + (rank < extra))]


@dataclass(frozen=True)
class Topology:
    """Which node each rank is on. Nodes are numbered in the order of their lowest rank."""

    node_of_rank: tuple[int, ...]

    @classmethod
    def even(cls, num_ranks: int, ranks_per_node: int) -> Topology:
        """
        >>> Topology.even(5, 2).node_of_rank
        (0, 0, 1, 1, 2)
        """
        return cls(tuple(rank // ranks_per_node for rank in range(num_ranks)))

    @classmethod
    def from_marks(cls, marks: Sequence[int]) -> Topology:
        """Ranks that carry the same mark (a digest of the machine's boot id, say) share a node.

        >>> Topology.from_marks([77, 12, 77]).node_of_rank
        (0, 1, 0)
        """
        number: dict[int, int] = {}
        return cls(tuple(number.setdefault(mark, len(number)) for mark in marks))

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1


@dataclass(frozen=True, eq=False)
class Placement:
    """Which rank owns each expert. A rank numbers its own from 0, by ascending global id."""

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
        """L of the rank that has most."""
        return max(len(owned) for owned in self.experts_of_rank)

    @cached_property
    def is_even(self) -> bool:
        """Do all ranks have as many experts, in consecutive blocks?"""
        return self.padded_experts_RL.flatten().tolist() == list(range(self.num_experts))

    @cached_property
    def padded_experts_RL(self) -> np.ndarray:
        """[R, L]: the experts of each rank, and E, which is nobody, where it has fewer."""
        padded = [
            owned + [self.num_experts] * (self.most_experts - len(owned))
            for owned in self.experts_of_rank
        ]
        return np.array(padded, np.int64)

    def local_table(self, rank: int) -> Tensor:
        """[E] int64: an expert's id on `rank`, -1 where it lives elsewhere."""
        if rank not in self._local_tables:
            here = self.rank_of_expert == rank
            self._local_tables[rank] = torch.where(here, self.local_of_expert, -1).to(torch.int64)
        return self._local_tables[rank]
