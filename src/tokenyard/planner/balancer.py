"""The loop from measured load to placement: a `Balancer` rebalances as loads come in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tokenyard.planner.balance import Rebalancing, as_loads, imbalance_of
from tokenyard.planner.even_out import even_out
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When to rebalance: every so many steps, if the load since then is uneven enough."""

    every: int = 50
    if_over: float = 1.1  # imbalance
    want: float = 1.05  # imbalance to reach, with as few moves as that takes

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}, want at least 1 step")
        if not 1.0 <= self.want <= self.if_over:
            raise ValueError(f"want is {self.want}, want 1.0 to if_over, {self.if_over}")


@dataclass
class Balancer:
    """Closes the loop from measured load to placement. All ranks give it the same loads, and so
    come to the same placement, which keeps the number of slots that it began with.
    """

    placement: Replicas
    policy: Policy = field(default_factory=Policy)
    topology: Topology | None = None  # one node
    _load: np.ndarray | None = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    def observe(self, load_E: Tensor | np.ndarray | Sequence[float]) -> Rebalancing | None:
        """One step's load of every expert. Returns what to change, if it is time to and helps."""
        load = as_loads(np.asarray(load_E), self.placement.num_experts)
        self._load = load if self._load is None else self._load + load
        self._steps += 1
        if self._steps < self.policy.every:
            return None
        measured, self._load, self._steps = self._load, None, 0
        if imbalance_of(self.placement, measured, self.topology) <= self.policy.if_over:
            return None
        change = even_out(self.placement, measured, self.policy.want, self.topology)
        self.placement = change.placement
        return change if len(change.moves) else None
