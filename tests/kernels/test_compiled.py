"""Processes that start together compile a kernel once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from tokenyard.kernels import numba as kernels
from tokenyard.kernels.numba.rows import _pack_kernel, copy_row
print("ready", flush=True)
sys.stdin.readline()
x = torch.arange(12, dtype=torch.uint8).view(3, 4)
assert torch.equal(kernels.pack(x, None, torch.zeros_like(x)), x)
print(sum(_pack_kernel.stats.cache_misses.values()), sum(_pack_kernel.stats.cache_hits.values()))
"""


def test_one_process_compiles_and_the_others_load(tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for one in processes:  # all have imported what takes long
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    said = [one.communicate("go\n", timeout=100)[0].split() for one in processes]
    assert sorted(said) == [["0", "1"], ["0", "1"], ["1", "0"]]
