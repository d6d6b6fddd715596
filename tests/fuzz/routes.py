"""Where the tokens of a case go: by a placement, among copies of experts, or as a balance says."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from tests.cases import exchange, low_latency
from tokenyard import spec

Held = tuple[tuple[int, ...], ...]  # the experts in each rank's slots


@dataclass(frozen=True, kw_only=True)
class Case(exchange.Case):
    slack: float | None = None  # of the Buffer's balance
    balanced: bool = True  # as the call asks for
    held: Held | None = None

    @property
    def logical(self) -> spec.World:
        """Of the experts that tokens name."""
        return super().world

    @property
    def is_balanced(self) -> bool:
        nodes = self.logical.node_of_rank
        return self.slack is not None and self.balanced and len(set(nodes)) < len(nodes)

    @property
    def world(self) -> spec.World:
        """Of the slots that they are sent to."""
        if self.held is not None:
            return spec.ReplicaWorld(self.held, self.logical.node_of_rank).physical
        return spec.node_slots(self.logical).physical if self.is_balanced else self.logical

    def chosen(self, number: int) -> list[Tensor]:
        """The slot of each pair of step `number`, by rank."""
        return _chosen(self, number)


@lru_cache(maxsize=256)
def _chosen(case: Case, number: int) -> list[Tensor]:
    asked = [exchange.inputs(case, rank, number).topk_idx for rank in range(case.num_ranks)]
    if case.held is not None:
        return _copies(asked, case.held, case.logical.node_of_rank)
    if case.is_balanced:
        assert case.slack is not None
        return spec.balance(asked, case.logical, case.slack)
    return asked


def _copies(asked: list[Tensor], held: Held, nodes: tuple[int, ...]) -> list[Tensor]:
    world = spec.ReplicaWorld(held, nodes)
    return [spec.choose(one, rank, world) for rank, one in enumerate(asked)]


@dataclass(frozen=True, kw_only=True)
class LowCase(low_latency.Case):
    held: Held | None = None
    nodes: tuple[int, ...] = ()  # of the ranks, where there are copies

    @property
    def world(self) -> spec.World:
        if self.held is None:
            return super().world
        return spec.ReplicaWorld(self.held, self.nodes).physical

    def chosen(self, number: int) -> list[Tensor]:
        asked = [low_latency.inputs(self, rank, number)[1] for rank in range(self.num_ranks)]
        return asked if self.held is None else _copies(asked, self.held, self.nodes)
