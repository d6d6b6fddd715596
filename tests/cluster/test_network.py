"""Nodes with a real network between them: the same bits, and what crosses it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard
from benchmarks.per_expert import PerExpert
from tests.cases.clock import scaled
from tests.cases.conformance import SAMPLED, case_of, check
from tests.cases.exchange import Case, job
from tests.cases.lanes import at_night
from tokenyard.testing import Cluster, numbered_tokens, routing, why_no_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster())),
]


def on(cluster: Cluster, name: str) -> Case:
    case = case_of(name, cluster.num_ranks)
    nodes = tuple(cluster.sizes)
    return replace(case, ranks_per_node=nodes, transport="hierarchical", kernels="numba")


@pytest.fixture(scope="module", params=at_night([2, 4], gate=(2,)), ids=["2-nodes", "4-nodes"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster([2] * request.param, timeout=scaled(120)) as box:
        yield box


@pytest.mark.parametrize("name", SAMPLED)
def test_conformance(name: str, cluster: Cluster) -> None:
    case = on(cluster, name)
    check(case, cluster.run(job, case))


def test_same_bits_when_packets_are_lost(cluster: Cluster) -> None:
    cluster.lose(0.01)
    try:
        for name in ("plain", "long-rows", "fp8"):
            case = replace(on(cluster, name), tokens=(150, 90), hidden=1024)
            check(case, cluster.run(job, case))
        assert cluster.lost() > 0
    finally:
        cluster.lose(0)


# Top-8 of 16 experts on 4 ranks: a token needs nearly every rank, and 4 experts of each node.
TOKENS, HIDDEN, TOPK, EXPERTS = 512, 2048, 8, 16
RECORD = HIDDEN * 2 + TOPK * 8 + TOPK * 4 + 4  # x, expert ids, weights, the token's number


def given(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = numbered_tokens(TOKENS, HIDDEN, first=rank * TOKENS)
    return x, *routing("uniform", TOKENS, TOPK, EXPERTS, seed=rank)


buffer: tokenyard.Buffer  # of this process


def open_buffer(group: Any) -> int:
    """The Buffer stays, so that only what dispatch itself sends is counted afterwards."""
    global buffer
    buffer = tokenyard.Buffer(group, transport="hierarchical", ranks_per_node=[2, 2])
    return dispatch(group, times=1)


def dispatch(group: Any, times: int) -> int:
    """Returns how many tokens of this rank the other node needs."""
    x, topk_idx, weights = given(group.rank())
    for _ in range(times):
        buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=EXPERTS)
    layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    return int(layout.num_tokens_per_rdma_rank[1 - group.rank() // 2])


def dispatch_by_expert(group: Any) -> None:
    x, topk_idx, _ = given(group.rank())
    PerExpert(group, x, topk_idx, EXPERTS).dispatch()
    dist.barrier()


def test_a_token_crosses_once_to_a_node() -> None:
    with Cluster([2, 2], timeout=scaled(120)) as box:
        needed = box.run(open_buffer)
        before = box.bytes_sent()
        box.run(dispatch, 3)
        middle = box.bytes_sent()
        box.run(dispatch_by_expert)
        after = box.bytes_sent()
    for node in range(2):
        tokens = sum(needed[2 * node : 2 * node + 2])
        want = tokens * RECORD
        ours = (middle[node] - before[node]) / 3
        theirs = after[node] - middle[node]
        print(
            f"node {node}: {tokens} tokens need the other node, {want} bytes of records; "
            f"on the wire {ours:.0f}, by (token, expert) pairs {theirs}"
        )
        assert want < ours < 1.1 * want
        assert theirs > 3.5 * ours  # 4 of a token's 8 experts are on the other node
