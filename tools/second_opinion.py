"""Compare the planner's closed form with SimGrid, where flows share links.

    apt-get install python3-simgrid
    python -m tools.second_opinion

Random tokens choose experts; both sides get the same rows between the same ranks. The closed form
takes the busiest rank's bytes; SimGrid lets all flows begin at once, and gives each its fair share
of the two links that it uses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tokenyard.planner.cost import Cluster, Model, Stage, Work, route_of, stages_of
from tokenyard.planner.presets import CLUSTERS, MODELS
from tokenyard.planner.simulate import CopyChooser, count_rows, drifting
from tokenyard.planner.traffic import relays
from tokenyard.replicas import Replicas
from tokenyard.topology import Topology

PYTHON = "/usr/bin/python3"  # whose package SimGrid is
FLOWS = Path(__file__).parent / "simgrid_flows.py"


def is_there() -> bool:
    """Is SimGrid installed?"""
    if not Path(PYTHON).exists():
        return False
    asked = [PYTHON, "-c", "import simgrid"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def flows_of(
    ranks_TK: np.ndarray, topology: Topology, route: str, by_pair: bool, row_bytes: int
) -> dict[str, list[tuple[int, int, int]]]:
    """(from, to, bytes) of every pair of ranks, in nodes and between them."""
    num_ranks = topology.num_ranks
    node = np.array(topology.node_of_rank)
    through = relays(topology)
    inside = np.zeros((num_ranks, num_ranks), np.int64)
    outside = np.zeros_like(inside)
    for token, goals in enumerate(ranks_TK):
        source = token * num_ranks // len(ranks_TK)
        for goal in goals if by_pair else np.unique(goals):
            if route == "two_level":
                inside[through[source, node[goal]], goal] += 1
            elif node[source] == node[goal]:
                inside[source, goal] += 1
            else:
                outside[source, goal] += 1
        if route == "two_level":
            for home in np.unique(node[goals]):
                if home != node[source]:
                    outside[source, through[source, home]] += 1
    return {
        name: [(int(i), int(j), int(rows[i, j]) * row_bytes) for i, j in np.argwhere(rows)]
        for name, rows in (("inside", inside), ("outside", outside))
    }


def simulated(cluster: Cluster, flows: dict[str, list[tuple[int, int, int]]]) -> float:
    """Seconds of a stage, by SimGrid."""
    rates = {"node_rate": cluster.node_rate, "network_rate": cluster.network_rate}
    done = subprocess.run(
        [PYTHON, str(FLOWS)],
        input=json.dumps({**rates, **flows}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    both = json.loads(done.stdout.splitlines()[-1])
    return cluster.overhead + max(both["inside"], both["outside"])


def compare(
    cluster: Cluster, model: Model, num_ranks: int, work: Work, exponent: float
) -> tuple[Stage, float]:
    """Dispatch, by the closed form and by SimGrid."""
    chosen = drifting(1, num_ranks * work.num_tokens, model, exponent)[0].astype(np.int64)
    ranks = CopyChooser(Replicas.even(model.num_experts, num_ranks)).ranks(chosen)
    topology = Topology.even(num_ranks, cluster.ranks_per_node)
    route = route_of(cluster, num_ranks, work.mode)
    by_pair = work.mode == "low_latency" and cluster.by_pair
    rows = count_rows(ranks, topology, route, by_pair)
    stages = stages_of(cluster, model, work, rows, num_ranks)
    stage = next(one for one in stages if one.name == "dispatch")
    flows = flows_of(ranks, topology, route, by_pair, work.row_bytes(model)[0])
    return stage, simulated(cluster, flows)


def main() -> None:
    if not is_there():
        sys.exit("SimGrid is not installed: apt-get install python3-simgrid")
    cluster, model = CLUSTERS["h800"], MODELS["deepseek-v3"]
    print("dispatch of deepseek-v3 on h800, 128 tokens a rank; us")
    for num_ranks in (64, 128):
        # 16,384 flows of different sizes, as low latency has them at 128 ranks, take too long.
        for mode in ("low_latency", "normal") if num_ranks <= 64 else ("normal",):
            for exponent, load in ((0.0, "even"), (0.8, "skewed")):
                begin = time.perf_counter()
                work = Work(num_tokens=128, mode=mode)
                stage, second = compare(cluster, model, num_ranks, work, exponent)
                print(
                    f"{num_ranks:4} ranks, {mode:11} {load:6}: closed form "
                    f"{stage.seconds * 1e6:7.1f} ({stage.bound_by}), SimGrid {second * 1e6:7.1f}, "
                    f"{stage.seconds / second - 1:+6.1%}   [{time.perf_counter() - begin:.1f} s]"
                )


if __name__ == "__main__":
    main()
