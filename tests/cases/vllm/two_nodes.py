"""Two network namespaces as two nodes, with a data parallel rank of vLLM in each. By hand, as root:

    python tests/cases/vllm/two_nodes.py [TRANSPORT]

Prints how many of 64 greedy answers are those of one process. Both ranks share this machine, so
that the transport must be told not to share memory: collective if nothing else is said.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.cases.clock import scaled
from tests.cases.vllm import server as vllm_server
from tests.cases.vllm.models import save
from tests.cases.vllm.server import COMMON, Server

FLOAT32 = ("--dtype", "float32", "--max-model-len", "256")
ADDRESSES = ("10.78.0.1", "10.78.0.2")


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """The names of two namespaces that see each other through eth0, and nobody else."""
    names = [f"tokenyard-{os.getpid()}-vllm{node}" for node in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", names[1])
        ip("link", "add", "eth0", "netns", names[0], *ends)
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=scaled(20))


def command_line(folder: Path) -> list[str]:
    """vLLM's own, which looks for metadata under a name that the wheel for CPUs does not have, and
    for the word cpu in its version.
    """
    metadata = folder / "vllm-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def on_two_nodes(model: Path, folder: Path, transport: str, prompts: list[Any]) -> list[Any]:
    options = ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    options += ["--data-parallel-address", ADDRESSES[0], "--data-parallel-rpc-port", "13345"]
    options += ["--enable-expert-parallel", *COMMON, *FLOAT32]
    own = (
        ["--host", "127.0.0.1", "--port", "8000"],
        ["--headless", "--data-parallel-start-rank", "1"],
    )
    line, path = command_line(folder), os.environ.get("PYTHONPATH", "")
    with two_nodes() as names, ExitStack() as ended:
        processes = []
        for node, name in enumerate(names):
            one = vllm_server.start(
                ["ip", "netns", "exec", name, *line, str(model), *options, *own[node]],
                folder / f"node{node}.log",
                VLLM_HOST_IP=ADDRESSES[node],
                GLOO_SOCKET_IFNAME="eth0",
                VLLM_CPU_OMP_THREADS_BIND=str(node % len(os.sched_getaffinity(0))),
                TOKENYARD_VLLM_TRANSPORT=transport,
                PYTHONPATH=os.pathsep.join([path, str(folder)]),
            )
            ended.callback(vllm_server.end, one)
            processes.append(one)
        log = folder / "node0.log"
        inside = ["ip", "netns", "exec", names[0], sys.executable, __file__, "ask", str(log)]
        asked = subprocess.run(
            inside, input=json.dumps(prompts), stdout=subprocess.PIPE, text=True, check=True
        )
        print("\n".join(one for one in log.read_text().splitlines() if "travel through" in one))
    return json.loads(asked.stdout)


def ask(log: Path) -> None:
    """Inside the first node: prompts on stdin, answers on stdout."""
    nobody: Any = subprocess.Popen(["sleep", "600"])  # the server is somebody else's to watch
    try:
        server = Server(url="http://127.0.0.1:8000", log=log, process=nobody)
        vllm_server.wait_until_ready(server)
        answers = server.complete_all(json.load(sys.stdin), 32)
        print(json.dumps([answer["token_ids"] for answer in answers]))
    finally:
        nobody.kill()


def main(transport: str = "collective") -> None:
    chance = random.Random(0)
    lengths = [chance.randrange(4, 60) for _ in range(64)]
    prompts = [[chance.randrange(1, 500) for _ in range(length)] for length in lengths]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save("qwen3", folder / "model")
        two = on_two_nodes(model, folder, transport, prompts)
        with vllm_server.serve(model, folder / "one.log", *FLOAT32) as server:
            one = [answer["token_ids"] for answer in server.complete_all(prompts, 32)]
    same = sum(a == b for a, b in zip(one, two))
    print(f"{same} of {len(one)} answers of two nodes are those of one process")


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        ask(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
