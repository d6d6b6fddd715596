"""Copies of experts: which logical expert lies in each slot of each rank, and what moves.

A *logical* expert is what a router chooses. It lives in one or more *slots*; a slot is a physical
expert, with weights of its own and a number: the slots of rank 0 come first, then those of rank 1.

    replicas = Replicas([[0, 1, 2], [3, 0, 0]])  # expert 0 is hot: one copy on rank 0, two on 1
    buffer = Buffer(group, placement=replicas)

Which of its copies a token goes to is decided by its sender: `engine/choice.py`. Everything after
that choice knows physical experts alone, whose placement is a `PhysicalPlacement`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tokenyard.topology import Placement, even_split
from tokenyard.types import digest

_KIND = "tokenyard.Replicas"


class Slot(NamedTuple):
    """A slot, by its rank and its number there."""

    rank: int
    local: int


@dataclass(frozen=True, init=False)
class Replicas:
    """The logical expert in each slot, by rank. Every expert must have a slot.

    >>> replicas = Replicas([[0, 1, 2], [3, 0, 0]])
    >>> replicas.num_experts, replicas.num_slots, replicas.num_copies
    (4, 6, (3, 1, 1, 1))
    >>> replicas.slots_of(0)
    [Slot(rank=0, local=0), Slot(rank=1, local=1), Slot(rank=1, local=2)]
    """

    experts_of_rank: tuple[tuple[int, ...], ...]
    num_experts: int

    def __init__(
        self, experts_of_rank: Iterable[Iterable[int]], num_experts: int | None = None
    ) -> None:
        """`num_experts` is the largest expert and one more, unless it is given."""
        ranks = tuple(tuple(int(expert) for expert in held) for held in experts_of_rank)
        held = {expert for experts in ranks for expert in experts}
        if not held:
            raise ValueError("Replicas have no slots, want the experts of each rank")
        count = max(held) + 1 if num_experts is None else num_experts
        for rank, experts in enumerate(ranks):
            for local, expert in enumerate(experts):
                if not 0 <= expert < count:
                    raise ValueError(
                        f"slot {local} of rank {rank} holds expert {expert}, want 0..{count - 1}"
                    )
        lost = sorted(set(range(count)) - held)
        if lost:
            names = ", ".join(map(str, lost[:8])) + ", ..." * (len(lost) > 8)
            raise ValueError(f"no slot holds expert {names}, want every expert on some rank")
        object.__setattr__(self, "experts_of_rank", ranks)
        object.__setattr__(self, "num_experts", count)

    @classmethod
    def of_placement(cls, rank_of_expert: Tensor | Sequence[int], num_ranks: int) -> Replicas:
        """One copy of each expert, as `Buffer(placement=rank_of_expert)` has it.

        >>> Replicas.of_placement([1, 0, 1], num_ranks=2).experts_of_rank
        ((1,), (0, 2))
        """
        owners = [int(rank) for rank in rank_of_expert]
        return cls(
            [[e for e, owner in enumerate(owners) if owner == rank] for rank in range(num_ranks)],
            len(owners),
        )

    @classmethod
    def even(cls, num_experts: int, num_ranks: int, num_slots: int | None = None) -> Replicas:
        """Experts in order, as a Buffer places them by itself. Slots that are left over hold copies
        of the first ones.

        >>> Replicas.even(4, 2).experts_of_rank, Replicas.even(4, 2, 6).experts_of_rank
        (((0, 1), (2, 3)), ((0, 1, 2), (3, 0, 1)))
        """
        ranks: list[list[int]] = [[] for _ in range(num_ranks)]
        owners = even_split(num_experts if num_slots is None else num_slots, num_ranks)
        for slot, rank in enumerate(owners):
            ranks[rank].append(slot % num_experts)
        return cls(ranks, num_experts)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, with those that hold nothing."""
        return len(self.experts_of_rank)

    @property
    def num_slots(self) -> int:
        """How many slots all ranks have: the number of physical experts."""
        return len(self.expert_of_slot)

    @cached_property
    def expert_of_slot(self) -> tuple[int, ...]:
        """The logical expert of each physical one."""
        return tuple(expert for experts in self.experts_of_rank for expert in experts)

    @cached_property
    def rank_of_slot(self) -> tuple[int, ...]:
        """The rank of each physical expert."""
        return tuple(rank for rank, held in enumerate(self.experts_of_rank) for _ in held)

    @cached_property
    def _slots(self) -> tuple[Slot, ...]:
        """All slots, by their number."""
        return tuple(
            Slot(rank, local)
            for rank, held in enumerate(self.experts_of_rank)
            for local in range(len(held))
        )

    @cached_property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The physical experts of each logical expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.expert_of_slot):
            found[expert].append(slot)
        return tuple(map(tuple, found))

    @property
    def num_copies(self) -> tuple[int, ...]:
        """How many copies each logical expert has."""
        return tuple(map(len, self.copies))

    @cached_property
    def has_copies(self) -> bool:
        """Does an expert lie in several slots?"""
        return self.num_slots > self.num_experts

    @cached_property
    def mark(self) -> int:
        """A number that tells placements apart, the same in every process."""
        return digest(repr(self.experts_of_rank))

    def slots_of(self, expert: int) -> list[Slot]:
        """Where the copies of a logical expert are, by rank."""
        return [self._slots[slot] for slot in self.copies[expert]]

    def sum(self, counts: Tensor | Sequence[int]) -> Tensor:
        """[E]: numbers by physical expert, [num_slots], added up by logical expert.

        >>> Replicas([[0, 1], [0, 2]]).sum([5, 1, 7, 2]).tolist()
        [12, 1, 2]
        """
        numbers = torch.as_tensor(counts)
        if numbers.shape != (self.num_slots,):
            raise ValueError(
                f"counts have shape {list(numbers.shape)}, want [{self.num_slots}], one a slot"
            )
        experts = torch.tensor(self.expert_of_slot, device=numbers.device)
        return numbers.new_zeros(self.num_experts).index_add_(0, experts, numbers)

    def moves(self, after: Replicas, node_of_rank: Sequence[int] | None = None) -> Moves:
        """What must move to get from these copies to those `after`. See `Moves`."""
        if (after.num_experts, after.num_ranks) != (self.num_experts, self.num_ranks):
            raise ValueError(
                f"placement has {after.num_experts} experts on {after.num_ranks} ranks, want "
                f"{self.num_experts} on {self.num_ranks}, as before"
            )
        nodes = [0] * self.num_ranks if node_of_rank is None else node_of_rank
        sources = tuple(
            tuple(self._source(expert, rank, nodes) for expert in held)
            for rank, held in enumerate(after.experts_of_rank)
        )
        return Moves(before=self, after=after, sources=sources)

    def _source(self, expert: int, rank: int, nodes: Sequence[int]) -> Slot:
        """The copy that a rank takes an expert from: its own, else one of its node, else any."""
        slots = self.slots_of(expert)
        own = [slot for slot in slots if slot.rank == rank]
        near = [slot for slot in slots if nodes[slot.rank] == nodes[rank]]
        choice = own[:1] or near or slots
        return choice[rank % len(choice)]

    def to_json(self) -> str:
        """The text that `save` writes."""
        return json.dumps(
            {"kind": _KIND, "num_experts": self.num_experts, "experts": self.experts_of_rank}
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write JSON: {"kind": "tokenyard.Replicas", "num_experts": E, "experts": [[...], ...]}."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Replicas:
        """What `save` has written. Raises ValueError if the file holds something else."""
        try:
            read = json.loads(Path(path).read_text())
            if read["kind"] == _KIND:
                return cls(read["experts"], int(read["num_experts"]))
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} holds no Replicas, want a file of Replicas.save") from error
        raise ValueError(f"{path} holds {read['kind']!r}, want a file of Replicas.save")


class Move(NamedTuple):
    """One expert goes from a rank's slot to a slot of another rank."""

    expert: int
    source: Slot
    target: Slot


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How a placement becomes another: for each slot afterwards, the slot that its expert was in.

    A rank takes an expert from itself if it can, else from a rank of its node.

    >>> moves = Replicas([[0, 1], [2, 3]]).moves(Replicas([[1, 0, 3], [2, 3]]))
    >>> print(moves)
    expert 3 from rank 1 to rank 0
    """

    before: Replicas
    after: Replicas
    sources: tuple[tuple[Slot, ...], ...]  # by rank and slot afterwards

    @cached_property
    def between_ranks(self) -> tuple[Move, ...]:
        """The moves from one rank to another, by rank and slot afterwards."""
        return tuple(
            Move(self.after.experts_of_rank[rank][local], source, Slot(rank, local))
            for rank, sources in enumerate(self.sources)
            for local, source in enumerate(sources)
            if source.rank != rank
        )

    def __len__(self) -> int:
        """How many experts travel."""
        return len(self.between_ranks)

    def __str__(self) -> str:
        return "\n".join(
            f"expert {move.expert} from rank {move.source.rank} to rank {move.target.rank}"
            for move in self.between_ranks
        )


@dataclass(frozen=True, eq=False)
class PhysicalPlacement(Placement):
    """Where physical experts live. The local id of an expert is its slot."""

    replicas: Replicas = field(kw_only=True)

    @classmethod
    def of(cls, replicas: Replicas, device: torch.device | str = "cpu") -> PhysicalPlacement:
        ranks = torch.tensor(replicas.rank_of_slot, dtype=torch.int32, device=device)
        return cls(ranks, replicas.num_ranks, replicas=replicas)


def replicas_of(placement: Placement | None) -> Replicas | None:
    """The Replicas of a placement; None where each expert has one rank."""
    return placement.replicas if isinstance(placement, PhysicalPlacement) else None


def as_replicas(placement: Placement) -> Replicas:
    """The Replicas of a placement, also of one without copies."""
    found = replicas_of(placement)
    return Replicas(placement.experts_of_rank, placement.num_experts) if found is None else found


def num_logical(placement: Placement) -> int:
    """How many experts routers choose among."""
    found = replicas_of(placement)
    return placement.num_experts if found is None else found.num_experts


def place_words(placement: Placement | None) -> object:
    """What ranks compare of a placement."""
    found = replicas_of(placement)
    if placement is None or found is None:
        return None if placement is None else placement.rank_of_expert.tolist()
    return found.experts_of_rank
