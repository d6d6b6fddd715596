"""What works without typer and rich: `warm-up`, which images run after a plain installation."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence

NEEDS = "tokenyard: this command needs typer and rich: pip install typer rich"


def main(words: Sequence[str]) -> None:
    if not words or words[0] != "warm-up":
        print(NEEDS, file=sys.stderr)
        raise SystemExit(2)
    parser = argparse.ArgumentParser(prog="tokenyard warm-up")
    parser.add_argument("--dtypes", default="bfloat16", help="separated by commas")
    parser.add_argument("--kinds", default="all", help="separated by commas")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(words[1:])
    taken = {}
    try:
        for number, total, kind, seconds in compile_each(args.dtypes, args.kinds):
            print(f"{number} of {total}: {kind}, {seconds:.1f} s", file=sys.stderr, flush=True)
            taken[kind] = seconds
    except ValueError as error:
        print(f"tokenyard warm-up: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    told = warmed(taken)
    print(json.dumps(told) if args.json else f"kernels are ready, after {told['seconds']} s")


def compile_each(dtypes: str, kinds: str) -> Iterator[tuple[int, int, str, float]]:
    """Compile kernels kind by kind: (number, how many, kind, seconds) after each.

    Raises ValueError for a dtype or a kind that there is not.
    """
    import torch

    from tokenyard.tools.warming import KINDS, warm_up

    chosen = list(KINDS) if kinds == "all" else kinds.split(",")
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise ValueError(f"kind is {unknown[0]!r}, want all or some of {','.join(KINDS)}")
    rows = []
    for name in dtypes.split(","):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is {name!r}, want some of bfloat16,float16,float32,float64")
        rows.append(dtype)
    for number, kind in enumerate(chosen, 1):
        since = time.monotonic()
        warm_up(rows, [kind])
        yield number, len(chosen), kind, time.monotonic() - since


def warmed(taken: dict[str, float]) -> dict[str, object]:
    """What `--json` prints of the seconds by kind."""
    kinds = {kind: round(seconds, 1) for kind, seconds in taken.items()}
    return {"seconds": round(sum(taken.values()), 1), "kinds": kinds}
