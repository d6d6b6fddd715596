"""`python -m tokenyard`: what can be done from a shell.

python -m tokenyard warm-up --dtypes bfloat16 float32 --kinds direct low_latency
"""

from __future__ import annotations

import argparse
import time

import torch

from tokenyard.warming import KINDS, warm_up


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tokenyard")
    commands = parser.add_subparsers(dest="command", required=True)
    warm = commands.add_parser(
        "warm-up",
        help="compile kernels and keep them on disk, for images and CI",
        description="Compile the kernels of these calls, and keep them on disk. NUMBA_CACHE_DIR "
        "names another folder than the package's own.",
    )
    warm.add_argument("--dtypes", nargs="+", default=["bfloat16"], metavar="DTYPE")
    warm.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    args = parser.parse_args(given)
    try:
        dtypes = [getattr(torch, name) for name in args.dtypes]
    except AttributeError as error:
        parser.error(f"--dtypes: {error}")
    begin = time.monotonic()
    for number, kind in enumerate(args.kinds, 1):
        since = time.monotonic()
        try:
            warm_up(dtypes, [kind])
        except ValueError as error:
            parser.error(str(error))
        seconds = time.monotonic() - since
        print(f"{number} of {len(args.kinds)}: {kind}, {seconds:.1f} s", flush=True)
    print(f"kernels are ready, after {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
