"""Programs by chance: draw(seed, num_ranks) gives the same steps wherever it is called."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from typing import Any

from tests.cases.surroundings import AROUND
from tests.fuzz import wholes
from tests.fuzz.drawn_calls import DrawnBuffer, Given
from tests.fuzz.drawn_more import HANDLES, MoreCallDrawer, splits
from tests.fuzz.drawn_troubles import (
    BAD_INPUT,
    LATE_TIMEOUT,
    MISFITS,
    TROUBLES,
    TroubleDrawer,
)
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
    ElasticDispatch,
    EndCollective,
    Finish,
    Gather,
    HybridDispatch,
    LowCombine,
    LowDispatch,
    Move,
    Open,
    Prepare,
    PreparedDispatch,
    Program,
    Step,
    Through,
    Whole,
)

# What may be left out of programs, by name. Troubles have the names of their kinds.
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
    "balance",  # within nodes
    "replicas",
    "prepared",
    "layers",  # their exchanges
    "gathers",
    "copies",  # of handles, whose originals die
    "scribbles",  # over what came
    "elastic",  # DeepEP V2's Buffers
    "hybrid",  # HybridEP's
    *TROUBLES,
)
TRANSPORTS = ("direct", "ring", "collective", "hierarchical")
COLLECTIVES = ("all_reduce", "all_to_all", "broadcast", "barrier")


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


class _Drawer(MoreCallDrawer, TroubleDrawer):
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
                self.act_copy: 2.0 * bool(self.copies()) * self.may("copies"),
                self.act_scribble: 1.0 * bool(self.scribbled()) * self.may("scribbles"),
                self.act_collective: 2.0 * self.may("collectives"),
                self.act_end_collective: 2.0 * bool(self.collectives),
                self.act_close: 1.0 * bool(self.buffers),
                self.act_move: 0.7 * bool(self._movable()) * self.may("moves"),
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
        size = len(members)
        step = Open(
            buffer=number,
            members=members,
            transport=rng.choice(TRANSPORTS),
            nodes=rng.choice([None, None, *splits(size)]),
            num_experts=rng.choice([2, 5, 8, 8, 16]),
        )
        step = self.of_a_kind(step)
        if step.transport == "hierarchical" and step.nodes is None:
            step = replace(step, nodes=rng.choice(splits(size)))
        kind = self.trouble_kind(["bad", "stall", "errno", "late"])
        idle = self.may("idle") and rng.random() < 0.15
        if idle and kind is None and self.may("stall") and rng.random() < 0.5:
            kind = "stall"  # somebody opens it later than others close it
        if kind == "late":  # befalls a later call
            step = replace(step, timeout=LATE_TIMEOUT)
        elif kind:
            step = replace(step, trouble=self.trouble(kind, step, Open))
            if step.kind == "hybrid" and step.trouble.what == "placement":
                step = replace(step, trouble=replace(step.trouble, what="kernels"))  # it has none
        at = self._add(step)
        self.buffers[number] = DrawnBuffer(step)
        if kind == "bad":
            del self.buffers[number]
        elif kind == "errno":
            self._last_look(number, at)
        elif idle:
            self._close(number)
        else:
            self._add_call(self.buffers[number], self.first(self.buffers[number]))

    def act_call(self) -> None:
        buffer = self.rng.choice(list(self.buffers.values()))
        makers = self.makers(buffer)
        if buffer.opened.kind == "plain":
            makers |= self._plain_makers(buffer)
        (make,) = self.rng.choices(list(makers), list(makers.values()))
        self._add_call(buffer, make(buffer))

    def _plain_makers(self, buffer: DrawnBuffer) -> dict[Any, float]:
        return {
            self.dispatch: 4.0,
            self.cached: 2.0 * bool(buffer.having(Dispatch, DispatchByExpert)),
            self.combine: 3.0 * bool(buffer.having(Dispatch, DispatchByExpert)),
            self.dispatch_by_expert: 2.0 * self.may("by-expert"),
            self.combine_by_expert: 4.0 * bool(buffer.having(DispatchByExpert)),
            self.low_dispatch: 4.0 * buffer.opened.low_latency,
            self.low_combine: 9.0 * bool(buffer.having(LowDispatch, over=True)),
        }

    def act_finish(self) -> None:
        self.finish(self.rng.choice([one for one in self.given if not one.over]))

    def act_drop(self) -> None:
        one = self.rng.choice([one for one in self.given if one.rows or one.handle])
        if not one.over and not self.may("drops"):
            self.finish(one)
        if isinstance(one.step, Prepare):
            self.forget_dispatches(one.number, last_too=True)
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

    def _movable(self) -> list[DrawnBuffer]:
        return [one for one in self.buffers.values() if one.opened.kind == "plain"]

    def act_move(self) -> None:
        """Handles are of no use after it; prepared exchanges are."""
        rng, buffer = self.rng, self.rng.choice(self._movable())
        for one in list(buffer.given):
            if not one.over:
                self.finish(one)
        size, opened = len(buffer.opened.members), buffer.opened
        placement = tuple(rng.randrange(size) for _ in range(opened.num_experts))
        step = Move(buffer=opened.buffer, placement=placement)
        if self.may("replicas") and rng.random() < (0.1 if opened.balance is not None else 0.3):
            held = self.held(size, opened.num_experts)
            refused = opened.balance is not None
            step = replace(step, placement=(), held=held, refused=refused)
        kind = self.trouble_kind(["bad", "mismatch"])
        if kind is not None and not step.refused:
            step = replace(step, trouble=self.trouble(kind, opened, Move))
        self._add(step)
        if step.refused or step.trouble:
            return  # nothing has changed
        for one in list(buffer.given):
            if isinstance(one.step, Prepare) and one.step.case.num_experts == opened.num_experts:
                continue  # it goes on; others are of experts that there are not any more
            if isinstance(one.step, Prepare):
                self.forget_dispatches(one.number, last_too=True)
            if one in buffer.given:
                self.drop(one)
        buffer.opened = replace(opened, placement=step.placement or None, held=step.held)

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
        again = getattr(step, "handle", None) is not None and not isinstance(step, Gather)
        if isinstance(step, Through) and step.around != "inference":
            step = replace(step, around="")
        possible = [kind for kind in TROUBLES if kind not in ("late", "thread")]
        if opened.timeout == LATE_TIMEOUT and rng.random() < 0.3:
            kind = "late"
        else:
            kind = self.trouble_kind(possible if step.thread else [*possible, "thread"])
        if kind == "order" and not opened.low_latency:
            kind = None
        if isinstance(step, Prepare):  # which is local
            kind = None
        if kind == "bad" and type(step) not in BAD_INPUT:
            kind = None
        if kind == "thread" and opened.kind != "plain":
            kind = None
        if kind == "event" and not isinstance(step, (Dispatch, Cached, Combine)):
            kind = None
        if kind == "mismatch" and (
            isinstance(step, MISFITS) or getattr(step, "x_of", None) is not None
        ):
            kind = None
        if kind == "memory" and opened.transport != "direct":
            kind = None  # other transports take memory when ranks have met
        if kind:
            step = replace(step, trouble=self.trouble(kind, opened, type(step)))
            if again and step.trouble.what in ("topk", "expert"):
                step = replace(step, trouble=replace(step.trouble, what="none"))
        if kind in ("errno", "memory") and (
            isinstance(step, (DispatchByExpert, Through))
            or (isinstance(step, Dispatch) and step.x_of is None)
            or (isinstance(step, (ElasticDispatch, HybridDispatch)) and not again)
        ):
            # rows that need memory of a size that the Buffer does not have yet
            case = replace(step.case, hidden=rng.choice([1500, 3000, 6000, 12000]))
            step = replace(step, case=case)
        if kind == "memory":  # of exchanges: a rank that gets none to write to is alone with that
            if isinstance(step, (Combine, CombineByExpert)) and step.rows == "buffer":
                step = replace(step, rows="own")
            if isinstance(step, LowCombine):
                step = replace(step, zero_copy=False)
        if kind == "order" and opened.shares_memory:
            self._shorten_waits(opened.buffer)
        if kind == "kill":
            while self.collectives:
                self.act_end_collective()
        at, fails = self._add(step), kind in BREAKING | {"bad", "mismatch", "memory"}
        if isinstance(step, PreparedDispatch) and fails:
            self.forget_dispatches(step.of, last_too=True)
        if kind in BREAKING:
            self._last_look(opened.buffer, at)
        elif not fails:
            over = (not step.is_async and not getattr(step, "hook", False)) or kind == "thread"
            one = Given(step, at, over, handle=isinstance(step, HANDLES) and not again)
            one.rows = not isinstance(step, Prepare)
            buffer.given.append(one)
            self.given.append(one)
            if not over and self.may("drops") and rng.random() < 0.25:
                self.drop(one)
                if buffer.having(Dispatch):  # which may be given the same memory
                    more = self.combine(buffer, Dispatch)
                    self._add_call(buffer, replace(more, rows="buffer", after=None))
        if kind == "kill":
            self._bury(opened.members[step.trouble.rank], at)

    def _shorten_waits(self, number: int) -> None:
        """Of a Buffer whose ranks are to wait in vain."""
        for at, one in enumerate(self.steps):
            if isinstance(one, Open) and one.buffer == number:
                self.steps[at] = replace(one, timeout=LATE_TIMEOUT)

    def _last_look(self, number: int, at: int) -> None:
        """After a trouble that may have broken the Buffer, or have made a node of each rank."""
        buffer = self.buffers[number]
        for one in buffer.given:
            if not one.over:
                self.drop(one)
        probe = replace(self.first(buffer), probes=at)
        probe = replace(probe, case=replace(probe.case, tokens=(2, 3, 1, 0), hidden=9))
        if isinstance(probe, Dispatch):
            probe = replace(probe, is_async=False, after=None, x_of=None, peek=False)
        self._add(probe)
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
        for one in list(buffer.given):
            hook = not one.over and getattr(one.step, "hook", False)
            if hook or isinstance(one.step, Prepare):
                self.drop(one)  # which is of no use after this
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
