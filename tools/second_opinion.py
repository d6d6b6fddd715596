"""Compare the planner's closed form with SimGrid, where flows share links.

    apt-get install python3-simgrid
    python -m tools.second_opinion

Random tokens choose experts; both sides get the same rows between the same ranks. The closed form
takes the busiest rank's bytes; SimGrid lets flows begin together, and gives each its fair share of
the links that it uses. Networks whose ranks share links, or pass rows on, show what the closed form
misses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenyard.planner.copies import CopyChooser
from tokenyard.planner.cost import Cluster, Model, Stage, Work, route_of, stages_of
from tokenyard.planner.presets import CLUSTERS, MODELS
from tokenyard.planner.simulate import count_rows, drifting
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology
from tools.flow_networks import Fabric, Group, Network, count_traffic

PYTHON = "/usr/bin/python3"  # whose package SimGrid is
FLOWS = Path(__file__).parent / "simgrid_flows.py"


def is_there() -> bool:
    """Is SimGrid installed?"""
    if not Path(PYTHON).exists():
        return False
    asked = [PYTHON, "-c", "import simgrid"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def simulated(network: Network, groups: list[Group]) -> float:
    """Seconds of a stage, by SimGrid."""
    done = subprocess.run(
        [PYTHON, str(FLOWS)],
        input=json.dumps(network.as_dict(groups)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return network.cluster.overhead + json.loads(done.stdout.splitlines()[-1])["seconds"]


@dataclass(frozen=True, kw_only=True)
class Opinions:
    """Seconds of one dispatch."""

    closed: Stage
    busiest: float  # as the closed form, of all links, shared ones among them
    simulated: float


def compare(
    cluster: Cluster,
    model: Model,
    num_ranks: int,
    work: Work,
    exponent: float,
    fabric: Fabric | None = None,
) -> Opinions:
    """Dispatch, by the closed form, by its busiest link and by SimGrid."""
    chosen = drifting(1, num_ranks * work.num_tokens, model, exponent)[0].astype(np.int64)
    ranks = CopyChooser(Replicas.even(model.num_experts, num_ranks)).ranks(chosen)
    topology = Topology.even(num_ranks, cluster.ranks_per_node)
    route = route_of(cluster, num_ranks, work.mode)
    by_pair = work.mode == "low_latency" and cluster.by_pair
    rows = count_rows(ranks, topology, route, by_pair)
    stages = stages_of(cluster, model, work, rows, num_ranks)
    network = Network(cluster, topology, fabric or Fabric())
    traffic = count_traffic(ranks, topology, route, by_pair)
    groups = network.groups(traffic, work.row_bytes(model)[0])
    return Opinions(
        closed=next(one for one in stages if one.name == "dispatch"),
        busiest=cluster.overhead + network.busiest(groups),
        simulated=simulated(network, groups),
    )


# A cluster, modes and ranks, and what lies between the ranks.
CASES = [
    ("h800", 64, ("low_latency", "normal"), Fabric()),
    ("h800", 128, ("low_latency", "normal"), Fabric()),
    (
        "cpu-100gbe",
        64,
        ("low_latency", "normal"),
        Fabric(name="one adapter a node", shared_adapter=True),
    ),
    (
        "h800",
        64,
        ("low_latency", "normal"),
        Fabric(name="leaves of 2 nodes, 2:1", nodes_per_leaf=2, oversubscribed=2.0),
    ),
    (
        "h800",
        64,
        ("low_latency", "normal"),
        Fabric(name="leaves of 2 nodes, 4:1", nodes_per_leaf=2, oversubscribed=4.0),
    ),
    ("h800", 64, ("normal",), Fabric(name="passed on in 8 parts", parts=8)),
    ("h800", 64, ("normal",), Fabric(name="passed on at the end", parts=1)),
]
HEAD = (
    f"{'network':22}  {'cluster':10} ranks  {'mode':11}  {'load':6}  "
    f"closed form  busiest link  SimGrid  closed form is"
)


def main() -> None:
    if not is_there():
        sys.exit("SimGrid is not installed: apt-get install python3-simgrid")
    print(f"dispatch of deepseek-v3, 128 tokens a rank; us\n\n{HEAD}")
    for name, num_ranks, modes, fabric in CASES:
        for mode in modes:
            for exponent, load in ((0.0, "even"), (0.8, "skewed")):
                work = Work(num_tokens=128, mode=mode)
                found = compare(
                    CLUSTERS[name], MODELS["deepseek-v3"], num_ranks, work, exponent, fabric
                )
                closed = found.closed.seconds
                print(
                    f"{fabric.name:22}  {name:10} {num_ranks:5}  {mode:11}  {load:6}  "
                    f"{closed * 1e6:11.1f}  {found.busiest * 1e6:12.1f}  "
                    f"{found.simulated * 1e6:7.1f}  {closed / found.simulated - 1:+14.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
