"""examples/multi_node.py, by torchrun on two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tokenyard.testing import Cluster, why_no_cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster())),
]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "multi_node.py")


def listen(agent: subprocess.Popen[str], wanted: list[str]) -> str:
    """What an agent says until all that is wanted has come, or it ends. (Agents may linger.)"""
    text = ""
    assert agent.stdout is not None
    for line in agent.stdout:
        text += line
        if all(one in text for one in wanted):
            break
    return text


@pytest.mark.slow
def test_multi_node() -> None:
    with Cluster([1, 1]) as box:  # its own ranks are idle
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        where = ["--nproc-per-node", "2", "--master-addr", box.address(0), "--master-port", "29400"]
        agents = [
            subprocess.Popen(
                box.command(node, *torchrun, *where, "--node-rank", str(node), EXAMPLE),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in range(2)
        ]

        def end() -> None:
            for agent in agents:
                agent.kill()

        deadline = threading.Timer(scaled(200), end)
        deadline.start()
        try:
            for node, agent in enumerate(agents):
                ranks = (2 * node, 2 * node + 1)
                wanted = [f"rank {rank}: there and back in" for rank in ranks]
                opened = "of 4 on 2 nodes, hierarchical>"
                wanted += [f"rank {rank}: <tokenyard.Buffer rank {rank} {opened}" for rank in ranks]
                text = listen(agent, wanted)
                assert all(one in text for one in wanted), text
        finally:
            deadline.cancel()
            end()
            for agent in agents:
                agent.communicate()
