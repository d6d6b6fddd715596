"""Troubles by chance: what goes wrong in a step, on which rank, and what may go wrong at all."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import replace

from tests.cases.clock import scaled
from tests.fuzz import faults
from tests.fuzz.steps import (
    Cached,
    Combine,
    CombineByExpert,
    Dispatch,
    DispatchByExpert,
    ElasticCombine,
    ElasticDispatch,
    Gather,
    GatherBack,
    HybridCombine,
    HybridDispatch,
    LowCombine,
    LowDispatch,
    Move,
    Open,
    PreparedCombine,
    PreparedDispatch,
    Through,
    Trouble,
)

TROUBLES = {  # how often, of a hundred calls
    "bad": 4.0,
    "mismatch": 1.5,
    "order": 0.5,
    "event": 0.6,
    "thread": 1.5,
    "stall": 10.0,
    "stop": 0.5,
    "errno": 3.0,
    "memory": 6.0,
    "raise": 1.0,
    "leave": 0.8,
    "late": 1.0,
    "kill": 0.3,
}
BAD_INPUT = {
    Open: ("timeout", "kernels", "placement", "transport"),
    Dispatch: ("none", "dtype", "shape", "topk", "expert", "worst"),
    Cached: ("none", "dtype", "shape", "tokens", "handle"),
    Combine: ("none", "dtype", "shape", "tokens", "handle"),
    DispatchByExpert: ("none", "dtype", "shape", "topk", "expert"),
    CombineByExpert: ("none", "dtype", "shape", "tokens", "handle"),
    LowDispatch: ("none", "dtype", "shape", "topk", "expert"),
    LowCombine: ("none", "dtype", "shape", "handle"),
    PreparedDispatch: ("none", "dtype", "shape", "topk", "expert", "tokens", ""),
    PreparedCombine: ("none", "dtype", "shape", "tokens"),
    Through: ("expert", "topk"),
    Gather: ("none", "handle"),
    GatherBack: ("none", "dtype", "shape", "tokens", "handle"),
    ElasticDispatch: ("none", "dtype", "shape", "topk", "expert"),
    ElasticCombine: ("none", "dtype", "shape", "tokens", "handle"),
    HybridDispatch: ("none", "dtype", "shape"),
    HybridCombine: ("none", "dtype", "shape", "tokens", "handle"),
    Move: ("placement",),
}
# Calls whose misfit is bad input of one rank, or none at all.
MISFITS = (
    LowCombine,
    PreparedDispatch,
    PreparedCombine,
    Through,
    Gather,
    GatherBack,
    ElasticDispatch,
    ElasticCombine,
    HybridDispatch,
    HybridCombine,
)
LATE_TIMEOUT, LATE_STALL = scaled(3.0), scaled(7.0)  # seconds


class TroubleDrawer:
    rng: random.Random
    was_killed: bool
    may: Callable[[str], bool]

    def trouble_kind(self, possible: list[str]) -> str | None:
        """At most one kill a program: it costs a start of all processes."""
        for kind in possible:
            if kind == "kill" and self.was_killed:
                continue
            if self.may(kind) and self.rng.random() < TROUBLES[kind] / 100:
                return kind
        return None

    def trouble(self, kind: str, opened: Open, step: type) -> Trouble:
        rng = self.rng
        trouble = Trouble(kind=kind, rank=rng.randrange(len(opened.members)))
        if kind == "bad":
            return replace(trouble, what=rng.choice(BAD_INPUT[step]))
        if kind == "errno":
            what, number = (
                rng.choice(faults.SYSTEM_CALLS),
                rng.choice([errno.EMFILE, errno.ENOMEM]),
            )
            return replace(trouble, what=what, nth=rng.choice([0, 0, 0, 1, 2]), number=number)
        if kind == "memory":
            return replace(trouble, nth=rng.choice([0, 0, 1, 2, 3]))
        if kind in ("stall", "stop", "late", "raise", "kill"):
            points = faults.points_of(opened.transport, step in (LowDispatch, LowCombine))
            naps = {"stall": rng.choice([0.002, 0.02, 0.1]), "stop": 0.3, "late": LATE_STALL}
            seconds = naps.get(kind, 0)
            what, nth = rng.choice(points), rng.choice([0, 0, 0, 1, 2])
            return replace(trouble, what=what, nth=nth, number=seconds)
        return trouble
