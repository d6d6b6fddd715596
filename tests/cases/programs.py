"""Programs in processes of their own: Python's, and ranks as a launcher starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.cases.clock import scaled


def run_python(
    *arguments: str, limit: float = 250, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, and what it printed and said."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=scaled(limit),
        check=False,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launched(num_ranks: int) -> list[dict[str, str]]:
    """What a launcher sets for each rank, on this machine."""
    together = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [together | {"RANK": str(rank)} for rank in range(num_ranks)]
