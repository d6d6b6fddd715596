"""Figures of a recording against counting one by one, and against the layout of the spec."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases.recorded import recorded
from tokenyard import spec
from tokenyard.observe.routing import LayerRouting
from tokenyard.observe.routing.figures import Figures, entropy, figures_of, imbalance, together
from tokenyard.spec.exchange import World

KINDS = ("uniform", "skewed", "one", "none", "holes")


def tokens_of(layer: LayerRouting, num_ranks: int) -> list[list[Tensor]]:
    """By step and rank: topk_idx of its tokens, dealt out again if there are other ranks."""
    made, begin = [], 0
    for counts in layer.num_tokens.tolist():
        ids = layer.topk_idx[begin : begin + sum(counts)].long()
        begin += sum(counts)
        if num_ranks == layer.num_ranks:
            made.append(list(ids.split(counts)))
        else:
            owner = torch.tensor([n * num_ranks // len(ids) for n in range(len(ids))])
            made.append([ids[owner == rank] for rank in range(num_ranks)])
    return made


def check(layer: LayerRouting, got: Figures, world: World) -> None:
    """Every count, by the layouts of all ranks and steps."""
    num_ranks, num_nodes = world.num_ranks, world.num_nodes
    loads = np.zeros((layer.num_steps, world.num_experts), np.int64)
    by_rank, by_expert = (np.zeros((num_ranks, num_ranks), np.int64) for _ in range(2))
    by_node = np.zeros((num_ranks, num_nodes), np.int64)
    for step, of_rank in enumerate(tokens_of(layer, num_ranks)):
        for rank, topk_idx in enumerate(of_rank):
            layout = spec.layout(topk_idx, world)
            loads[step] += layout.num_tokens_per_expert.numpy()
            by_rank[rank] += layout.num_tokens_per_rank.numpy()
            for expert, count in enumerate(layout.num_tokens_per_expert.tolist()):
                by_expert[rank, world.rank_of_expert[expert]] += count
            for experts in topk_idx.tolist():
                for node in {
                    world.node_of_rank[world.rank_of_expert[e]] for e in experts if e >= 0
                }:
                    by_node[rank, node] += 1
    assert np.array_equal(got.expert_load, loads)
    assert np.array_equal(got.traffic, by_rank)
    assert np.array_equal(got.node_traffic, by_node)
    assert np.array_equal(got.expert_traffic, by_expert)
    assert got.rank_load_SR.tolist() == [
        [int(step[world.experts_of(rank)].sum()) for rank in range(num_ranks)] for step in loads
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks, nodes", [(None, None), (8, 4), (2, 1), (1, None)])
def test_counts(kind: str, ranks: int | None, nodes: int | None) -> None:
    layer = recorded(kind)
    num_ranks = ranks or 4
    num_nodes = nodes or (2 if ranks is None else 1)
    world = World.even(8, num_ranks, num_ranks // num_nodes)
    check(layer, figures_of(layer, ranks, nodes), world)


def test_a_placement_of_its_own_and_uneven_nodes() -> None:
    layer = replace(
        recorded(num_experts=6, num_ranks=3, nodes=1),
        rank_of_expert=torch.tensor([2, 0, 1, 1, 0, 2]),
        node_of_rank=torch.tensor([0, 0, 1]),
    )
    check(layer, figures_of(layer), World((2, 0, 1, 1, 0, 2), (0, 0, 1)))


def test_copies_and_bytes() -> None:
    """One token for experts 0, 1, 2 and 5 of 8, from rank 0 of 4 on 2 nodes."""
    layer = replace(
        recorded(num_steps=1),
        num_tokens=torch.tensor([[1, 0, 0, 0]]),
        topk_idx=torch.tensor([[0, 1, 2, 5]], dtype=torch.int16),
    )
    got = figures_of(layer)
    assert got.rows == {"per_expert": 4, "per_rank": 3, "per_node": 2}
    assert got.rows_between_nodes == {"per_expert": 1, "per_rank": 1, "per_node": 1}
    assert got.traffic.tolist()[0] == [1, 1, 1, 0]
    assert got.row_bytes == 64 * 2
    assert figures_of(layer, hidden=7168).as_dict()["traffic_bytes"][0] == [14336, 14336, 14336, 0]


def test_layers_together() -> None:
    first, second = recorded("skewed"), recorded("uniform", order=1, num_steps=2)
    one, two = figures_of(first), figures_of(second)
    both = together([one, two])
    assert both.names == ("moe", "moe")
    assert both.step.tolist() == [0, 1]
    assert np.array_equal(both.expert_load, one.expert_load[:2] + two.expert_load)
    assert np.array_equal(both.traffic, one.traffic + two.traffic)
    with pytest.raises(ValueError, match="layers differ in their experts"):
        together([one, figures_of(recorded(num_experts=4))])


def test_imbalance_and_entropy() -> None:
    got = figures_of(recorded("one"))
    assert np.allclose(got.expert_imbalance, 8)
    assert np.allclose(got.rank_imbalance, 4)
    assert got.evenness == 0
    even = np.array([[3, 3, 3, 3]])
    assert imbalance(even).tolist() == [1]
    assert entropy(even[0]) == 2
    nobody = figures_of(recorded("none"))
    assert nobody.expert_imbalance.tolist() == [1, 1, 1]
    assert nobody.evenness == 0


@pytest.mark.parametrize(
    "ranks, nodes, words",
    [
        (3, None, "ranks is 3, want a number that divides the 8 experts of moe: 1, 2, 4, 8"),
        (0, None, "ranks is 0, want a number"),
        (8, 3, "nodes is 3, want a number that divides the 8 ranks"),
    ],
)
def test_ranks_that_do_not_fit(ranks: int, nodes: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        figures_of(recorded(), ranks, nodes)
