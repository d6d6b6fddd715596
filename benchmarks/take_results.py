"""Run all of `tokenyard bench` and keep the reports by processor and commit.

    python benchmarks/take_results.py
    python benchmarks/take_results.py dispatch combine --note "two sockets, ranks bound"

Writes benchmarks/results/<processor>-<commit>.json. `python -m tools.results --write` then makes
docs/performance.md of what is there.
"""

from __future__ import annotations

import argparse
import json
import re
from functools import partial
from pathlib import Path

from tokenyard.tools.bench.catalogue import BENCHMARKS
from tokenyard.tools.bench.report import commit, processor
from tokenyard.tools.bench.running import run

RESULTS = Path(__file__).parent / "results"


def file_name(processor: str, commit: str | None) -> str:
    """
    >>> file_name("Intel(R) Xeon(R) Processor @ 2.50GHz", "218f947aaa")
    'intel-xeon-processor-2.50ghz-218f947aaa.json'
    """
    plain = re.sub(r"\((R|TM|r|tm)\)", "", processor).lower()
    words = re.findall(r"[a-z0-9.]+", plain)
    return f"{'-'.join(words)}-{commit or 'installed'}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of benchmarks; all by default")
    parser.add_argument("--note", default="", help="what a reader should know of the machine")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"{unknown[0]} is no benchmark, want some of {', '.join(BENCHMARKS)}")
    reports = []
    for name in args.names or BENCHMARKS:
        reports.append(run(name, say=partial(print, f"{name}:", flush=True)))
    path = RESULTS / file_name(processor(), commit())
    plain = {"note": args.note, "reports": [report.as_dict() for report in reports]}
    path.write_text(json.dumps(plain, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
