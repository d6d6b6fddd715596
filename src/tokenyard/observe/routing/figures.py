"""Figures of a recorded routing, at the ranks it was recorded on or at any other number.

Letters: S steps, R ranks, M nodes, E experts, N tokens, K top-k. At another number of ranks the
tokens of a step are dealt out again, consecutive tokens to each rank, and experts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tokenyard.engine.balanced import shared_out
from tokenyard.observe.routing.file import LayerRouting
from tokenyard.topology import even_split

_AT_ONCE = 1 << 20  # tokens that are looked at together, which bounds memory


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Where experts and ranks are."""

    rank_of_expert: np.ndarray  # [E] int64
    node_of_rank: np.ndarray  # [R] int64

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return int(self.node_of_rank.max()) + 1


def places_of(layer: LayerRouting, ranks: int | None = None, nodes: int | None = None) -> Places:
    """The places of the recording, unless another number of ranks or nodes is asked for.

    Raises ValueError where ranks do not divide the experts, or nodes the ranks.
    """
    recorded = layer.num_ranks
    num_ranks = recorded if ranks is None else ranks
    if num_ranks < 1 or (num_ranks != recorded and layer.num_experts % num_ranks):
        fitting = [n for n in range(1, layer.num_experts + 1) if layer.num_experts % n == 0]
        raise ValueError(
            f"ranks is {num_ranks}, want a number that divides the {layer.num_experts} experts of "
            f"{layer.name}: {', '.join(map(str, fitting))}"
        )
    if nodes is not None and (nodes < 1 or num_ranks % nodes):
        raise ValueError(f"nodes is {nodes}, want a number that divides the {num_ranks} ranks")
    if num_ranks == recorded:
        rank_of_expert = layer.rank_of_expert.numpy().astype(np.int64)
    else:
        rank_of_expert = np.array(even_split(layer.num_experts, num_ranks), np.int64)
    if nodes is not None:
        node_of_rank = np.arange(num_ranks) // (num_ranks // nodes)
    elif num_ranks == recorded:
        node_of_rank = layer.node_of_rank.numpy().astype(np.int64)
    else:
        node_of_rank = np.zeros(num_ranks, np.int64)
    return Places(rank_of_expert=rank_of_expert, node_of_rank=node_of_rank)


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """Counts of one layer, or of several with as many experts. A row is one token, sent once."""

    names: tuple[str, ...]
    places: Places
    step: np.ndarray  # [S]
    expert_load: np.ndarray  # [S, E] tokens that chose each expert
    traffic: np.ndarray  # [R, R] rows from rank to rank, one for each (token, rank)
    node_traffic: np.ndarray  # [R, M] rows, were one sent for each (token, node)
    expert_traffic: np.ndarray  # [R, R] rows, were one sent for each (token, expert)
    num_tokens: int
    row_bytes: int

    @cached_property
    def load(self) -> np.ndarray:
        """[E], all steps together."""
        return self.expert_load.sum(0)

    @cached_property
    def rank_load_SR(self) -> np.ndarray:
        """[S, R]: rows that the experts of each rank compute."""
        loads = np.zeros((len(self.expert_load), self.places.num_ranks), np.int64)
        np.add.at(loads.T, self.places.rank_of_expert, self.expert_load.T)
        return loads

    @property
    def rank_load(self) -> np.ndarray:
        return self.rank_load_SR.sum(0)

    @property
    def expert_imbalance(self) -> np.ndarray:
        """[S]: the most loaded expert by the mean."""
        return imbalance(self.expert_load)

    @property
    def rank_imbalance(self) -> np.ndarray:
        return imbalance(self.rank_load_SR)

    @cached_property
    def balanced(self) -> tuple[np.ndarray, float]:
        """[S]: the rank imbalance of a Buffer with balance="exact"; and the part of all pairs that
        ranks would borrow.
        """
        busiest, borrowed = shared_out(self.rank_load_SR, self.places.node_of_rank)
        mean = self.rank_load_SR.mean(1)
        ratio = np.divide(busiest, mean, out=np.ones(len(mean)), where=mean > 0)
        return ratio, float(borrowed.sum() / max(1, self.rank_load_SR.sum()))

    @property
    def evenness(self) -> float:
        """The entropy of the load by that of an even one: 1 is even, 0 is one expert for all."""
        return entropy(self.load) / np.log2(len(self.load)) if len(self.load) > 1 else 1.0

    @property
    def rows(self) -> dict[str, int]:
        """How many rows all ranks send, by how often a token is sent; those to the same rank, or
        node, included.
        """
        return {
            "per_expert": int(self.expert_traffic.sum()),
            "per_rank": int(self.traffic.sum()),
            "per_node": int(self.node_traffic.sum()),
        }

    @property
    def rows_between_nodes(self) -> dict[str, int]:
        """How many of `rows` leave their node."""
        nodes = self.places.node_of_rank
        abroad_RR = nodes[:, None] != nodes[None]
        abroad_RM = nodes[:, None] != np.arange(self.places.num_nodes)[None]
        return {
            "per_expert": int(self.expert_traffic[abroad_RR].sum()),
            "per_rank": int(self.traffic[abroad_RR].sum()),
            "per_node": int(self.node_traffic[abroad_RM].sum()),
        }

    @property
    def traffic_of_a_step(self) -> tuple[np.ndarray, str]:
        """[R, R] from rank to rank, on average, in a unit that suits the largest."""
        each = self.traffic * self.row_bytes / max(1, len(self.step))
        power = next((p for p in (3, 2, 1) if each.max() >= 1000**p), 0)
        return each / 1000**power, ("B", "KB", "MB", "GB")[power]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "layers": list(self.names),
            "ranks": self.places.num_ranks,
            "nodes": self.places.num_nodes,
            "experts": len(self.load),
            "steps": self.step.tolist(),
            "tokens": self.num_tokens,
            "row_bytes": self.row_bytes,
            "expert_load": self.load.tolist(),
            "rank_load": self.rank_load.tolist(),
            "traffic_rows": self.traffic.tolist(),
            "traffic_bytes": (self.traffic * self.row_bytes).tolist(),
            "rows": self.rows,
            "rows_between_nodes": self.rows_between_nodes,
            "expert_imbalance": float(imbalance(self.load[None])[0]),
            "rank_imbalance": float(imbalance(self.rank_load[None])[0]),
            "expert_imbalance_by_step": np.round(self.expert_imbalance, 4).tolist(),
            "rank_imbalance_by_step": np.round(self.rank_imbalance, 4).tolist(),
            "balanced_rank_imbalance_by_step": np.round(self.balanced[0], 4).tolist(),
            "balanced_borrowed": self.balanced[1],
            "entropy_bits": float(entropy(self.load)),
            "evenness": float(self.evenness),
        }


def figures_of(
    layer: LayerRouting,
    ranks: int | None = None,
    nodes: int | None = None,
    hidden: int | None = None,
) -> Figures:
    """The figures of one layer; `hidden` stands in for the width of the recorded rows."""
    places = places_of(layer, ranks, nodes)
    num_ranks, num_experts = places.num_ranks, layer.num_experts
    size = getattr(torch, layer.dtype).itemsize
    source_N, step_N = _sources(layer, num_ranks)
    loads = np.zeros(layer.num_steps * num_experts, np.int64)
    traffic = {
        "traffic": np.zeros((num_ranks, num_ranks), np.int64),
        "expert_traffic": np.zeros((num_ranks, num_ranks), np.int64),
        "node_traffic": np.zeros((num_ranks, places.num_nodes), np.int64),
    }
    ids = layer.topk_idx.numpy()
    for begin in range(0, len(ids), _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        expert_NK, source = ids[part].astype(np.int64), source_N[part]
        chosen = expert_NK >= 0
        keys = step_N[part, None] * num_experts + expert_NK
        loads += np.bincount(keys[chosen], minlength=len(loads))
        rank_NK = np.where(chosen, places.rank_of_expert[expert_NK], -1)
        node_NK = np.where(chosen, places.node_of_rank[rank_NK], -1)
        _count(traffic["expert_traffic"], source, rank_NK)
        _count(traffic["traffic"], source, _once(rank_NK))
        _count(traffic["node_traffic"], source, _once(node_NK))
    return Figures(
        names=(layer.name,),
        places=places,
        step=layer.step.numpy(),
        expert_load=loads.reshape(layer.num_steps, num_experts),
        num_tokens=len(ids),
        row_bytes=size * (layer.hidden if hidden is None else hidden),
        **traffic,
    )


def together(each: Sequence[Figures]) -> Figures:
    """Layers of as many experts and ranks, added up, over the steps that all of them have."""
    first = each[0]
    shapes = {(len(one.load), one.places.num_ranks) for one in each}
    if len(shapes) > 1:
        raise ValueError("layers differ in their experts or ranks, want one of them by --layer")
    steps = np.array(sorted(set.intersection(*(set(one.step.tolist()) for one in each))), np.int64)
    return Figures(
        names=tuple(name for one in each for name in one.names),
        places=first.places,
        step=steps,
        expert_load=np.sum([one.expert_load[np.isin(one.step, steps)] for one in each], 0),
        traffic=np.sum([one.traffic for one in each], 0),
        node_traffic=np.sum([one.node_traffic for one in each], 0),
        expert_traffic=np.sum([one.expert_traffic for one in each], 0),
        num_tokens=sum(one.num_tokens for one in each),
        row_bytes=first.row_bytes,
    )


def imbalance(loads_SX: np.ndarray) -> np.ndarray:
    """[S]: the largest by the mean; 1 is balanced, and so is nothing.

    >>> imbalance(np.array([[2, 2], [4, 0], [0, 0]])).tolist()
    [1.0, 2.0, 1.0]
    """
    mean = loads_SX.mean(1)
    return np.divide(loads_SX.max(1), mean, out=np.ones(len(mean)), where=mean > 0)


def entropy(loads_X: np.ndarray) -> float:
    """The entropy of loads, in bits.

    >>> entropy(np.array([1, 1, 1, 1])), entropy(np.array([5, 0]))
    (2.0, 0.0)
    """
    total = loads_X.sum()
    if not total:
        return 0.0
    share = loads_X[loads_X > 0] / total
    return float(abs((share * np.log2(share)).sum()))


def _sources(layer: LayerRouting, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """[N]: the rank and the number of the step of each token."""
    counts_SP = layer.num_tokens.numpy()
    of_step = counts_SP.sum(1)
    step_N = np.repeat(np.arange(len(of_step)), of_step)
    if num_ranks == layer.num_ranks:
        ranks = np.broadcast_to(layer.ranks.numpy(), counts_SP.shape)
        return np.repeat(ranks.reshape(-1), counts_SP.reshape(-1)), step_N
    number_N = np.arange(of_step.sum()) - np.repeat(of_step.cumsum() - of_step, of_step)
    return number_N * num_ranks // np.maximum(of_step, 1)[step_N], step_N


def _once(place_NK: np.ndarray) -> np.ndarray:
    """Each place of a token once, -1 instead of the others.

    >>> _once(np.array([[3, 1, 3], [-1, 2, 2]])).tolist()
    [[1, 3, -1], [-1, 2, -1]]
    """
    ordered = np.sort(place_NK, axis=1)
    repeated = ordered[:, 1:] == ordered[:, :-1]
    ordered[:, 1:][repeated] = -1
    return ordered


def _count(totals_RX: np.ndarray, source_N: np.ndarray, place_NK: np.ndarray) -> None:
    """Add one for each source and place that is not -1."""
    keys = source_N[:, None] * totals_RX.shape[1] + place_NK
    found = np.bincount(keys[place_NK >= 0], minlength=totals_RX.size)
    totals_RX += found.reshape(totals_RX.shape)
