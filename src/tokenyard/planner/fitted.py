"""Three numbers fitted to twenty published ones: overhead, and the rates in a node and between.

Both modes of DeepEP V1 on H800 share them. `python -m tools.fit_cost` prints the fit, and the error
of every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenyard.planner.choices import Routing
from tokenyard.planner.cost import Cluster, Model, Stage, Work, plan, route_of
from tokenyard.planner.published import Figure
from tokenyard.planner.traffic import expected_rows
from tokenyard.topology import Topology, even_split


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published time beside what the cost model says."""

    figure: Figure
    stage: str
    published: float  # seconds
    predicted: float
    bound_by: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0


def routing_of(figure: Figure, model: Model, ranks_per_node: int) -> Routing:
    """The routing of DeepEP's benchmark: a group a node, of which a token chooses up to four."""
    nodes = -(-figure.num_ranks // ranks_per_node)
    if not figure.groups or nodes == 1:
        return Routing(num_experts=model.num_experts, num_topk=model.num_topk)
    return Routing(
        num_experts=model.num_experts,
        num_topk=model.num_topk,
        num_groups=nodes,
        num_topk_groups=min(nodes, 4),
    )


def compare(figures: Sequence[Figure], clusters: dict[str, Cluster], model: Model) -> list[Point]:
    points = []
    for figure in figures:
        cluster = clusters[figure.cluster]
        stages = _stages(figure, cluster, model)
        for name, published in zip(("dispatch", "combine"), seconds_of(figure, cluster, model)):
            stage = stages[name]
            points.append(
                Point(
                    figure=figure,
                    stage=name,
                    published=published,
                    predicted=stage.seconds,
                    bound_by=stage.bound_by,
                )
            )
    return points


def seconds_of(figure: Figure, cluster: Cluster, model: Model) -> tuple[float, float]:
    """The published times of dispatch and combine.

    A rate counts the bytes of rows alone (FP8 with scales), and all rows: those to the sender's own
    node, and to itself, too. Within a node that is one row a rank, otherwise one a node.
    """
    if figure.unit == "us":
        return figure.dispatch * 1e-6, figure.combine * 1e-6
    routing = routing_of(figure, model, cluster.ranks_per_node)
    topology = Topology.even(figure.num_ranks, cluster.ranks_per_node)
    owners = np.array(even_split(model.num_experts, figure.num_ranks))
    if topology.num_nodes == 1:
        reached = routing.reach(owners, figure.num_ranks).sum()
    else:
        nodes = np.array(topology.node_of_rank)[owners]
        reached = routing.reach(nodes, topology.num_nodes).sum()
    rows = figure.num_tokens * reached
    out = model.hidden * (1 + 4 / 128) if figure.fp8 else model.hidden * 2
    return rows * out / figure.dispatch / 1e9, rows * model.hidden * 2 / figure.combine / 1e9


def _stages(figure: Figure, cluster: Cluster, model: Model) -> dict[str, Stage]:
    work = Work(num_tokens=figure.num_tokens, mode=figure.mode, fp8=figure.fp8)
    routing = routing_of(figure, model, cluster.ranks_per_node)
    made = plan(cluster, model, figure.num_ranks, work, routing)
    return {stage.name: stage for stage in made.stages}


def fit(figures: Sequence[Figure], start: Cluster, model: Model) -> Cluster:
    """Least squares of relative errors. A figure counts for the link that binds it, found again
    after each round, until none changes.
    """
    cluster, before = start, None
    for _ in range(50):
        rows, bound = [], []
        for figure in figures:
            times = seconds_of(figure, cluster, model)
            for amounts, seconds in zip(_amounts(figure, cluster, model), times):
                copied, sent = amounts
                by_node = copied / cluster.node_rate > sent / cluster.network_rate
                bound.append(by_node)
                row = (1.0, copied, 0.0) if by_node else (1.0, 0.0, sent)
                rows.append(np.array(row) / seconds)
        if bound == before:
            break
        before = bound
        scale = np.array([1e-6, 1e-11, 1e-11])  # of about the same size, for the solver
        found = np.linalg.lstsq(np.array(rows) * scale, np.ones(len(rows)), rcond=None)[0] * scale
        cluster = replace(
            cluster, overhead=found[0], node_rate=1 / found[1], network_rate=1 / found[2]
        )
    return cluster


def _amounts(figure: Figure, cluster: Cluster, model: Model) -> list[tuple[float, float]]:
    """Bytes that are copied in the node, and that cross the network, in dispatch and combine."""
    work = Work(num_tokens=figure.num_tokens, mode=figure.mode, fp8=figure.fp8)
    rows = expected_rows(
        routing_of(figure, model, cluster.ranks_per_node),
        np.array(even_split(model.num_experts, figure.num_ranks)),
        Topology.even(figure.num_ranks, cluster.ranks_per_node),
        figure.num_tokens,
        route_of(cluster, figure.num_ranks, figure.mode),
        figure.mode == "low_latency",
    )
    copied, sent = rows.copied(), rows.busiest()["network"]
    return [(copied * each, sent * each) for each in work.row_bytes(model)]
