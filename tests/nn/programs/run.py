"""Runs programs, one after the other, and says where the layer differs from the oracle."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.cases.clock import scaled
from tests.nn.programs.draw import MOST_PROCESSES, draw
from tests.nn.programs.interpret import on_process, on_virtual_rank
from tests.nn.programs.oracle import NearTie, Record, expect
from tests.nn.programs.program import BY_HAND, Program
from tokenyard.testing import Processes, RankFailed, poisoned, run_virtual

_ATTEMPTS = 50
_SHOWN = 8  # problems of a program
# Of the largest number of a tensor, or of _LEAST: small ones may be what is left of larger ones.
# Weights and their gradients travel in float32, in float64 as well.
TOLERANCES = {"float64": 1e-6, "float32": 1e-5, "bfloat16": 0.05}
_LEAST = {"float64": 0.2, "float32": 0.2, "bfloat16": 1.0}
_TIMES = (1, 5)  # so much more where optimisers divide by small numbers


@dataclass(frozen=True, kw_only=True)
class Failure:
    program: Program
    num_processes: int  # 0 for virtual ranks
    problems: list[str]

    def __str__(self) -> str:
        where = f" --processes {self.num_processes}" if self.num_processes else ""
        shown = self.problems[:_SHOWN]
        if len(self.problems) > _SHOWN:
            shown.append(f"... and {len(self.problems) - _SHOWN} more, which may follow from these")
        again = f"again: python -m tests.nn.programs --only {self.program.seed}{where}"
        return "\n".join([str(self.program), *shown, again])


def prepare(seed: int, num_ranks: int | None = None) -> tuple[Program, list[Record]]:
    """The program of a seed in which no choice depends on rounding, and what it must give."""
    for attempt in range(_ATTEMPTS):
        program = draw(seed, num_ranks, attempt)
        try:
            return program, expect(program)
        except NearTie:
            continue
    raise AssertionError(f"seed {seed}: {_ATTEMPTS} programs have choices that are nearly tied")


def compare(program: Program, got: list[Record], want: list[Record]) -> list[str]:
    """What is wrong, in the order in which it came about."""
    problems = []
    for rank, (mine, due) in enumerate(zip(got, want)):
        for name in due.keys() - mine.keys():
            problems.append(f"rank {rank}: {name} is missing")
        for name in mine.keys() - due.keys():
            problems.append(f"rank {rank}: {name} is there, want none")
        for name in due:
            if name in mine:
                says = _differs(program, name, mine[name], due[name])
                if says:
                    problems.append(f"rank {rank}: {name} {says}")
    return problems


def _differs(program: Program, name: str, got: Tensor, want: Tensor) -> str | None:
    if got.shape != want.shape:
        return f"has shape {list(got.shape)}, want {list(want.shape)}"
    if name.endswith(("out", "grad", "end")) and got.dtype != getattr(torch, program.dtype):
        return f"has dtype {got.dtype}, want {program.dtype}"
    got, want = got.double(), want.double()
    if not want.numel():
        return None
    if name.endswith("load"):
        # Activation checkpointing calls the layer again, and may count again.
        times = (1, 2) if program.checkpoint != "none" else (1,)
        if any(torch.equal(got, want * number) for number in times):
            return None
        return f"is {got.tolist()}, want {want.tolist()}"
    if name.endswith("scale") or torch.equal(got, want):  # as infinite norms are
        return None if torch.equal(got, want) else f"is {float(got):g}, want {float(want):g}"
    part = TOLERANCES[program.dtype] * _TIMES[program.optimiser != BY_HAND]
    bound = part * max(_LEAST[program.dtype], float(want.abs().max()))
    error = (got - want).abs()
    if bool((error <= bound).all()):  # not so where it is NaN
        return None
    first = tuple((~(error <= bound)).nonzero()[0].tolist())
    return (
        f"differs by {float(error.max()):.3g}, at most {bound:.3g} allowed; "
        f"{list(first)} is {float(got[first]):.9g}, want {float(want[first]):.9g}"
    )


class Ranks:
    """Virtual ranks, and processes for programs that need them, or for all. They are kept, and
    started anew after a program that they did not end.
    """

    def __init__(self, num_processes: int = 0) -> None:
        self.num_processes = num_processes
        self._processes: Processes | None = None

    def problems(self, program: Program, want: list[Record]) -> list[str]:
        if not self.num_processes and not program.on_processes:
            try:
                with poisoned():
                    got = run_virtual(on_virtual_rank, program.num_ranks, program).results
            except Exception:
                return [traceback.format_exc()]
            return compare(program, got, want)
        if self._processes is None:
            number = self.num_processes or MOST_PROCESSES
            self._processes = Processes(number, timeout=scaled(60))
        with tempfile.TemporaryDirectory() as folder:
            try:
                got = self._processes.run(on_process, program, folder)
            except (TimeoutError, RankFailed) as error:
                self.close()
                told = [one.read_text() for one in sorted(Path(folder).glob("rank-*"))]
                return [*told, str(error)] if isinstance(error, TimeoutError) else [str(error)]
        return compare(program, got, want)

    def close(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.close()


def run(
    seeds: Iterable[int], num_processes: int = 0
) -> Iterator[tuple[Program, float, Failure | None]]:
    """Each program, the seconds it took, and what was wrong."""
    ranks = Ranks(num_processes)
    try:
        for place, seed in enumerate(seeds):
            begin = time.monotonic()
            if place % 8 == 0:
                gc.collect()  # a closed Buffer's memory goes with its last cycle of references
            program, want = prepare(seed, num_processes or None)
            problems = ranks.problems(program, want)
            failure = None
            if problems:
                failure = Failure(program=program, num_processes=num_processes, problems=problems)
            yield program, time.monotonic() - begin, failure
    finally:
        ranks.close()


def run_all(seeds: range, num_processes: int, most_failures: int) -> int:
    """With progress on stderr; the number of programs that failed."""
    failed, done, features = 0, 0, Counter[str]()
    begin = shown = time.monotonic()
    for program, seconds, failure in run(seeds, num_processes):
        done += 1
        features.update(set(program.features()))
        if failure is not None:
            failed += 1
            print(f"\nFAILED after {seconds:.1f} s\n{failure}\n", flush=True)
            if failed >= most_failures:
                break
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            progress = f"{done} of {len(seeds)} programs, {failed} failed, {shown - begin:.0f} s"
            print(progress, file=sys.stderr, flush=True)
    took = time.monotonic() - begin
    print(f"{done} programs in {took:.0f} s, {failed} failed; {dict(sorted(features.items()))}")
    return failed
