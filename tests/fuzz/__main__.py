"""python -m tests.fuzz --programs 5000 --seed 0 --processes 2 3 4"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.programs import FEATURES, draw
from tests.fuzz.run import VirtualRanks, run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--virtual", action="store_true", help="ranks are threads: up to 8")
    parser.add_argument("--only", type=int, help="one program, by its seed, and what it does")
    parser.add_argument("--times", type=int, default=1, help="with --only: so often")
    parser.add_argument("--show", action="store_true", help="the program of --only, not run")
    parser.add_argument(
        "--without", default="", help=f"features to leave out, by commas: {', '.join(FEATURES)}"
    )
    parser.add_argument("--failures", type=int, default=10, help="after which to stop")
    asked = parser.parse_args()
    most = 8 if asked.virtual else 4
    if not all(2 <= size <= most for size in asked.processes):
        parser.error(f"--processes are {asked.processes}, want 2 to {most}")
    without = [name for name in asked.without.split(",") if name]
    if asked.only is None:
        seeds = range(asked.seed, asked.seed + asked.programs)
        return bool(run_all(seeds, asked.processes, without, asked.failures, asked.virtual))
    failed = 0
    for size in asked.processes:
        left_out = {*without, *(VirtualRanks.WITHOUT if asked.virtual else ())}
        print(draw(asked.only, size, left_out), flush=True)
        for _ in range(0 if asked.show else asked.times):
            failed += run_all(range(asked.only, asked.only + 1), [size], without, 1, asked.virtual)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
