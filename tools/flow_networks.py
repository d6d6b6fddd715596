"""Links of a cluster and the flows of a dispatch on them, for `tools/second_opinion.py`.

The planner's closed form knows two links a rank, each way: to its node and to the network. Here
ranks may also share links, and rows may be passed on only when they have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenyard.planner.cost import Cluster
from tokenyard.planner.traffic import relays
from tokenyard.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What lies between ranks. The default is what the closed form assumes."""

    name: str = "own links"
    shared_adapter: bool = False  # ranks of a node share one, of as many times a rank's rate
    nodes_per_leaf: int = 0  # nodes below a switch whose way to the others is narrow; 0: none is
    oversubscribed: float = 1.0  # rates of a leaf's nodes / rate of its link to other leaves
    parts: int = 0  # a node gets rows in so many parts, passed on as they arrive; 0: at any time


@dataclass(kw_only=True)
class Group:
    """Flows that begin at once, when those of other groups have ended."""

    flows: list[tuple[int, list[str]]] = field(default_factory=list)  # bytes, links on the way
    after: list[int] = field(default_factory=list)  # numbers of earlier groups


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows [R, R] from rank to rank: in nodes, where a rank may keep its own, and between them."""

    inside: np.ndarray
    outside: np.ndarray


def count_traffic(ranks_TK: np.ndarray, topology: Topology, route: str, by_pair: bool) -> Traffic:
    """Count token by token, in plain loops, whom each of them goes to."""
    num_ranks = topology.num_ranks
    node = np.array(topology.node_of_rank)
    through = relays(topology)
    inside = np.zeros((num_ranks, num_ranks), np.int64)
    outside = np.zeros_like(inside)
    for token, goals in enumerate(ranks_TK):
        source = token * num_ranks // len(ranks_TK)
        for goal in goals if by_pair else np.unique(goals):
            if route == "two_level":
                inside[through[source, node[goal]], goal] += 1
            elif node[source] == node[goal]:
                inside[source, goal] += 1
            else:
                outside[source, goal] += 1
        if route == "two_level":
            for home in np.unique(node[goals]):
                if home != node[source]:
                    outside[source, through[source, home]] += 1
    return Traffic(inside=inside, outside=outside)


class Network:
    """The links of a fabric between these ranks."""

    def __init__(self, cluster: Cluster, topology: Topology, fabric: Fabric) -> None:
        self.cluster, self.fabric = cluster, fabric
        self.node = topology.node_of_rank

    def way(self, source: int, goal: int, inside: bool) -> list[str]:
        """The links from rank to rank. Every link carries one direction."""
        if inside:
            return [f"node-up-{source}", f"node-down-{goal}"]
        fabric, nodes = self.fabric, (self.node[source], self.node[goal])
        ends = nodes if fabric.shared_adapter else (source, goal)
        leaves = [node // fabric.nodes_per_leaf for node in nodes] if fabric.nodes_per_leaf else []
        narrow = []
        if leaves and leaves[0] != leaves[1]:
            narrow = [f"leaf-up-{leaves[0]}", f"leaf-down-{leaves[1]}"]
        return [f"network-up-{ends[0]}", *narrow, f"network-down-{ends[1]}"]

    def rate(self, link: str) -> float:
        """Bytes a second."""
        cluster, fabric = self.cluster, self.fabric
        of_node = cluster.network_rate * cluster.ranks_per_node
        return {
            "node": cluster.node_rate,
            "network": of_node if fabric.shared_adapter else cluster.network_rate,
            "leaf": of_node * fabric.nodes_per_leaf / fabric.oversubscribed,
        }[link.split("-")[0]]

    def flows(
        self, rows_RR: np.ndarray, row_bytes: int, inside: bool
    ) -> Iterator[tuple[int, list[str]]]:
        """One for each pair of ranks that exchange rows."""
        for source, goal in np.argwhere(rows_RR).tolist():
            yield int(rows_RR[source, goal]) * row_bytes, self.way(source, goal, inside)

    def groups(self, traffic: Traffic, row_bytes: int) -> list[Group]:
        """All flows at once, or part by part where rows are passed on as they arrive."""
        parts = self.fabric.parts
        if not parts:
            inside = self.flows(traffic.inside, row_bytes, True)
            return [Group(flows=[*inside, *self.flows(traffic.outside, row_bytes, False)])]
        groups: list[Group] = []
        ranks = range(len(self.node))
        latest: dict[tuple[str, int], list[int]] = {}  # the group before, of "out" or "in" and rank

        def add(kind: str, rank: int, rows_RR: np.ndarray, arrived: list[int]) -> None:
            mine = np.zeros_like(rows_RR)
            mine[rank] = rows_RR[rank]
            flows = list(self.flows(mine, row_bytes, kind == "in"))
            groups.append(Group(flows=flows, after=arrived + latest.get((kind, rank), [])))
            latest[kind, rank] = [len(groups) - 1]

        for part in range(parts):
            for rank in ranks:
                add("out", rank, _part(traffic.outside, part, parts), [])
            for rank in ranks:
                senders = np.flatnonzero(traffic.outside[:, rank]).tolist()
                arrived = [latest["out", sender][0] for sender in senders]
                add("in", rank, _part(traffic.inside, part, parts), arrived)
        return groups

    def busiest(self, groups: list[Group]) -> float:
        """Seconds that the busiest link needs for its bytes, shared links among them."""
        loads: Counter[str] = Counter()
        for group in groups:
            for size, links in group.flows:
                loads.update(dict.fromkeys(links, size))
        return max(size / self.rate(link) for link, size in loads.items())

    def as_dict(self, groups: list[Group]) -> dict[str, Any]:
        """What `simgrid_flows.py` reads."""
        links = {link for group in groups for _, way in group.flows for link in way}
        return {
            "links": {link: self.rate(link) for link in sorted(links)},
            "groups": [{"flows": group.flows, "after": group.after} for group in groups],
        }


def _part(rows_RR: np.ndarray, part: int, parts: int) -> np.ndarray:
    """As many rows as the other parts have, or one more."""
    return rows_RR * (part + 1) // parts - rows_RR * part // parts
