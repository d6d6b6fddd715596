"""What SimGrid says of the closed form: where only ranks' own links bind, and where they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tokenyard.planner.cost import Work
from tokenyard.planner.presets import CLUSTERS, MODELS
from tokenyard.topology import Topology
from tools.flow_networks import Fabric, Network, Traffic, count_traffic
from tools.second_opinion import compare, is_there

H800 = replace(CLUSTERS["h800"], ranks_per_node=4)
NARROW = Fabric(name="leaves of a node, 4:1", nodes_per_leaf=1, oversubscribed=4.0)

simgrid = pytest.mark.skipif(not is_there(), reason="needs Debian's python3-simgrid")


def test_ways_cross_the_links_that_ranks_share() -> None:
    topology = Topology.even(8, 2)
    ways = {
        fabric: Network(H800, topology, fabric).way(1, 6, False)
        for fabric in (
            Fabric(),
            Fabric(shared_adapter=True),
            Fabric(nodes_per_leaf=2, oversubscribed=2.0),
            Fabric(nodes_per_leaf=4, oversubscribed=2.0),
        )
    }
    assert list(ways.values()) == [
        ["network-up-1", "network-down-6"],
        ["network-up-0", "network-down-3"],
        ["network-up-1", "leaf-up-0", "leaf-down-1", "network-down-6"],
        ["network-up-1", "network-down-6"],
    ]


def test_parts_have_all_rows_and_follow_those_that_they_pass_on() -> None:
    topology = Topology.even(4, 2)
    chosen = np.random.default_rng(0).integers(0, 4, (40, 2))
    traffic = count_traffic(chosen, topology, "two_level", False)
    network = Network(H800, topology, Fabric(parts=3))
    groups = network.groups(traffic, 10)
    assert len(groups) == 3 * (4 + 4)  # of every part, each rank sends and passes on
    moved = sum(size for group in groups for size, _ in group.flows)
    assert moved == 10 * (traffic.inside.sum() + traffic.outside.sum())
    assert all(earlier < number for number, group in enumerate(groups) for earlier in group.after)
    assert groups[4].after == [2]  # rank 0 passes on what rank 2, on its rail, sent
    assert groups[12].after == [10, 4]  # and its own part before


def test_the_busiest_link_may_be_one_that_ranks_share() -> None:
    topology = Topology.even(8, 4)
    rows = np.zeros((8, 8), np.int64)
    rows[:4, 4:] = 1  # four rows leave each rank of the first node
    traffic = Traffic(inside=np.zeros_like(rows), outside=rows)
    for fabric, times in ((Fabric(), 1), (Fabric(shared_adapter=True), 1), (NARROW, 4)):
        network = Network(H800, topology, fabric)
        seconds = network.busiest(network.groups(traffic, 1000))
        assert seconds == pytest.approx(times * 4000 / H800.network_rate), fabric.name


@simgrid
@pytest.mark.parametrize("exponent", [0.0, 0.8], ids=["even", "skewed"])
@pytest.mark.parametrize("mode", ["low_latency", "normal"])
def test_simgrid_agrees_where_only_own_links_bind(mode: str, exponent: float) -> None:
    work = Work(num_tokens=32, mode=mode)
    found = compare(H800, MODELS["deepseek-v3"], 16, work, exponent)
    assert found.closed.seconds == pytest.approx(found.simulated, rel=0.02)


@simgrid
def test_simgrid_sees_what_the_closed_form_misses() -> None:
    work = Work(num_tokens=32, mode="normal")
    model = MODELS["deepseek-v3"]
    narrow = compare(H800, model, 16, work, 0.0, NARROW)
    assert narrow.closed.seconds < 0.7 * narrow.simulated
    assert narrow.busiest == pytest.approx(narrow.simulated, rel=0.05)
    late = compare(H800, model, 16, work, 0.0, Fabric(parts=1))
    streamed = compare(H800, model, 16, work, 0.0, Fabric(parts=8))
    assert late.closed.seconds < streamed.simulated < late.simulated
