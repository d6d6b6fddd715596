"""Which copies of experts tokens go to, for the tokens of all ranks at once.

The rule is the Buffer's, `engine/choice.py`: a rank's tokens share the copies on its node if there
are any, else all copies; of n copies, token t of rank r takes number (r + t) mod n. Letters besides
those of `types`: P slots of all ranks, M nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenyard.kernels.base import load
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology
from tokenyard.wire import balance as of


def dealt(num_tokens: int, num_ranks: int) -> np.ndarray:
    """[T]: the rank of each token, if tokens are dealt out in order, as many to each rank.

    >>> dealt(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    return np.arange(num_tokens) * num_ranks // max(num_tokens, 1)


class CopyChooser:
    """Which rank's copy a token's choice goes to. Without a topology all ranks are on one node."""

    def __init__(self, placement: Replicas, topology: Topology | None = None) -> None:
        self._num_ranks = placement.num_ranks
        self._node_R = nodes_of(placement, topology)
        experts, rank_P = np.array(placement.expert_of_slot), np.array(placement.rank_of_slot)
        node_P = self._node_R[rank_P]
        num_all = np.array(placement.num_copies)
        num_near_ME = _copies_by_node(experts, node_P, self._node_R.max() + 1)
        # Ranks of all copies by expert, then of those on a node by expert and node, then nobody's.
        by_expert = np.argsort(experts, kind="stable")
        by_node = np.lexsort((node_P, experts))
        self._ranks = np.concatenate([rank_P[by_expert], rank_P[by_node], [placement.num_ranks]])
        first_E = np.cumsum(num_all) - num_all
        ends_ME = np.cumsum(num_near_ME.T.ravel()).reshape(len(num_all), -1).T
        first_near_ME = len(experts) + ends_ME - num_near_ME
        near_ME = num_near_ME > 0
        # The last expert is -1, which has one copy, nowhere.
        one_more, nowhere = ((0, 0), (0, 1)), len(self._ranks) - 1
        first_ME = np.where(near_ME, first_near_ME, first_E)
        count_ME = np.where(near_ME, num_near_ME, num_all)
        self._first_ME = np.pad(first_ME, one_more, constant_values=nowhere)
        self._count_ME = np.pad(count_ME, one_more, constant_values=1)

    def ranks(self, topk_idx_TK: np.ndarray) -> np.ndarray:
        """[T, K]: the rank of each choice of tokens that are dealt out, num_ranks for none."""
        source_T = dealt(len(topk_idx_TK), self._num_ranks)
        before_R = np.searchsorted(source_T, np.arange(self._num_ranks))
        turn_T = source_T + np.arange(len(source_T)) - before_R[source_T]
        where = self._node_R[source_T][:, None], topk_idx_TK
        return self._ranks[self._first_ME[where] + turn_T[:, None] % self._count_ME[where]]


class BalancedChooser:
    """Which rank of its expert's node computes each choice, with a balance (`spec.balanced`)."""

    def __init__(self, placement: Replicas, topology: Topology, slack: float) -> None:
        self._kernels: Any = load("numba")
        if placement.has_copies:
            raise ValueError("placement has copies, want one slot an expert with a balance")
        self._owners_E = np.empty(placement.num_experts, np.int64)
        self._owners_E[list(placement.expert_of_slot)] = placement.rank_of_slot
        self._nodes_R = np.array(topology.node_of_rank, np.int64)
        self._slack = round(slack * of.MILLION)

    def ranks(self, topk_idx_TK: np.ndarray) -> np.ndarray:
        """[T, K]: the rank of each choice of tokens that are dealt out, num_ranks for none."""
        size, num_experts = len(self._nodes_R), len(self._owners_E)
        each = np.searchsorted(dealt(len(topk_idx_TK), size), np.arange(1, size))
        ids = [np.ascontiguousarray(part).reshape(-1) for part in np.split(topk_idx_TK, each)]
        counts_RE = np.zeros((size, num_experts), np.int64)
        for rank, own in enumerate(ids):
            self._kernels.count_pairs(own, counts_RE[rank])
        runs_3N, first_E = np.empty((3, num_experts + 2 * size), np.int64), self._owners_E.copy()
        figures, ranks = np.empty(of.NUM_FIGURES + size, np.int64), []
        found, where = (runs_3N, first_E), (self._nodes_R, self._slack, 0)
        self._kernels.assign(counts_RE, self._owners_E, *where, *found, figures)
        names_RE = np.repeat(np.arange(size)[:, None], num_experts, 1)
        for rank, own in enumerate(ids):
            ranks.append(np.empty_like(own))
            given = own, counts_RE, self._owners_E, rank, *found, names_RE, ranks[-1]
            self._kernels.take_slots(*given)
        flat = np.concatenate(ranks)
        return np.where(flat < 0, size, flat).reshape(topk_idx_TK.shape)


def shares(experts_P: np.ndarray, node_P: np.ndarray, num_nodes: int) -> np.ndarray:
    """[M, P]: the part of a node's choices of an expert that each of its copies gets. The slots
    hold these experts, on these nodes.

    >>> shares(np.array([0, 1, 0, 2]), np.array([0, 0, 0, 0]), 1).tolist()
    [[0.5, 1.0, 0.5, 1.0]]
    >>> shares(np.array([0, 1, 0, 2]), np.array([0, 0, 1, 1]), 2).tolist()
    [[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]
    """
    near_ME = _copies_by_node(experts_P, node_P, num_nodes)
    here_MP, near_MP = node_P == np.arange(num_nodes)[:, None], near_ME[:, experts_P]
    all_P = near_ME.sum(0)[experts_P]
    return np.where(near_MP > 0, here_MP / np.maximum(near_MP, 1), 1.0 / all_P)


def slot_loads(
    experts_P: np.ndarray, rank_P: np.ndarray, node_R: np.ndarray, load_E: np.ndarray
) -> np.ndarray:
    """[P]: what each slot carries, if the tokens of all ranks choose alike."""
    ranks_M = np.bincount(node_R)
    part_P = ranks_M / len(node_R) @ shares(experts_P, node_R[rank_P], len(ranks_M))
    return part_P * load_E[experts_P]


def expected_traffic(
    placement: Replicas, load_E: np.ndarray, topology: Topology | None = None
) -> np.ndarray:
    """[R, R]: the choices that rank i sends to rank j, if the tokens of all ranks choose alike.

    >>> expected_traffic(Replicas([[0, 1], [0, 2]]), np.array([4.0, 1.0, 3.0])).tolist()
    [[1.5, 2.5], [1.5, 2.5]]
    """
    experts, rank_P = np.array(placement.expert_of_slot), np.array(placement.rank_of_slot)
    node_R = nodes_of(placement, topology)
    each_P = np.asarray(load_E)[experts] / placement.num_ranks
    sent_MR = [
        np.bincount(rank_P, share_P * each_P, placement.num_ranks)
        for share_P in shares(experts, node_R[rank_P], node_R.max() + 1)
    ]
    return np.array(sent_MR)[node_R]


def nodes_of(placement: Replicas, topology: Topology | None) -> np.ndarray:
    """[R]: the node of each rank; without a topology all are on one."""
    if topology is None:
        return np.zeros(placement.num_ranks, np.int64)
    if topology.num_ranks != placement.num_ranks:
        raise ValueError(f"{placement.num_ranks} ranks hold experts, want {topology.num_ranks}")
    return np.array(topology.node_of_rank)


def _copies_by_node(experts_P: np.ndarray, node_P: np.ndarray, num_nodes: int) -> np.ndarray:
    """[M, E]: how many copies of an expert a node has."""
    num_experts = int(experts_P.max()) + 1
    keys = node_P * num_experts + experts_P
    return np.bincount(keys, minlength=num_nodes * num_experts).reshape(num_nodes, num_experts)
