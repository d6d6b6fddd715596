"""Rows on every kind of link: expected from a routing's shape, or counted from chosen experts.

A row takes one of two routes:

    direct      straight to each rank that needs the token
    two_level   once to each node, to the rank there in the sender's place; that rank passes it on

Links are of three kinds: `itself` (a rank keeps a row), `node` (to another rank of the same node),
`network` (to another node).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tokenyard.planner.choices import Routing
from tokenyard.topology import Topology

LINKS = ("itself", "node", "network")
ROUTES = ("direct", "two_level")
_WORD = 8  # bytes of an expert's number on the wire


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of one dispatch by rank, expected or counted. A combine sends them back."""

    itself: np.ndarray  # [R]
    node_out: np.ndarray  # [R]
    node_in: np.ndarray  # [R]
    network_out: np.ndarray  # [R]
    network_in: np.ndarray  # [R]
    results: np.ndarray  # [R], the rows that the rank's experts get

    def total(self) -> dict[str, float]:
        """The rows that all ranks send, by link."""
        sent = (self.itself, self.node_out, self.network_out)
        return {link: float(one.sum()) for link, one in zip(LINKS, sent)}

    def busiest(self) -> dict[str, float]:
        """The rows that the busiest rank moves on each link. Links carry both ways at once."""
        return {
            "itself": float(self.itself.max()),
            "node": float(np.maximum(self.node_out, self.node_in).max()),
            "network": float(np.maximum(self.network_out, self.network_in).max()),
        }

    def copied(self) -> float:
        """The most rows that a rank copies inside its node: its own pass through buffers too."""
        return float((self.itself + np.maximum(self.node_out, self.node_in)).max())


def expected_rows(
    routing: Routing,
    rank_of_expert: np.ndarray,
    topology: Topology,
    num_tokens: int,
    route: str,
    by_pair: bool = False,
) -> Rows:
    """What num_tokens of each rank send, on average.

    With `by_pair` a token goes to a rank once for each of its experts there, as in DeepEP's
    low-latency mode; that needs the direct route.
    """
    node_of_rank = np.array(topology.node_of_rank)
    num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
    count = routing.pairs if by_pair else routing.reach
    to_rank = num_tokens * count(rank_of_expert, num_ranks)
    to_own_node = np.bincount(node_of_rank, to_rank, num_nodes)[node_of_rank]
    ranks_here = np.bincount(node_of_rank)[node_of_rank]
    results = num_ranks * to_rank
    if route == "direct" or num_nodes == 1:
        return Rows(
            itself=to_rank,
            node_out=to_own_node - to_rank,
            node_in=(ranks_here - 1) * to_rank,
            network_out=to_rank.sum() - to_own_node,
            network_in=(num_ranks - ranks_here) * to_rank,
            results=results,
        )
    to_node = num_tokens * routing.reach(node_of_rank[rank_of_expert], num_nodes)
    return Rows(
        itself=num_nodes * to_rank,
        node_out=num_nodes * (to_own_node - to_rank),
        node_in=num_nodes * (ranks_here - 1) * to_rank,
        network_out=to_node.sum() - to_node[node_of_rank],
        network_in=(num_nodes - 1) * to_node[node_of_rank],
        results=results,
    )


def rows_between(
    topk_idx: Sequence[np.ndarray], rank_of_expert: np.ndarray, num_ranks: int
) -> np.ndarray:
    """[R, R] int64: the rows that rank i sends to rank j if topk_idx[i], [T, K], is what it chose.

    >>> rows_between([np.array([[0, 1], [2, -1]]), np.array([[3, 2]])], np.array([0, 0, 1, 1]), 2)
    array([[1, 1],
           [0, 1]])
    """
    table = np.append(rank_of_expert, num_ranks)  # -1 chooses nobody
    sent = np.zeros((len(topk_idx), num_ranks), np.int64)
    for source, chosen in enumerate(topk_idx):
        marks = np.zeros((len(chosen), num_ranks + 1), bool)
        marks[np.arange(len(chosen))[:, None], table[chosen]] = True
        sent[source] = marks[:, :num_ranks].sum(0)
    return sent


@lru_cache(maxsize=16)
def relays(topology: Topology) -> np.ndarray:
    """[R, nodes]: the rank of each node that passes rank r's rows on there, on two levels.

    >>> relays(Topology.of_sizes([2, 2])).tolist()
    [[0, 2], [1, 3], [0, 2], [1, 3]]
    """
    return np.array([topology.rail(topology.place(rank)) for rank in range(topology.num_ranks)])


def crossings(to_node: np.ndarray, topology: Topology) -> np.ndarray:
    """[R, R] int64: the tokens that rank i sends to partner j of another node, on two levels.

    `to_node` has the tokens of rank i that some rank of a node gets, [R, nodes].
    """
    sent = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
    np.put_along_axis(sent, relays(topology), to_node, 1)
    node = np.array(topology.node_of_rank)
    sent[node[:, None] == node[None]] = 0
    return sent


def crossings_between(
    topk_idx: Sequence[np.ndarray], rank_of_expert: np.ndarray, topology: Topology
) -> np.ndarray:
    """[R, R] int64: as `crossings`, if topk_idx[i], [T, K], is what rank i chose."""
    node_of_expert = np.array(topology.node_of_rank)[rank_of_expert]
    return crossings(rows_between(topk_idx, node_of_expert, topology.num_nodes), topology)


def counted_rows(
    sent_RR: np.ndarray, topology: Topology, crossings_RR: np.ndarray | None = None
) -> Rows:
    """Rows by link, of counted ones. With crossings they take two levels."""
    node = np.array(topology.node_of_rank)
    same = node[:, None] == node[None]
    if crossings_RR is None:
        inside, outside = np.where(same, sent_RR, 0), np.where(same, 0, sent_RR)
    else:  # a rank of the receiver's node passes each row on
        ranks = topology.num_ranks
        place = relays(topology)[:, node] * ranks + np.arange(ranks)
        inside = np.bincount(place.ravel(), sent_RR.ravel(), ranks * ranks).reshape(ranks, ranks)
        outside = crossings_RR
    kept = np.diag(inside)
    return Rows(
        itself=kept,
        node_out=inside.sum(1) - kept,
        node_in=inside.sum(0) - kept,
        network_out=outside.sum(1),
        network_in=outside.sum(0),
        results=sent_RR.sum(0),
    )


def dispatch_row_bytes(hidden_bytes: int, num_topk: int, scale_bytes: int = 0) -> int:
    """A row of this library's dispatch: x, scales, experts and weights, and the token's number."""
    return hidden_bytes + scale_bytes + (_WORD + 4) * num_topk + 4


def combine_row_bytes(hidden_bytes: int, num_topk: int = 0) -> int:
    """A row of this library's combine: x, and weights if num_topk of them go back."""
    return hidden_bytes + 4 * num_topk


def mark_bytes(tokens_R: Sequence[int], topology: Topology) -> np.ndarray:
    """[R, R] int64: what tells a partner which ranks of its node get each token, on two levels.

    A bit for each rank of that node, in whole bytes a token, and 4 bytes that say whether all is
    well. Few rows that travel with a message leave these bytes out.
    """
    widths = [-(-len(ranks) // 8) for ranks in topology.ranks_of_node]
    to_node = 4 + np.outer(np.asarray(tokens_R), widths)
    return crossings(to_node, topology)
