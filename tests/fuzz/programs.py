"""Programs by chance: draw(seed, num_ranks) gives the same steps wherever it is called."""

from __future__ import annotations

import errno
import random
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from typing import Any

from tests.cases.clock import scaled
from tests.cases.surroundings import AROUND
from tests.fuzz import faults, wholes
from tests.fuzz.drawn_calls import CallDrawer, DrawnBuffer, Given
from tests.fuzz.steps import (
    BREAKING,
    Cached,
    Call,
    Close,
    Collective,
    Combine,
    CombineByExpert,
    Dispatch,
    DispatchByExpert,
    Drop,
    EndCollective,
    Finish,
    LowCombine,
    LowDispatch,
    Move,
    Open,
    Program,
    Step,
    Trouble,
    Whole,
)

# What may be left out of programs, by name. Troubles have the names of their kinds.
TROUBLES = {  # how often, of a hundred calls
    "bad": 4.0,
    "mismatch": 1.5,
    "order": 0.5,
    "event": 0.6,
    "thread": 1.5,
    "stall": 10.0,
    "stop": 0.5,
    "errno": 3.0,
    "raise": 1.0,
    "leave": 0.8,
    "late": 1.0,
    "kill": 0.3,
}
FEATURES = (
    "groups",  # Buffers on some of the processes, which overlap
    "several",  # more than one Buffer at a time
    "low-latency",
    "by-expert",
    "async",
    "drops",  # results that are dropped while they are on their way
    "chains",  # previous_event
    "peek",  # handles that are read while their rows are on their way
    "around",  # default devices and dtypes, inference_mode
    "doubled",  # tokens that name an expert twice
    "moves",  # of experts
    "wholes",  # other Buffers, and experts with copies
    "trace",
    "record",
    "counts",  # of threads, another on each rank
    "bare",  # zero_copy on a rank that has no experts
    "threads",  # calls on other threads, one after the other
    "collectives",  # of the user's, between calls
    "overlap",  # ... which go on during calls
    "unclosed",  # Buffers that are dropped without close()
    "idle",  # Buffers that are closed without a call
    *TROUBLES,
)
TRANSPORTS = ("direct", "ring", "collective", "hierarchical")
COLLECTIVES = ("all_reduce", "all_to_all", "broadcast", "barrier")
BAD_INPUT = {
    Open: ("timeout", "kernels", "placement", "transport"),
    Dispatch: ("none", "dtype", "shape", "topk", "expert", "worst"),
    Cached: ("none", "dtype", "shape", "tokens", "handle"),
    Combine: ("none", "dtype", "shape", "tokens", "handle"),
    DispatchByExpert: ("none", "dtype", "shape", "topk", "expert"),
    CombineByExpert: ("none", "dtype", "shape", "tokens", "handle"),
    LowDispatch: ("none", "dtype", "shape", "topk", "expert"),
    LowCombine: ("none", "dtype", "shape", "handle"),
}
HANDLES = (Dispatch, DispatchByExpert, LowDispatch)  # steps that give one
LATE_TIMEOUT, LATE_STALL = scaled(3.0), scaled(7.0)  # seconds


def draw(seed: int, num_ranks: int, without: Collection[str] = ()) -> Program:
    unknown = set(without) - set(FEATURES)
    assert not unknown, f"unknown features: {unknown}, want some of {', '.join(FEATURES)}"
    rng = random.Random(f"{seed} on {num_ranks}")
    drawer = _Drawer(rng, num_ranks, without)
    steps = drawer.draw()
    most = 3 if drawer.may("counts") else 1
    return Program(
        seed=seed,
        num_ranks=num_ranks,
        without=tuple(sorted(without)),
        steps=tuple(steps),
        threads=tuple(rng.randint(1, most) for _ in range(num_ranks)),
        watched=tuple(
            one for one in ("trace", "record") if drawer.may(one) and rng.random() < 0.15
        ),
    )


class _Drawer(CallDrawer):
    def __init__(self, rng: random.Random, num_ranks: int, without: Collection[str]) -> None:
        super().__init__(rng, without)
        self.buffers: dict[int, DrawnBuffer] = {}
        self.collectives: list[int] = []
        self.num_opened = 0
        self.was_killed = False
        self.most_open = self.may("several") * rng.randint(0, 3) + 1
        self.groups = [
            group
            for size in range(2, num_ranks + 1)
            for group in combinations(range(num_ranks), size)
            if size == num_ranks or self.may("groups")
        ]

    def draw(self) -> list[Step]:
        rng, num_steps = self.rng, self.rng.randint(10, 60)
        while len(self.steps) < num_steps and self.groups:
            flying = [one for one in self.given if not one.over]
            kept = [one for one in self.given if one.rows or one.handle]
            acts = {
                self.act_open: 3.0 * (len(self.buffers) < self.most_open),
                self.act_call: 12.0 * bool(self.buffers),
                self.act_finish: 4.0 * bool(flying),
                self.act_drop: 3.0 * bool(kept),
                self.act_collective: 2.0 * self.may("collectives"),
                self.act_end_collective: 2.0 * bool(self.collectives),
                self.act_close: 1.0 * bool(self.buffers),
                self.act_move: 0.7 * bool(self.buffers) * self.may("moves"),
                self.act_whole: 0.5 * self.may("wholes"),
            }
            (act,) = rng.choices(list(acts), list(acts.values()))
            act()
        while self.collectives:
            self.act_end_collective()
        for one in list(self.given):
            if not one.over and rng.random() < 0.8:
                self.finish(one)
        for buffer in list(self.buffers):
            self._close(buffer)
        return self.steps

    def act_open(self) -> None:
        rng, number = self.rng, self.num_opened
        self.num_opened += 1
        members = rng.choice(self.groups)
        size, num_experts = len(members), rng.choice([2, 5, 8, 8, 16])
        placement = tuple(rng.randrange(size) for _ in range(num_experts))
        step = Open(
            buffer=number,
            members=members,
            transport=rng.choice(TRANSPORTS),
            nodes=rng.choice([None, None, *_splits(size)]),
            low_latency=self.may("low-latency") and rng.random() < 0.5,
            num_experts=num_experts,
            placement=placement if rng.random() < 0.3 else None,
        )
        if step.transport == "hierarchical" and step.nodes is None:
            step = replace(step, nodes=rng.choice(_splits(size)))
        kind = self._trouble_kind(["bad", "stall", "errno", "late"])
        idle = self.may("idle") and rng.random() < 0.15
        if idle and kind is None and self.may("stall") and rng.random() < 0.5:
            kind = "stall"  # somebody opens it later than others close it
        if kind == "late":  # befalls a later call
            step = replace(step, timeout=LATE_TIMEOUT)
        elif kind:
            step = replace(step, trouble=self._trouble(kind, step, Open))
        at = self._add(step)
        self.buffers[number] = DrawnBuffer(step)
        if kind == "bad":
            del self.buffers[number]
        elif kind == "errno":
            self._last_look(number, at)
        elif idle:
            self._close(number)
        else:
            self._add_call(self.buffers[number], self.dispatch(self.buffers[number]))

    def act_call(self) -> None:
        buffer = self.rng.choice(list(self.buffers.values()))
        makers: dict[Any, float] = {
            self.dispatch: 4.0,
            self.cached: 2.0 * bool(buffer.having(Dispatch, DispatchByExpert)),
            self.combine: 3.0 * bool(buffer.having(Dispatch, DispatchByExpert)),
            self.dispatch_by_expert: 2.0 * self.may("by-expert"),
            self.combine_by_expert: 4.0 * bool(buffer.having(DispatchByExpert)),
            self.low_dispatch: 4.0 * buffer.opened.low_latency,
            self.low_combine: 9.0 * bool(buffer.having(LowDispatch, over=True)),
        }
        (make,) = self.rng.choices(list(makers), list(makers.values()))
        self._add_call(buffer, make(buffer))

    def act_finish(self) -> None:
        self.finish(self.rng.choice([one for one in self.given if not one.over]))

    def act_drop(self) -> None:
        one = self.rng.choice([one for one in self.given if one.rows or one.handle])
        if not one.over and not self.may("drops"):
            self.finish(one)
        dispatched = isinstance(one.step, (Dispatch, DispatchByExpert))
        but_handle = one.rows and dispatched and self.rng.random() < 0.6
        self.drop(one, but_handle)

    def act_collective(self) -> None:
        step = Collective(
            members=self.rng.choice(self.groups),
            kind=self.rng.choice(COLLECTIVES),
            is_async=self.may("overlap") and self.rng.random() < 0.5,
        )
        at = self._add(step)
        if step.is_async:
            self.collectives.append(at)

    def act_end_collective(self) -> None:
        self._add(EndCollective(of=self.collectives.pop(0)))

    def act_move(self) -> None:
        """Handles are of no use after it."""
        buffer = self.rng.choice(list(self.buffers.values()))
        for one in list(buffer.given):
            if not one.over:
                self.finish(one)
            self.drop(one)
        size, opened = len(buffer.opened.members), buffer.opened
        placement = tuple(self.rng.randrange(size) for _ in range(opened.num_experts))
        self._add(Move(buffer=opened.buffer, placement=placement))
        buffer.opened = replace(opened, placement=placement)

    def act_whole(self) -> None:
        members = self.rng.choice(self.groups)
        kind, case = wholes.draw(self.rng, len(members), self.may("doubled"))
        self._add(Whole(members=members, kind=kind, case=case))

    def act_close(self) -> None:
        self._close(self.rng.choice(list(self.buffers)))

    def _add(self, step: Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def _add_call(self, buffer: DrawnBuffer, step: Call) -> None:
        rng, opened = self.rng, buffer.opened
        step = replace(
            step,
            around=rng.choice(list(AROUND)) if self.may("around") and rng.random() < 0.2 else "",
            thread=self.may("threads") and rng.random() < 0.1,
        )
        possible = [kind for kind in TROUBLES if kind not in ("late", "thread")]
        if opened.timeout == LATE_TIMEOUT and rng.random() < 0.3:
            kind = "late"
        else:
            kind = self._trouble_kind(possible if step.thread else [*possible, "thread"])
        if kind == "order" and not opened.low_latency:
            kind = None
        if kind == "event" and not isinstance(step, (Dispatch, Cached, Combine)):
            kind = None
        low = isinstance(step, (LowDispatch, LowCombine))
        if kind == "mismatch" and (
            isinstance(step, LowCombine) or getattr(step, "x_of", None) is not None
        ):
            kind = None
        if (
            kind in ("mismatch", "bad")
            and low
            and opened.transport in ("collective", "hierarchical")
        ):
            # Some ranks agree on a new size first, and others do not.
            kind = kind if self.may("order") else None
        if kind:
            step = replace(step, trouble=self._trouble(kind, opened, type(step)))
        if kind == "errno" and (
            isinstance(step, DispatchByExpert) or (isinstance(step, Dispatch) and step.x_of is None)
        ):
            # rows that need memory of a size that the Buffer does not have yet
            case = replace(step.case, hidden=rng.choice([1500, 3000, 6000, 12000]))
            step = replace(step, case=case)
        if kind == "kill":
            while self.collectives:
                self.act_end_collective()
        at, fails = self._add(step), kind in BREAKING | {"bad", "mismatch"}
        if kind in BREAKING:
            self._last_look(opened.buffer, at)
        elif not fails:
            over = (not step.is_async and not getattr(step, "hook", False)) or kind == "thread"
            one = Given(step, at, over, handle=isinstance(step, HANDLES))
            buffer.given.append(one)
            self.given.append(one)
            if not over and self.may("drops") and rng.random() < 0.25:
                self.drop(one)
                if buffer.having(Dispatch):  # which may be given the same memory
                    again = self.combine(buffer, Dispatch)
                    self._add_call(buffer, replace(again, rows="buffer", after=None))
        if kind == "kill":
            self._bury(opened.members[step.trouble.rank], at)

    def _last_look(self, number: int, at: int) -> None:
        """After a trouble that may have broken the Buffer, or have made a node of each rank."""
        buffer = self.buffers[number]
        for one in buffer.given:
            if not one.over:
                self.drop(one)
        probe = replace(self.dispatch(buffer), is_async=False, after=None, x_of=None, probes=at)
        self._add(
            replace(probe, peek=False, case=replace(probe.case, tokens=(2, 3, 1, 0), hidden=9))
        )
        self._close(number)

    def _bury(self, victim: int, at: int) -> None:
        """Every other Buffer of the rank that was killed finds out, and the rest goes on."""
        for number, buffer in list(self.buffers.items()):
            if victim in buffer.opened.members:
                self._last_look(number, at)
        self.groups = [group for group in self.groups if victim not in group]
        self.was_killed = True

    def _close(self, number: int) -> None:
        buffer = self.buffers.pop(number)
        for one in buffer.given:
            if not one.over and getattr(one.step, "hook", False):
                self.drop(one)  # a hook is of no use after this
        self._add(Close(buffer=number, forget=self.may("unclosed") and self.rng.random() < 0.25))

    def finish(self, one: Given) -> None:
        self._add(Finish(of=one.number))
        one.over = True

    def drop(self, one: Given, but_handle: bool = False) -> None:
        self._add(Drop(of=one.number, but_handle=but_handle))
        one.rows, one.handle, one.over = False, one.handle and but_handle, True
        if not one.handle:
            self.given.remove(one)
            for buffer in self.buffers.values():
                buffer.given = [other for other in buffer.given if other is not one]

    def _trouble_kind(self, possible: list[str]) -> str | None:
        """At most one kill a program: it costs a start of all processes."""
        for kind in possible:
            if kind == "kill" and self.was_killed:
                continue
            if self.may(kind) and self.rng.random() < TROUBLES[kind] / 100:
                return kind
        return None

    def _trouble(self, kind: str, opened: Open, step: type) -> Trouble:
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
        if kind in ("stall", "stop", "late", "raise", "kill"):
            points = faults.points_of(opened.transport, step in (LowDispatch, LowCombine))
            naps = {"stall": rng.choice([0.002, 0.02, 0.1]), "stop": 0.3, "late": LATE_STALL}
            seconds = naps.get(kind, 0)
            what, nth = rng.choice(points), rng.choice([0, 0, 0, 1, 2])
            return replace(trouble, what=what, nth=nth, number=seconds)
        return trouble


def _splits(size: int) -> list[int | tuple[int, ...]]:
    """Ways to spread ranks over nodes."""
    ways: dict[int, list[int | tuple[int, ...]]] = {
        2: [1, 2, (1, 1)],
        3: [1, 3, (1, 2), (2, 1)],
        4: [1, 2, 4, (1, 3), (2, 1, 1)],
    }
    return ways[size]
