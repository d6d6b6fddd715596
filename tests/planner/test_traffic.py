"""Predicted rows: those that virtual ranks send, and those that many random tokens choose."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tokenyard.planner.choices import Routing
from tokenyard.planner.traffic import (
    combine_row_bytes,
    counted_rows,
    crossings_between,
    dispatch_row_bytes,
    expected_rows,
    mark_bytes,
    rows_between,
)
from tokenyard.testing import run_virtual
from tokenyard.topology import Topology, even_split
from tokenyard.transports.hierarchical import enclosed


def exchange(group: Any, given: list[np.ndarray], options: dict[str, Any], shape: Any) -> None:
    hidden, num_experts, fp8, weights_back = shape
    topk_idx = torch.from_numpy(given[group.rank()])
    rows: Any = torch.ones(len(topk_idx), hidden, dtype=torch.bfloat16)
    x = rows
    if fp8:
        x = rows.to(torch.float8_e4m3fn), torch.ones(len(topk_idx), hidden // 128)
    weights = torch.ones(topk_idx.shape)
    with tokenyard.Buffer(group, timeout=scaled(60), **options) as buffer:
        got: Any = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_experts=num_experts
        )
        y = got.recv_x[0].to(torch.bfloat16) if fp8 else got.recv_x
        buffer.combine(y, got.handle, got.recv_topk_weights if weights_back else None)


@pytest.mark.parametrize("batch", range(4))
def test_predicted_bytes_equal_those_that_loopback_counts(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 random cases each: bytes between all pairs of ranks, of dispatch and combine.

    Between nodes, few rows may travel with a message; then ranks that could not do so offer theirs
    again, which takes bytes that depend on time. So none do here.
    """
    monkeypatch.setattr(enclosed, "MOST_ENCLOSED", 0)
    for seed in range(16 * batch, 16 * batch + 16):
        draw, numbers = random.Random(seed), np.random.default_rng(seed)
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 2))]
        topology = Topology.of_sizes(sizes)
        ranks = topology.num_ranks
        num_experts, num_topk = ranks * draw.randint(3, 4), draw.randint(1, 3)
        fp8, back = draw.random() < 0.3, draw.random() < 0.5
        hidden = 128 * draw.randint(1, 2) if fp8 else draw.randint(1, 40)
        two_level = len(sizes) > 1 and draw.random() < 0.5
        owners = np.array(even_split(num_experts, ranks))
        options: dict[str, Any] = {"transport": "hierarchical" if two_level else "collective"}
        options["ranks_per_node"] = sizes
        if draw.random() < 0.5:
            numbers.shuffle(owners)
            options["placement"] = torch.from_numpy(owners)
        given = [
            np.array(
                [
                    np.where(numbers.random(num_topk) < 0.1, -1, chosen)
                    for chosen in (
                        numbers.permutation(num_experts)[:num_topk]
                        for _ in range(draw.randint(0, 9))
                    )
                ],
                np.int64,
            ).reshape(-1, num_topk)
            for _ in range(ranks)
        ]
        run = run_virtual(
            exchange, ranks, given, options, (hidden, num_experts, fp8, back), timeout=scaled(60)
        )

        scales = hidden // 128 * 4 if fp8 else 0
        out = dispatch_row_bytes(hidden if fp8 else 2 * hidden, num_topk, scales)
        returned = combine_row_bytes(2 * hidden, num_topk if back else 0)
        if two_level:
            rows = crossings_between(given, owners, topology)
            marks = mark_bytes([len(one) for one in given], topology)
        else:
            rows, marks = rows_between(given, owners, ranks), np.zeros((ranks, ranks), np.int64)
        sent = run.bytes_sent
        assert sent["dispatch"].tolist() == (rows * out + marks).tolist(), seed
        assert sent["combine"].tolist() == (rows.T * returned).tolist(), seed


ROUTINGS = {
    "uniform": Routing(num_experts=32, num_topk=4),
    "groups": Routing(num_experts=32, num_topk=4, num_groups=4, num_topk_groups=2),
    "skewed": Routing.zipf(32, 4, exponent=0.8),
}


def choose(routing: Routing, num_tokens: int) -> np.ndarray:
    """[T, K]: experts of the largest clocks, as a router with noise would choose."""
    numbers = np.random.default_rng(3)
    scores = numbers.gumbel(size=(num_tokens, routing.num_experts))
    if routing.load is not None:
        scores += np.log(routing.load)
    if routing.num_groups > 1:
        groups = np.argsort(numbers.random((num_tokens, routing.num_groups)), 1)
        open_TG = groups < routing.num_topk_groups
        each = routing.num_experts // routing.num_groups
        scores[~np.repeat(open_TG, each, 1)] = -np.inf
    return np.argsort(-scores, 1)[:, : routing.num_topk]


@pytest.mark.parametrize("route", ["direct", "two_level"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_expected_rows_are_those_of_many_random_tokens(name: str, route: str) -> None:
    routing, topology, each = ROUTINGS[name], Topology.even(8, 4), 10_000
    owners = np.array(even_split(32, 8))
    given = list(choose(routing, 8 * each).reshape(8, each, 4))
    crossings = crossings_between(given, owners, topology) if route == "two_level" else None
    counted = counted_rows(rows_between(given, owners, 8), topology, crossings)
    expected = expected_rows(routing, owners, topology, each, route)
    # 10,000 tokens differ from the average by 1 to 2 %; skewed routing is an approximation.
    tolerance = 0.06
    for link in ("itself", "node_out", "node_in", "network_out", "network_in", "results"):
        np.testing.assert_allclose(
            getattr(counted, link), getattr(expected, link), rtol=tolerance, err_msg=link
        )


def test_pairs_add_up_to_topk() -> None:
    for routing in ROUTINGS.values():
        owners = np.array(even_split(32, 8))
        assert routing.pairs(owners, 8).sum() == pytest.approx(4)
        assert (routing.reach(owners, 8) <= routing.pairs(owners, 8) + 1e-9).all()


def test_bad_routings_say_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"num_topk is 9, want 1\.\.8"):
        Routing(num_experts=8, num_topk=9)
    with pytest.raises(ValueError, match="want groups that divide 8 experts"):
        Routing(num_experts=8, num_topk=1, num_groups=3)
    with pytest.raises(ValueError, match="1 groups have fewer than 5 experts"):
        Routing(num_experts=8, num_topk=5, num_groups=2)
