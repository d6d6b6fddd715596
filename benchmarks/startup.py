"""How long ranks take from nothing to their first results, with kernels compiled and without.

    python benchmarks/startup.py --ranks 8

Each rank is a new Python process. Times count from the moment at which all of them are started; a
rank is ready when it has dispatched and combined its first tokens. "Cold" runs with an empty cache
of compiled kernels, as after installation; "warm" with the cache that it left.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

RANK = """
import time, os, sys
import torch, torch.distributed as dist
loaded = time.time()
dist.init_process_group("gloo")
import tokenyard
joined = time.time()
x, (weights, idx) = torch.randn(4, 64), torch.rand(4, 64).topk(8)
with tokenyard.Buffer(dist.group.WORLD) as buffer:
    got = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=64)
    buffer.combine(got.recv_x, got.handle)
    ready = time.time()
print(loaded, joined, ready)
dist.destroy_process_group()
"""


def start(num_ranks: int, cache: str, port: int) -> list[list[float]]:
    """Seconds until each rank had loaded torch, had joined the group, and was ready."""
    begin = time.time()
    ranks = []
    for rank in range(num_ranks):
        where = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NUMBA_CACHE_DIR": cache,
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK], env=os.environ | where, stdout=subprocess.PIPE
            )
        )
    answers = [rank.communicate(timeout=600)[0].split() for rank in ranks]
    return [[float(moment) - begin for moment in answer] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    print("| slowest rank, seconds | torch loaded | group joined | ready | of which tokenyard |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as cache:
        for turn, name in enumerate(["cold", "warm", "warm again"]):
            times = start(args.ranks, cache, 29700 + turn)
            loaded, joined, ready = (max(column) for column in zip(*times))
            print(
                f"| {name} | {loaded:.1f} | {joined:.1f} | {ready:.1f} | {ready - joined:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
