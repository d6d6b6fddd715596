"""What ranks see of a case of bad input, and what they must see: errors on all, and a Buffer that
goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.cases.bad_input import (
    CASES,
    CULPRIT,
    NUM_EXPERTS,
    NUM_RANKS,
    WORLD,
    Case,
    Scene,
    Step,
    good_input,
    new_buffer,
)
from tests.cases.clock import scaled
from tokenyard import Buffer, PeerInputError, spec
from tokenyard.testing import assert_same, fake_experts

LIMIT = scaled(10)  # seconds: no wait for a time limit, which is 60


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case. Errors cross processes in parts."""

    kind: type[Exception] | None
    text: str
    blamed: int | None  # the rank that a PeerInputError names
    seconds: float
    afterwards: list[Any]  # a round trip on the same Buffer, and one on a new Buffer


def job(group: Any, name: str) -> Outcome:
    case = CASES[name]
    scene = Scene(group, **case.options)
    case.before(scene)
    return attempt(scene, case.wrong if scene.rank == CULPRIT else case.right)


def attempt(scene: Scene, step: Step) -> Outcome:
    begin = time.monotonic()
    error = caught(step, scene)
    seconds = time.monotonic() - begin
    afterwards = [round_trip(scene.buffer), round_trip(new_buffer(scene.group))]
    scene.buffer.close()
    kind = None if error is None else type(error)
    return Outcome(kind, str(error), getattr(error, "rank", None), seconds, afterwards)


def caught(step: Step, scene: Scene) -> Exception | None:
    try:
        step(scene)
    except Exception as error:
        return error
    return None


def round_trip(buffer: Buffer) -> list[Any]:
    got: Any = buffer.dispatch(**good_input(buffer.rank), num_experts=NUM_EXPERTS)
    experts = WORLD.experts_of(buffer.rank)
    y = fake_experts(got.recv_x, got.recv_topk_idx, got.recv_topk_weights, experts)
    return [*got[:4], buffer.combine(y, got.handle).x]


@cache
def expected() -> list[list[Any]]:
    """What `spec` says that round_trip returns on each rank."""
    xs, topk_idxs, weights = zip(*(good_input(rank).values() for rank in range(NUM_RANKS)))
    layouts = [spec.layout(topk_idx, WORLD) for topk_idx in topk_idxs]
    received = spec.dispatch(xs, layouts, WORLD, topk_idxs=topk_idxs, topk_weights=weights)
    rows = [(got.x, got.topk_idx, got.topk_weights) for got in received]
    ys = [fake_experts(*row, WORLD.experts_of(rank)) for rank, row in enumerate(rows)]
    sums = spec.combine(ys, layouts, WORLD)
    return [
        [*row, got.num_tokens_per_expert, total] for row, got, total in zip(rows, received, sums)
    ]


def check_works_on(outcomes: list[Outcome]) -> None:
    for rank, (outcome, want) in enumerate(zip(outcomes, expected(), strict=True)):
        assert outcome.seconds < LIMIT, f"rank {rank} took {outcome.seconds:.1f} s"
        assert_same(outcome.afterwards, [want, want], f"rank {rank}: afterwards")


def check_told(case: Case, rank: int, outcome: Outcome) -> None:
    told = None if outcome.kind is None else (outcome.kind, outcome.text)
    assert told == case.told(rank), f"on rank {rank}"
    if outcome.kind is PeerInputError:
        assert outcome.blamed == CULPRIT
