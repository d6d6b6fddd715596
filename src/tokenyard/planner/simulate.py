"""Replay a recorded routing at any number of ranks: what each step would take, on which link.

A step's tokens are dealt out to the ranks in order, as many to each. Their choices are counted, not
expected, so that hot experts and steps that differ show. Of copies they take those that a Buffer
would. Nothing is started, and no memory of rows is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard.planner.balance import Rebalancing
from tokenyard.planner.balancer import Balancer, Policy
from tokenyard.planner.copies import BalancedChooser, CopyChooser, dealt
from tokenyard.planner.cost import Cluster, Model, Stage, Work, imbalance, route_of, stages_of
from tokenyard.planner.traffic import Rows, counted_rows, crossings
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology


@dataclass(kw_only=True)
class Replay:
    """What every step of a recording would take."""

    num_ranks: int
    seconds: list[float] = field(default_factory=list)  # by step
    imbalance: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)  # the same of (token, k) pairs
    stages: dict[str, list[float]] = field(default_factory=dict)  # seconds, by step
    bound_by: dict[str, int] = field(default_factory=dict)  # steps whose longest stage it binds
    rows: dict[str, float] = field(default_factory=dict)  # by link, of all ranks and steps
    changes: dict[int, Rebalancing] = field(default_factory=dict)  # after these steps

    @property
    def moved(self) -> int:
        """Experts that moved to another rank."""
        return sum(len(change.moves) for change in self.changes.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "num_ranks": self.num_ranks,
            "steps": len(self.seconds),
            "seconds": self.seconds,
            "imbalance": self.imbalance,
            "work": self.work,
            "stages": self.stages,
            "bound_by": self.bound_by,
            "rows": self.rows,
            "changes": {
                step: {"moves": len(one.moves), "before": one.before, "after": one.after}
                for step, one in self.changes.items()
            },
        }


def count_rows(ranks_TK: np.ndarray, topology: Topology, route: str, by_pair: bool = False) -> Rows:
    """Rows of one step whose tokens are dealt out to the ranks in order."""
    num_ranks = topology.num_ranks
    source_T = dealt(len(ranks_TK), num_ranks)
    sent = _count(source_T, ranks_TK, num_ranks, num_ranks, by_pair)
    if route == "direct" or topology.num_nodes == 1:
        return counted_rows(sent, topology)
    node_of_rank = np.append(np.array(topology.node_of_rank), topology.num_nodes)
    to_node = _count(source_T, node_of_rank[ranks_TK], num_ranks, topology.num_nodes, False)
    return counted_rows(sent, topology, crossings(to_node, topology))


def _count(
    source_T: np.ndarray, goals_TK: np.ndarray, num_ranks: int, num_goals: int, by_pair: bool
) -> np.ndarray:
    """[R, goals]: how often tokens of a rank go to each goal, each token once unless by pair."""
    goals = goals_TK if by_pair else np.sort(goals_TK, 1)
    counts = np.ones(goals.shape, bool)
    if not by_pair:
        counts[:, 1:] = goals[:, 1:] != goals[:, :-1]
    counts &= goals < num_goals
    keys = (source_T[:, None] * num_goals + goals)[counts]
    return np.bincount(keys, minlength=num_ranks * num_goals).reshape(num_ranks, num_goals)


def replay(
    steps: Iterable[np.ndarray | Tensor],
    cluster: Cluster,
    model: Model,
    placement: Replicas,
    work: Work | None = None,
    policy: Policy | None = None,
    slack: float | None = None,
    on_step: Callable[[int], object] = lambda step: None,
) -> Replay:
    """Each step is [T, K]: the experts that the tokens of all ranks chose, -1 for none.

    With a policy the placement follows the load: a change takes place between two steps. With a
    slack ranks of a node share each step's choices evenly, as those of a Buffer with a balance.
    """
    work = work or Work()
    num_ranks = placement.num_ranks
    topology = Topology.even(num_ranks, cluster.ranks_per_node)
    route = route_of(cluster, num_ranks, work.mode)
    by_pair = work.mode == "low_latency" and cluster.by_pair
    balancer = Balancer(placement, policy, topology) if policy is not None else None
    chooser: CopyChooser | BalancedChooser = CopyChooser(placement, topology)
    if slack is not None:
        chooser = BalancedChooser(placement, topology, slack)
    found = Replay(num_ranks=num_ranks)
    for step, given in enumerate(steps):
        chosen = np.asarray(given).astype(np.int64, copy=False)
        ranks = chooser.ranks(chosen)
        rows = count_rows(ranks, topology, route, by_pair)
        found.work.append(imbalance(np.bincount(ranks[ranks < num_ranks], minlength=num_ranks)))
        _note(found, rows, stages_of(cluster, model, work, rows, num_ranks))
        if balancer is not None:
            load = np.bincount(chosen[chosen >= 0], minlength=placement.num_experts)
            change = balancer.observe(load)
            if change is not None:
                found.changes[step] = change
                chooser = CopyChooser(change.placement, topology)
        on_step(step)
    return found


def _note(found: Replay, rows: Rows, stages: list[Stage]) -> None:
    for stage in stages:
        found.stages.setdefault(stage.name, []).append(stage.seconds)
    found.seconds.append(sum(stage.seconds for stage in stages))
    found.imbalance.append(imbalance(rows.results))
    longest = max(stages, key=lambda stage: stage.seconds).bound_by
    found.bound_by[longest] = found.bound_by.get(longest, 0) + 1
    for link, number in rows.total().items():
        found.rows[link] = found.rows.get(link, 0.0) + number


def drifting(num_steps: int, num_tokens: int, model: Model, exponent: float = 0.8) -> np.ndarray:
    """[steps, T, K] int16: a made-up routing with hot experts, of which others take over slowly."""
    numbers = np.random.default_rng(0)
    heat = -exponent * np.log(numbers.permutation(model.num_experts) + 1.0)
    steps = np.empty((num_steps, num_tokens, model.num_topk), np.int16)
    for step in range(num_steps):
        heat += numbers.normal(0.0, 0.02, model.num_experts)
        scores = heat + numbers.gumbel(size=(num_tokens, model.num_experts)).astype(np.float32)
        steps[step] = np.argpartition(-scores, model.num_topk - 1, 1)[:, : model.num_topk]
    return steps
