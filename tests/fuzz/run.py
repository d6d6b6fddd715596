"""Runs programs on processes, one after the other, and says what is wrong with any of them."""

from __future__ import annotations

import gc
import io
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import torch

from tests.cases.clock import scaled
from tests.fuzz.expected import expect
from tests.fuzz.interpret import interpret, interpret_virtual
from tests.fuzz.leaks import Holdings
from tests.fuzz.oracle import judge
from tests.fuzz.programs import draw
from tests.fuzz.ready import get_ready
from tests.fuzz.steps import Call, Program
from tokenyard.testing import Processes, RankFailed, run_virtual

TIMEOUT = scaled(120)  # seconds for a program
_SHOWN = 8  # problems of a program


@dataclass(frozen=True, kw_only=True)
class Failure:
    program: Program
    problems: list[str]

    def __str__(self) -> str:
        program = self.program
        without = f" --without {','.join(program.without)}" if program.without else ""
        again = (
            f"python -m tests.fuzz --only {program.seed} --processes {program.num_ranks}{without}"
        )
        shown = self.problems[:_SHOWN]
        if len(self.problems) > _SHOWN:
            shown.append(f"... and {len(self.problems) - _SHOWN} more, which may follow from these")
        return "\n".join([str(program), *shown, f"again: {again}"])


class Ranks:
    """Processes that run programs, started anew after one that they did not survive."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: Processes | None = None

    def problems(self, program: Program, expected: bytes) -> list[str]:
        if self._processes is None:
            self._processes = Processes(self.num_ranks, timeout=TIMEOUT)
            self._processes.run(get_ready, timeout=scaled(900))  # compiles, the first time
        try:
            with tempfile.TemporaryDirectory() as folder:
                reports = self._processes.run(interpret, program, expected, folder, may_die=True)
            problems = judge(program, reports)
        except (TimeoutError, RankFailed) as error:
            problems = [str(error)]
        if problems or program.victim is not None:
            self.close()
        return problems

    def close(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            with suppress(OSError):
                processes.close()


class VirtualRanks:
    """Threads of this process, which cannot go wrong one by one."""

    WITHOUT = (
        "groups",
        "around",
        "trace",
        "record",
        "counts",
        "threads",
        "collectives",
        "overlap",
        *("thread", "stall", "stop", "errno", "memory", "raise", "late", "kill"),
    )

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._is_first = True  # which starts threads that stay

    def problems(self, program: Program, expected: bytes) -> list[str]:
        before, is_first = Holdings.now(), self._is_first
        self._is_first = False
        try:
            reports = run_virtual(
                interpret_virtual, self.num_ranks, program, expected, timeout=TIMEOUT
            ).results
        except Exception as error:
            return ["".join(traceback.format_exception(error))]
        if is_first:
            gc.collect()
            gc.freeze()  # later collections need not look at torch and numba
            return judge(program, reports)
        return judge(program, reports) + before.grown()

    def close(self) -> None:
        pass


def run(
    seeds: Iterable[int], num_ranks: int, without: Collection[str] = (), virtual: bool = False
) -> Iterator[tuple[Program, float, Failure | None]]:
    """Each program, the seconds it took, and what was wrong. What the next one should give is
    worked out meanwhile.
    """
    ranks = VirtualRanks(num_ranks) if virtual else Ranks(num_ranks)
    if virtual:
        without = {*without, *VirtualRanks.WITHOUT}

    def prepare(seed: int) -> tuple[Program, bytes]:
        program, file = draw(seed, num_ranks, without), io.BytesIO()
        torch.save(expect(program), file)  # plain pickle does not know all dtypes
        return program, file.getvalue()

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as ahead:
        waiting = [ahead.submit(prepare, seed) for seed in seeds]
        try:
            for future in waiting:
                program, expected = future.result()
                begin = time.monotonic()
                problems = ranks.problems(program, expected)
                failure = Failure(program=program, problems=problems) if problems else None
                yield program, time.monotonic() - begin, failure
        finally:
            ranks.close()
            for future in waiting:
                future.cancel()


def run_all(
    seeds: range,
    sizes: Collection[int],
    without: Collection[str],
    most_failures: int,
    virtual: bool = False,
) -> int:
    """With progress on stderr; the number of programs that failed."""
    failed, done, kinds = 0, 0, Counter[str]()
    begin = shown = time.monotonic()
    for place, size in enumerate(sizes):
        for program, seconds, failure in run(seeds[place :: len(sizes)], size, without, virtual):
            done += 1
            kinds.update(type(step).__name__ for step in program.steps)
            kinds.update(
                f"!{one.trouble.kind}" for one in program.steps if getattr(one, "trouble", None)
            )
            if failure is not None:
                failed += 1
                print(f"\nFAILED after {seconds:.1f} s\n{failure}\n", flush=True)
                if failed >= most_failures:
                    return failed
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(
                    f"{done} of {len(seeds)} programs, {failed} failed, {shown - begin:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    took = time.monotonic() - begin
    calls = sum(kinds[one.__name__] for one in get_args(Call))
    what = f"{done} programs of {calls} calls in {took:.0f} s, {failed} failed"
    print(f"{what}; {dict(sorted(kinds.items()))}")
    return failed
