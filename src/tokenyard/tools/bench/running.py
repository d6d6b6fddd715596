"""Run a benchmark: start its ranks, verify, measure, say who was slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from tokenyard.testing import Processes, assert_same
from tokenyard.tools.bench import memory
from tokenyard.tools.bench.case import Case, Way
from tokenyard.tools.bench.catalogue import BENCHMARKS, Benchmark
from tokenyard.tools.bench.report import Figure, Measured, Report, machine
from tokenyard.tools.bench.shape import Shape
from tokenyard.tools.bench.slow_rank import find_slow_rank
from tokenyard.tools.bench.timing import Alone, Together, measure

SLOWED = 0.01  # seconds that a rank which is slowed on purpose sleeps before each call

Say = Callable[[str], object]


class WrongResult(AssertionError):
    """A result differs from what it must be, so nothing was timed."""


def _nothing(text: str) -> None:
    """Say nothing."""


def run(
    name: str, shape: Shape | None = None, *, say: Say = _nothing, timeout: float = 300.0
) -> Report:
    """Measure one benchmark of `BENCHMARKS`. `say` is told of every part that has ended.

    Raises NoMemory before ranks are started that the machine could not hold.
    """
    bench = BENCHMARKS[name]
    shape = bench.shape if shape is None else shape
    shape.check()
    if not bench.is_local:
        memory.check(name, shape)
    where = machine()  # before: the load is what others make
    found = _here(bench, shape, say) if bench.is_local else _on_ranks(bench, shape, say, timeout)
    return Report(
        bench=name,
        parameters=shape.named(bench.takes),
        measured=[ranks[0]["measured"] for ranks in found],
        transport=found[0][0]["transport"],
        absent=found[0][0]["absent"],
        slow_rank=slowest(found),
        machine=where,
    )


# What verify_and_measure says on each rank, for each case.
Found = list[list[dict[str, Any]]]


def _here(bench: Benchmark, shape: Shape, say: Say) -> Found:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    try:
        for tokens in shape.tokens:
            with closing(bench.cases()(None, shape, tokens)) as cases:
                for case in cases:
                    found.append([verify_and_measure(case, Alone(), shape.rounds)])
                    _refuse_wrong(found[-1])
                    say(case.label)
    finally:
        torch.set_num_threads(threads)
    return found


def _on_ranks(bench: Benchmark, shape: Shape, say: Say, timeout: float) -> Found:
    """A job for each number of tokens; the ranks stay."""
    found: Found = []
    with Processes(shape.ranks, timeout=timeout) as ranks:
        for tokens in shape.tokens:
            for case in zip(*ranks.run(job, bench.name, shape, tokens)):
                found.append(list(case))
                _refuse_wrong(found[-1])
            say(f"{tokens} tokens on each of {shape.ranks} ranks")
    return found


def _refuse_wrong(ranks: list[dict[str, Any]]) -> None:
    wrong = [f"rank {rank}: {one['wrong']}" for rank, one in enumerate(ranks) if one["wrong"]]
    if wrong:
        raise WrongResult("; ".join(wrong))


def slowest(found: Found) -> dict[str, Any] | None:
    """The rank that others waited longest for, and the case; None if no rank was slow."""
    slow = []
    for ranks in found:
        waits = [one["waited_for"] for one in ranks]
        if None not in waits:
            rank = find_slow_rank(waits, max(one["seconds"] for one in ranks))
            if rank is not None:
                slow.append((rank, ranks[0]["measured"].label))
    if not slow:
        return None
    rank, label = max(slow, key=lambda one: one[0].share)
    told = {"rank": rank.rank, "waited": rank.waited, "share": rank.share, "case": label}
    return told | {"text": f"{rank} ({label})"}


def job(group: Any, name: str, shape: Shape, tokens: int) -> list[dict[str, Any]]:
    """On every rank: verify and measure the cases of a benchmark."""
    found = []
    with closing(BENCHMARKS[name].cases()(group, shape, tokens)) as cases:
        for case in cases:
            if group.rank() == shape.slow_rank:
                case = replace(case, ours={name: _slowed(way) for name, way in case.ours.items()})
            found.append(verify_and_measure(case, Together(group), shape.rounds))
    return found


def _slowed(way: Way) -> Way:
    def call() -> Any:
        time.sleep(SLOWED)
        return way.call()

    return Way(call, way.after)


def verify_and_measure(case: Case, peers: Alone, rounds: int) -> dict[str, Any]:
    """Nothing is timed on any rank before all results of all ranks are right."""
    wrong = _compare(case)
    if peers.most(float(wrong is not None)):
        return {"wrong": wrong}
    if case.stats is not None:
        case.stats(reset=True)
    timed = measure({**case.beside, **case.ours}, peers, rounds)
    told = None if case.stats is None else case.stats()
    figures = [Figure(way, way in case.ours, one) for way, one in timed.items()]
    return {
        "wrong": None,
        "measured": Measured(case.label, case.base, case.num_bytes, figures),
        "transport": None if told is None else told["transport"],
        "absent": case.absent,
        "waited_for": None if told is None else told["waited_for"],
        "seconds": sum(one["seconds"] for one in told["stages"].values()) if told else 0.0,
    }


def _compare(case: Case) -> str | None:
    try:
        for what, got, want in case.checks():
            assert_same(got, want, f"{case.label}: {what}")
    except AssertionError as error:
        return str(error)
    return None
