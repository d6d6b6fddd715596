"""python -m tests.nn.programs --programs 2000 --seed 0; with --processes 4 on real processes"""

from __future__ import annotations

import argparse
import sys

from tests.nn.programs.run import prepare, run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nn.programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--processes", type=int, default=0, help="so many, not virtual ranks")
    parser.add_argument("--only", type=int, help="one program, by its seed, and what it does")
    parser.add_argument("--failures", type=int, default=10, help="after which to stop")
    asked = parser.parse_args()
    if asked.only is None:
        seeds = range(asked.seed, asked.seed + asked.programs)
    else:
        seeds = range(asked.only, asked.only + 1)
        print(prepare(asked.only, asked.processes or None)[0], flush=True)
    return bool(run_all(seeds, asked.processes, asked.failures))


if __name__ == "__main__":
    sys.exit(main())
