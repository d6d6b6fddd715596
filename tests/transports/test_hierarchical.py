"""Two levels equal `spec`, bit for bit, whatever the nodes; and what crosses the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cases.clock import scaled
from tests.cases.conformance import CASES, SAMPLED, check, name_of, on_nodes
from tests.cases.exchange import Case, inputs, job
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tokenyard import spec
from tokenyard.testing import Processes, run_virtual
from tokenyard.transports.hierarchical import enclosed, route
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.wire.node_blocks import LEAST_RANKS

SHAPES = [(2, 2), (3, 2, 1)]
MORE_SHAPES = [(4, 4), (2, 2, 2, 2)]
SMALL_SHAPES = [(1, 1), (1, 3), (2,)]  # a node of one rank, and one node


@pytest.mark.parametrize("sizes", SHAPES, ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks(name: str, sizes: tuple[int, ...]) -> None:
    check_virtual(on_nodes(name, sizes))


@pytest.mark.parametrize("sizes", at_night(MORE_SHAPES + SMALL_SHAPES, SMALL_SHAPES), ids=name_of)
@pytest.mark.parametrize("name", SAMPLED)
def test_more_shapes(name: str, sizes: tuple[int, ...]) -> None:
    check_virtual(on_nodes(name, sizes))


# Few rows have two ways between nodes, and ranks may take different ones in the same call.
@pytest.mark.parametrize("way", ["general", "mixed"])
@pytest.mark.parametrize("sizes", SHAPES, ids=name_of)
@pytest.mark.parametrize("name", SAMPLED)
def test_ways(name: str, sizes: tuple[int, ...], way: str) -> None:
    check_virtual(replace(on_nodes(name, sizes), way=way))


def check_virtual(case: Case) -> None:
    check(case, run_virtual(job, case.num_ranks, case).results)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 1)], ids=name_of)
@pytest.mark.parametrize("name", ["plain", "long-rows", "no-tokens-on-some", "holes", "fp8"])
def test_many_chunks(name: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two or three tokens, and of one where a row is longer than that."""
    monkeypatch.setattr(route, "_CHUNK", 500)
    check_virtual(on_nodes(name, sizes))


@pytest.mark.parametrize("num_nodes", at_night([1, 2, 8, 32], gate=(1, 2)))
@pytest.mark.parametrize("few", [True, False], ids=["few-rows", "many-rows"])
@pytest.mark.timeout(300)
def test_nodes_of_8(num_nodes: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enclosed, "MOST_ENCLOSED", enclosed.MOST_ENCLOSED if few else 0)
    monkeypatch.setattr(enclosed, "_LEAST", 1 << 18)
    monkeypatch.setattr(Staging, "soon", 100.0)
    case = Case(
        num_ranks=8 * num_nodes,
        ranks_per_node=8,
        tokens=(5, 0, 9),
        num_experts=16 * num_nodes,
        num_topk=8,
        hidden=24,
        transport="hierarchical",
    )
    run = run_virtual(job, case.num_ranks, case, timeout=scaled(280))
    check(case, run.results)

    # A token crosses once to each other node: x, expert ids, weights, number; x and weights back,
    # and x alone in a second combine.
    crossings = nodes_between(case, 0) + nodes_between(case, 1)
    out, back = 24 * 2 + 8 * 8 + 8 * 4 + 4, 24 * 2 + 8 * 4 + 24 * 2
    if num_nodes == 1:
        assert "combine" not in run.bytes_sent
        return
    # And a bit for each of its tokens and each rank of that node, unless it is part of a message:
    # in the first dispatch ranks hear that they will enclose rows with messages. An agreement by
    # nodes has messages of one size, which enclose nothing.
    encloses = few and case.num_ranks < LEAST_RANKS
    marks = marks_between(case) * (1 if encloses else 2)
    assert torch.equal(run.bytes_sent["dispatch"], crossings * out + marks)
    assert torch.equal(run.bytes_sent["combine"], crossings.t() * back)
    assert torch.equal(run.bytes_sent["cached dispatch"], nodes_between(case, 0) * 24 * 2)


def nodes_between(case: Case, turn: int) -> torch.Tensor:
    """[R, R]: the tokens of rank i that some rank of another node needs, at its partner there."""
    sent = torch.zeros(case.num_ranks, case.num_ranks, dtype=torch.int64)
    for rank in range(case.num_ranks):
        per_node = spec.layout(inputs(case, rank, turn).topk_idx, case.world).num_tokens_per_node
        for node, count in enumerate([] if per_node is None else per_node.tolist()):
            if node != rank // 8:
                sent[rank, 8 * node + rank % 8] = count
    return sent


def marks_between(case: Case) -> torch.Tensor:
    bits = torch.zeros(case.num_ranks, case.num_ranks, dtype=torch.int64)
    for rank in range(case.num_ranks):
        for node in range(case.num_ranks // 8):
            if node != rank // 8:
                bits[rank, 8 * node + rank % 8] = 4 + case.num_tokens(rank)
    return bits


def parameter(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return tuple(request.param)


# Of the module, so that tests with as many processes follow each other.
nodes = pytest.fixture(
    parameter, scope="module", params=at_night(SHAPES + MORE_SHAPES, SHAPES), ids=name_of
)


@pytest.mark.processes
@pytest.mark.parametrize("name", SAMPLED)
def test_processes(name: str, nodes: tuple[int, ...], processes: Pools) -> None:
    check_processes(name, nodes, processes(sum(nodes)))


def check_processes(name: str, sizes: tuple[int, ...], ranks: Processes) -> None:
    case = on_nodes(name, sizes)
    check(case, ranks.run(job, case))
