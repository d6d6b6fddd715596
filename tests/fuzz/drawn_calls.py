"""Calls by chance: what a program may ask of a Buffer, given what it has from earlier calls."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.cases.exchange import FP8
from tests.fuzz.routes import Case, LowCase
from tests.fuzz.steps import (
    Cached,
    Call,
    Combine,
    CombineByExpert,
    Dispatch,
    DispatchByExpert,
    LowCombine,
    LowDispatch,
    Open,
    Step,
)
from tokenyard.testing import ROUTINGS

SUMMABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Given:
    """What a call gave, as far as the program still has it."""

    step: Call
    number: int
    over: bool
    rows: bool = True
    handle: bool = True


@dataclass
class DrawnBuffer:
    opened: Open
    given: list[Given] = field(default_factory=list)

    def having(self, *kinds: type, over: bool = False) -> list[Given]:
        return [
            one
            for one in self.given
            if isinstance(one.step, kinds) and one.handle and (one.over or not over)
        ]


class CallDrawer:
    """Knows the steps so far; `programs` knows which step comes next."""

    def __init__(self, rng: random.Random, without: Collection[str]) -> None:
        self.rng, self.without = rng, without
        self._routings = [kind for kind in ROUTINGS if kind != "doubled" or self.may(kind)]
        self.steps: list[Step] = []
        self.given: list[Given] = []

    def may(self, feature: str) -> bool:
        return feature not in self.without

    def finish(self, one: Given) -> None:
        raise NotImplementedError

    def drop(self, one: Given, but_handle: bool = False) -> None:
        raise NotImplementedError

    def _how(self, buffer: DrawnBuffer, of: Given | None = None) -> dict[str, Any]:
        """Whether a call is asynchronous, and what it comes after: what it needs, or anything."""
        is_async = self.may("async") and self.rng.random() < 0.5
        if of is not None and not of.over:
            return {"is_async": is_async, "buffer": buffer.opened.buffer, "after": of.number}
        events = [one.number for one in self.given if one.step.is_async and not one.over]
        chained = bool(events) and self.may("chains") and self.rng.random() < 0.3
        after = self.rng.choice(events) if chained else None
        return {"is_async": is_async, "buffer": buffer.opened.buffer, "after": after}

    def _usable(self, found: list[Given]) -> list[Given]:
        """Whose rows can be given to a call, on their way too if calls may be chained."""
        return [one for one in found if one.rows and (one.over or self.may("chains"))]

    def dispatch(self, buffer: DrawnBuffer) -> Dispatch:
        rng = self.rng
        sums = [one for one in buffer.given if isinstance(one.step, Combine)]
        source = rng.choice([None, *self._usable(sums)])
        case = self._case(buffer.opened)
        if source is not None:
            assert isinstance(source.step, Combine)
            was = self._case_of(buffer, source.step.handle)
            case = replace(case, tokens=was.tokens, hidden=was.hidden, dtype=was.sum_dtype)
            case = replace(case, strided=False)
        how = self._how(buffer, source)
        return Dispatch(
            **how,
            case=case,
            x_of=None if source is None else source.number,
            peek=rng.random() < 0.2 and (self.may("peek") or not how["is_async"]),
        )

    def _case(self, opened: Open) -> Case:
        rng, num_experts = self.rng, opened.num_experts
        if opened.placement is opened.held is None and not opened.low_latency:
            num_experts = rng.choice([num_experts, num_experts, 2, 3, 5, 8])
        most = 2000 if rng.random() < 0.002 else rng.choice([3, 12, 12, 40])
        tokens = [rng.choice([0, rng.randint(0, most), most]) for _ in opened.members]
        if most == 2000:  # the specification takes a second for each thousand
            tokens = [2000] + [3] * (len(tokens) - 1)
        return Case(
            num_ranks=len(opened.members),
            tokens=tuple(tokens),
            hidden=rng.choice([1, 7, 16, 40, 64, 130, 512, 4000]),
            num_topk=rng.randint(1, min(4, num_experts)),
            num_experts=num_experts,
            dtype=rng.choice([*SUMMABLE, FP8]),
            kind=rng.choice(self._routings),
            placement=opened.placement,
            held=opened.held,
            slack=opened.balance,
            balanced=opened.balance is None or rng.random() < 0.7,
            ranks_per_node=opened.nodes,
            expert_alignment=rng.choice([1, 1, 16]),
            worst=rng.random() < 0.2,
            strided=rng.random() < 0.2,
            num_sms=rng.choice([20, 20, 4]),
        )

    def _case_of(self, buffer: DrawnBuffer, handle: int) -> Case:
        step = self.steps[handle]
        assert isinstance(step, (Dispatch, DispatchByExpert))
        return step.case

    def cached(self, buffer: DrawnBuffer) -> Cached:
        of = self.rng.choice(buffer.having(Dispatch, DispatchByExpert))
        return Cached(**self._how(buffer), handle=of.number)

    def combine(self, buffer: DrawnBuffer, *kinds: type) -> Combine:
        """With the handle of one of these kinds of steps, or of any that gives one."""
        found = buffer.having(*kinds or (Dispatch, DispatchByExpert))
        rng, of = self.rng, self.rng.choice(found)
        same = [
            one
            for one in buffer.given
            if isinstance(one.step, Cached) and one.step.handle == of.number
        ]
        assert isinstance(of.step, (Dispatch, DispatchByExpert))
        ways: list[Any] = ["own"]
        if isinstance(of.step, Dispatch):  # else these have a row for each pair
            same.append(of)
            ways.append("buffer")
        received = self._usable(same) if of.step.case.dtype != FP8 else []
        rows: Any = rng.choice([*ways, *received])
        source = rows if isinstance(rows, Given) else None
        return Combine(
            **self._how(buffer, source),
            handle=of.number,
            rows=rows if source is None else source.number,
            weights=rng.random() < 0.4,
            num_biases=rng.choice([0, 0, 1, 2]),
        )

    def dispatch_by_expert(self, buffer: DrawnBuffer) -> DispatchByExpert:
        case = replace(self._case(buffer.opened), worst=False, num_sms=20)
        return DispatchByExpert(buffer=buffer.opened.buffer, case=case)

    def combine_by_expert(self, buffer: DrawnBuffer) -> CombineByExpert:
        rng, of = self.rng, self.rng.choice(buffer.having(DispatchByExpert))
        assert isinstance(of.step, DispatchByExpert)
        received = ["received"] if of.rows and of.step.case.dtype != FP8 else []
        return CombineByExpert(
            buffer=buffer.opened.buffer,
            handle=of.number,
            rows=rng.choice(["own", "buffer", *received]),
            weigh=rng.random() < 0.7,
            given_out=rng.random() < 0.3,
        )

    def _low_how(self, buffer: DrawnBuffer, kind: type) -> dict[str, Any]:
        """There are two places for each kind of call: what was sent but one before is received."""
        earlier = [one for one in buffer.given if isinstance(one.step, kind) and not one.over]
        number = buffer.opened.buffer
        of_kind = [step for step in self.steps if isinstance(step, kind)]
        sent: list[Any] = [step for step in of_kind if getattr(step, "buffer", None) == number]
        for one in earlier:
            if one.step is not sent[-1]:  # which may have been dropped since
                self.finish(one)
        ways = ["now", *(["hook", "async"] if self.may("async") else [])]
        how = self.rng.choice(ways)
        return {
            "buffer": buffer.opened.buffer,
            "is_async": how == "async",
            "hook": how == "hook",
        }

    def low_dispatch(self, buffer: DrawnBuffer) -> LowDispatch:
        rng, opened = self.rng, buffer.opened
        alive = [one for one in buffer.given if isinstance(one.step, LowDispatch) and one.rows]
        for one in alive[:-1]:
            if not one.over and not self.may("drops"):
                self.finish(one)
            self.drop(one)
        how = self._low_how(buffer, LowDispatch)
        fp8 = rng.choice([(False,) * 3, (False,) * 3, (True, False, False), (True, True, True)])
        plain = rng.choice([1, 7, 40, 130, 512])
        most, dtypes = rng.choice([1, 4, 8, 20]), SUMMABLE[1:] if fp8[0] else SUMMABLE
        case = LowCase(
            num_ranks=len(opened.members),
            tokens=tuple(rng.randint(0, most) for _ in opened.members),
            num_max=most,
            hidden=512 if fp8[0] else plain,
            num_topk=rng.randint(1, min(4, opened.num_experts)),
            num_experts=opened.num_experts,
            dtype=rng.choice(dtypes),
            kind=rng.choice([kind for kind in ROUTINGS if kind != "doubled"]),  # which it refuses
            placement=opened.placement,
            held=opened.held,
            nodes=replace(self._case(opened), held=None).logical.node_of_rank,
            fp8=fp8,
        )
        return LowDispatch(**how, case=case)

    def low_combine(self, buffer: DrawnBuffer) -> LowCombine:
        of = self.rng.choice(buffer.having(LowDispatch, over=True))
        how = self._low_how(buffer, LowCombine)
        chance, opened = self.rng.random, buffer.opened
        bare = opened.num_experts < len(opened.members) or (
            opened.placement is not None and len(set(opened.placement)) < len(opened.members)
        )
        bare = bare or (opened.held is not None and not all(opened.held))
        return LowCombine(
            **how,
            handle=of.number,
            zero_copy=chance() < 0.3 and (self.may("bare") or not bare),
            given_out=chance() < 0.3,
        )
