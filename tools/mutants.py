"""Plant faults, one at a time, and see whether the gate's tests find them.

    python -m tools.mutants --out mutants.jsonl           # all of tools/faults, some minutes each
    python -m tools.mutants --only ring-tail-comes-before-records
    python -m tools.mutants --sample 10 --seed 3           # what a night runs
    python -m tools.mutants --tree ../before               # by the tests of another checkout

A fault is planted in a copy of the tree. The tests that can see its file (`tools.faults.stages`)
run from cheap to dear, until one fails. That test must fail twice with the fault and pass without
it, or it has found nothing. A test that never ends has found the fault too. A run with the same
--out goes on where the last one stopped. The status is 1 if a fault survives without a reason.

A stage has 10 minutes: on a machine that does much else, tests that never end are told from slow
ones by a run without the fault.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.faults import FAULTS
from tools.faults.copies import Copy
from tools.faults.fault import Fault, NoPlace
from tools.faults.stages import Stage, stages_of

ROOT = Path(__file__).parents[1]
SURVIVED, NO_PLACE = "survived", "has no place in this tree"


@dataclass
class Outcome:
    """What became of one fault. `result` is how it was caught, or why it was not."""

    name: str
    area: str
    path: str
    result: str
    test: str = ""
    stage: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return self.result == SURVIVED


def hunt(copy: Copy, fault: Fault, stages: Sequence[Stage]) -> Outcome:
    """Plant a fault, and run stages until one finds it."""
    begin = time.monotonic()
    outcome = Outcome(fault.name, fault.area, fault.path, SURVIVED)
    with tempfile.TemporaryDirectory(prefix="mutant-kernels-") as kernels:
        try:
            for stage in stages:
                if _finds(copy, fault, stage, Path(kernels), outcome):
                    break
        except NoPlace:
            outcome.result = NO_PLACE
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


def _finds(copy: Copy, fault: Fault, stage: Stage, kernels: Path, outcome: Outcome) -> bool:
    """Whether a stage finds the fault. The test that failed has a second try with the fault, as in
    .ci/run, and must fail again; and it must pass without the fault.
    """
    but: list[str] = []
    while True:
        with copy.planted(fault, kernels) as settings:
            seen = copy.run(stage, settings, but=but)
            tests = [seen.test] if seen.test else []
            again = not (tests and seen.result) or bool(copy.run(stage, settings, tests).result)
        if not seen.result:
            return False
        if again and not copy.run(stage, {}, tests).result:
            outcome.result, outcome.test, outcome.stage = seen.result, seen.test, str(stage)
            return True
        when = "without the fault too" if again else "at the first try only"
        outcome.notes.append(f"{seen.test or stage} {seen.result} {when}")
        if not tests:
            return False
        but += tests  # and the stage goes on without it


def chosen(only: Sequence[str], sample: int, seed: int) -> list[Fault]:
    unknown = set(only) - {one.name for one in FAULTS}
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    found = [one for one in FAULTS if not only or one.name in only]
    return random.Random(seed).sample(found, min(sample, len(found))) if sample else found


def read(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    areas: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        areas[one.area].append(one)
    lines = [f"{'area':<16}{'faults':>8}{'caught':>8}  survived"]
    for area, ones in {**areas, "all": outcomes}.items():
        left = [one.name for one in ones if one.survived]
        caught = sum(one.result not in (SURVIVED, NO_PLACE) for one in ones)
        names = ", ".join(left) if area != "all" else str(len(left))
        lines.append(f"{area:<16}{len(ones):>8}{caught:>8}  {names}".rstrip())
    return lines


def run_all(faults: Sequence[Fault], copies: Sequence[Copy], out: Path | None) -> list[Outcome]:
    """With as many faults at a time as there are copies."""
    idle: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        idle.put(copy)

    def one(fault: Fault) -> Outcome:
        copy = idle.get()
        try:
            found = hunt(copy, fault, stages_of(fault))
        finally:
            idle.put(copy)
        text = f"{found.name}: {found.result} {found.test}".rstrip()
        print(f"{text}, {found.seconds:g} s", *found.notes, sep="\n    ", flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        return found

    with ThreadPoolExecutor(len(copies)) as threads:
        return list(threads.map(one, faults))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="N faults, by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="copies side by side")
    parser.add_argument("--out", type=Path, help="a line of JSON for each fault")
    given = parser.parse_args(argv)
    faults = chosen(given.only, given.sample, given.seed)
    names = {one.name for one in faults}
    done = [one for one in read(given.out) if one.name in names]
    left = [one for one in faults if one.name not in {before.name for before in done}]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = 2 if given.jobs == 1 else 0
        places = [Path(folder, str(job)) for job in range(given.jobs if left else 0)]
        copies = [Copy(given.tree.resolve(), place, workers=workers) for place in places]
        for copy in copies:
            copy.check()
        outcomes = done + (run_all(left, copies, given.out) if left else [])
    print("\n".join(["", *table(outcomes)]))
    allowed = {one.name for one in FAULTS if one.reason}
    return int(any(one.survived and one.name not in allowed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
