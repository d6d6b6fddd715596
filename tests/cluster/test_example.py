"""examples/multi_node.py, by torchrun on two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tokenyard.testing import Cluster, why_no_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster())),
]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "multi_node.py")


def test_multi_node() -> None:
    with Cluster([1, 1]) as box:  # its own ranks are idle
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        where = ["--nproc-per-node", "2", "--master-addr", box.address(0), "--master-port", "29400"]
        agents = [
            subprocess.Popen(
                box.command(node, *torchrun, *where, "--node-rank", str(node), EXAMPLE),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in range(2)
        ]
        try:
            said = [agent.communicate(timeout=scaled(250))[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    for node, text in enumerate(said):
        for rank in (2 * node, 2 * node + 1):
            assert f"rank {rank}: <tokenyard.Buffer rank {rank} of 4 on 2 nodes, hier" in text, text
            assert f"rank {rank}: there and back in" in text, text
