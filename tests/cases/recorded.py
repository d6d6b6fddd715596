"""Recordings that no run has made."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenyard.observe.routing import LayerRouting
from tokenyard.testing import routing
from tokenyard.topology import Topology, even_split


def recorded(
    kind: str = "holes",
    *,
    num_steps: int = 3,
    num_ranks: int = 4,
    num_experts: int = 8,
    num_topk: int = 3,
    num_tokens: int = 20,
    nodes: int = 2,
    name: str = "moe",
    order: int = 0,
) -> LayerRouting:
    """Ranks have different numbers of tokens, one of them none in the first step."""
    counts = torch.tensor(
        [
            [0 if (step, rank) == (0, 1) else num_tokens + rank for rank in range(num_ranks)]
            for step in range(num_steps)
        ]
    )
    ids: list[Tensor] = [
        routing(kind, count, num_topk, num_experts, seed=number)[0]
        for number, count in enumerate(counts.flatten().tolist(), 100 * order)
    ]
    per_node = num_ranks // nodes
    return LayerRouting(
        name=name,
        buffer=7,
        order=order,
        num_experts=num_experts,
        num_ranks=num_ranks,
        hidden=64,
        dtype="bfloat16",
        ranks=torch.arange(num_ranks),
        node_of_rank=torch.tensor(Topology.even(num_ranks, per_node).node_of_rank),
        rank_of_expert=torch.tensor(even_split(num_experts, num_ranks), dtype=torch.int32),
        step=torch.arange(num_steps),
        num_tokens=counts,
        topk_idx=torch.cat(ids).to(torch.int16),
        topk_weights=None,
    )
