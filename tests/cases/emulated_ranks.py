"""Ranks against `spec`, for a slow machine: a program that says after each case how long it took.

    python -m tests.cases.emulated_ranks 2 direct low-latency

The first case loads torch in every process and kernels from disk; what is compared is the same as
in the conformance tests, on the transports that are named, and a rank that is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import tokenyard
from tests.cases import low_latency
from tests.cases.clock import scaled
from tests.cases.conformance import BASE, case_of, check
from tests.cases.exchange import job
from tests.cases.peers import exchange
from tokenyard.testing import Exited, Processes

Named = tuple[str, Callable[[], None]]  # a case

TRANSPORTS = ("direct", "ring", "collective", "hierarchical")
KINDS = (*TRANSPORTS, "low-latency", "killed")

_CASES = (
    "plain",
    "float64",
    "float32",
    "float16-odd-hidden",
    "fp8",
    "long-rows",
    "no-tokens-on-some",
    "holes",
    "experts-not-divisible",
    "worst-tokens",
    "strided",
    "alignment",
)
# Rows of 16 KiB, more than 4 MiB of them: they are streamed.
_STREAMED = replace(BASE, hidden=8192, tokens=(160,), num_experts=16, num_topk=4)

_FP8, _PACKED = (True, False, False), (True, True, True)
_LOW_LATENCY: dict[str, dict[str, Any]] = {
    "plain": {},
    "hook": {"how": "hook"},
    "async": {"how": "async"},
    "zero-copy": {"zero_copy": True},
    "odd-hidden": {"hidden": 33},
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "fp8": {"hidden": 256, "fp8": _FP8},
    "fp8-packed": {"hidden": 1024, "fp8": _PACKED, "dtype": torch.float16},
    "streamed": {"hidden": 8192, "tokens": (160,), "num_max": 160, "rounds": 1},
}


def _exchanges(ranks: Processes, transport: str) -> Iterator[Named]:
    cases = {name: case_of(name, ranks.num_ranks) for name in _CASES}
    cases["streamed"] = replace(_STREAMED, num_ranks=ranks.num_ranks)
    for name, case in cases.items():
        nodes = ranks.num_ranks // 2 if transport == "hierarchical" else case.ranks_per_node
        given = replace(case, transport=transport, ranks_per_node=nodes)
        yield name, partial(_compare, check, ranks, job, given)


def _low_latency(ranks: Processes) -> Iterator[Named]:
    for name, options in _LOW_LATENCY.items():
        case = low_latency.Case(num_ranks=ranks.num_ranks, transport="direct", **options)
        yield name, partial(_compare, low_latency.check, ranks, low_latency.job, case)


def _compare(check: Callable[..., None], ranks: Processes, job: Any, case: Any) -> None:
    check(case, ranks.run(job, case))


def one_dies(group: Any) -> tuple[str, tuple[int, ...]]:
    """Killed between two calls: what the others are told."""
    buffer = tokenyard.Buffer(group, timeout=scaled(60), transport="direct")
    exchange(buffer)
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        exchange(buffer)
    except tokenyard.PeerError as error:
        return type(error).__name__, error.ranks
    return "nothing", ()


def _killed(ranks: Processes) -> Iterator[Named]:
    def check_told() -> None:
        answers = ranks.run(one_dies, may_die=True)
        assert answers.pop(1) == Exited(-signal.SIGKILL), answers
        assert answers == [("PeerDied", (1,))] * len(answers), answers

    yield "direct", check_told


def main(num_ranks: str, *kinds: str) -> None:
    with Processes(int(num_ranks), timeout=scaled(120)) as ranks:
        for kind in kinds:
            if kind in TRANSPORTS:
                cases = _exchanges(ranks, kind)
            else:
                cases = {"low-latency": _low_latency, "killed": _killed}[kind](ranks)
            for name, run in cases:
                start = time.monotonic()
                run()
                seconds = time.monotonic() - start
                print(f"{num_ranks} ranks, {kind}, {name}: equal, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
