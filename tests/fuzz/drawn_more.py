"""Calls by chance: of prepared exchanges, of layers, and of Buffers of other interfaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.cases.exchange import FP8
from tests.fuzz.drawn_calls import SUMMABLE, CallDrawer, DrawnBuffer, Given
from tests.fuzz.routes import Case, Held
from tests.fuzz.steps import (
    Copied,
    Dispatch,
    DispatchByExpert,
    ElasticCombine,
    ElasticDispatch,
    Gather,
    GatherBack,
    HybridCombine,
    HybridDispatch,
    LowDispatch,
    Open,
    Prepare,
    PreparedCombine,
    PreparedDispatch,
    Scribble,
    Step,
    Through,
)

HANDLES = (  # steps that give one
    Dispatch,
    DispatchByExpert,
    LowDispatch,
    Prepare,
    PreparedDispatch,
    Gather,
    ElasticDispatch,
    HybridDispatch,
)
COPIES: dict[type, tuple[str, ...]] = {
    Dispatch: ("pickle", "deepcopy", "tuple"),
    DispatchByExpert: ("pickle", "deepcopy", "tuple"),
    LowDispatch: ("deepcopy",),  # they cannot be pickled
    Gather: ("pickle", "deepcopy"),
    ElasticDispatch: ("pickle", "deepcopy"),
    HybridDispatch: ("pickle", "deepcopy", "tuple"),
}
_SCRIBBLED = (*COPIES, Through)


class MoreCallDrawer(CallDrawer):
    def _add(self, step: Step) -> int:
        raise NotImplementedError

    def makers(self, buffer: DrawnBuffer) -> dict[Any, float]:
        """What may be called now, and how likely it is."""
        opened = buffer.opened
        if opened.kind == "elastic":
            had = bool(buffer.having(ElasticDispatch))
            return {self.elastic_dispatch: 3.0, self.elastic_combine: 4.0 * had}
        if opened.kind == "hybrid":
            had = bool(buffer.having(HybridDispatch))
            return {self.hybrid_dispatch: 3.0, self.hybrid_combine: 4.0 * had}
        return {
            self.prepare: 1.5 * self.may("prepared") * (len(buffer.having(Prepare)) < 3),
            self.prepared_dispatch: 9.0 * bool(buffer.having(Prepare)),
            self.prepared_combine: 9.0 * bool(buffer.having(PreparedDispatch)),
            self.through: 1.5 * self.may("layers"),
            self.gather: 0.7 * self.may("gathers"),
            self.gather_back: 1.5 * bool(buffer.having(Gather)),
        }

    def first(self, buffer: DrawnBuffer) -> Any:
        """Any dispatch of a Buffer that has made none."""
        kinds = {"elastic": self.elastic_dispatch, "hybrid": self.hybrid_dispatch}
        made: Any = kinds.get(buffer.opened.kind, self.dispatch)(buffer)
        return made if isinstance(made, Dispatch) else replace(made, handle=None)

    def of_a_kind(self, step: Open) -> Open:
        """Its interface, and where its experts live."""
        rng, size = self.rng, len(step.members)
        placement = tuple(rng.randrange(size) for _ in range(step.num_experts))
        kind = rng.choices(
            ["plain", "elastic", "hybrid"], [8, self.may("elastic"), self.may("hybrid")]
        )[0]
        if kind != "hybrid" and rng.random() < 0.3:
            step = replace(step, placement=placement)
        if kind != "plain":
            return replace(step, kind=kind)
        if self.may("balance") and rng.random() < 0.35:
            return replace(step, balance=rng.choice([0.0, 0.0, 0.05, 0.3]))
        if self.may("replicas") and rng.random() < 0.2:
            held = self.held(size, step.num_experts)
            step = replace(step, placement=None, held=held)
        return replace(step, low_latency=self.may("low-latency") and rng.random() < 0.5)

    def _plain_case(self, opened: Open) -> Case:
        """Of a dtype that can be summed, and as these calls have it."""
        case = replace(self._case(opened), worst=False, num_sms=20, balanced=True)
        if case.dtype == FP8:
            case = replace(case, dtype=self.rng.choice(SUMMABLE))
        return replace(case, tokens=tuple(min(40, one) for one in case.tokens))

    def prepare(self, buffer: DrawnBuffer) -> Prepare:
        case = replace(self._plain_case(buffer.opened), strided=False)
        by_expert = self.rng.random() < 0.5
        return Prepare(buffer=buffer.opened.buffer, case=case, by_expert=by_expert)

    def prepared_dispatch(self, buffer: DrawnBuffer) -> PreparedDispatch:
        """Takes the place of the dispatch but one before it."""
        of = self.rng.choice(buffer.having(Prepare))
        assert isinstance(of.step, Prepare)
        self.forget_dispatches(of.number)
        case, opened = of.step.case, buffer.opened
        most, few = max(1, *case.tokens), self.rng.random() < 0.2
        tokens = [
            self.rng.randint(0, 0 if few else max(1, one) if of.step.by_expert else most)
            for one in case.tokens
        ]
        case = replace(case, tokens=tuple(tokens), kind=self.rng.choice(self._routings))
        case = replace(case, placement=opened.placement, held=opened.held)
        case = replace(case, strided=self.rng.random() < 0.2)
        return PreparedDispatch(buffer=opened.buffer, of=of.number, case=case)

    def forget_dispatches(self, of: int, last_too: bool = False) -> None:
        """Of a prepared exchange: the last is combined no longer, rows of those before it go."""
        steps = [
            n
            for n, one in enumerate(self.steps)
            if isinstance(one, PreparedDispatch) and one.of == of
        ]
        for one in list(self.given):
            if one.number in steps[:-1] or (last_too and one.number in steps):
                self.drop(one)
            elif one.number in steps:
                one.handle = False

    def prepared_combine(self, buffer: DrawnBuffer) -> PreparedCombine:
        of = self.rng.choice(buffer.having(PreparedDispatch))
        return PreparedCombine(
            buffer=buffer.opened.buffer,
            of=of.number,
            rows=self.rng.choice(["own", "received"]) if of.rows else "own",
            weigh=self.rng.random() < 0.7,
            given_out=self.rng.random() < 0.3,
        )

    def through(self, buffer: DrawnBuffer) -> Through:
        parts = self.rng.random() < 0.4
        case = self._plain_case(buffer.opened)
        if not parts:
            case = replace(case, expert_alignment=1)
        return Through(buffer=buffer.opened.buffer, case=case, parts=parts)

    def gather(self, buffer: DrawnBuffer) -> Gather:
        made = [None, *buffer.having(Gather)]
        of = self.rng.choice(made)
        case = self._plain_case(buffer.opened)
        if of is not None:
            assert isinstance(of.step, Gather)
            was = of.step.case
            case = replace(case, tokens=was.tokens, hidden=was.hidden, dtype=was.dtype)
        handle = None if of is None else of.number
        return Gather(buffer=buffer.opened.buffer, case=case, handle=handle)

    def gather_back(self, buffer: DrawnBuffer) -> GatherBack:
        of = self.rng.choice(buffer.having(Gather))
        return GatherBack(buffer=buffer.opened.buffer, handle=of.number)

    def _again(self, buffer: DrawnBuffer, kind: type) -> Any:
        """An earlier dispatch whose way is taken again, or none."""
        made = [one for one in buffer.having(kind) if getattr(one.step, "handle", None) is None]
        return self.rng.choice([None, *made])

    def elastic_dispatch(self, buffer: DrawnBuffer) -> ElasticDispatch:
        rng, of = self.rng, self._again(buffer, ElasticDispatch)
        if of is not None:
            return replace(of.step, handle=of.number, trouble=None, around="", thread=False)
        case = replace(self._case(buffer.opened), worst=False, num_sms=20)
        return ElasticDispatch(
            buffer=buffer.opened.buffer,
            case=replace(case, tokens=tuple(min(40, one) for one in case.tokens)),
            do_expand=rng.random() < 0.5,
            do_cpu_sync=rng.random() < 0.7,
        )

    def elastic_combine(self, buffer: DrawnBuffer) -> ElasticCombine:
        of = self.rng.choice(buffer.having(ElasticDispatch))
        return ElasticCombine(
            buffer=buffer.opened.buffer,
            handle=of.number,
            weights=self.rng.random() < 0.4,
            num_biases=self.rng.choice([0, 0, 1, 2]),
        )

    def hybrid_dispatch(self, buffer: DrawnBuffer) -> HybridDispatch:
        rng, of = self.rng, self._again(buffer, HybridDispatch)
        if of is not None:
            again = replace(of.step, handle=of.number, trouble=None, around="", thread=False)
            return replace(again, with_probs=rng.random() < 0.5)
        case = replace(self._case(buffer.opened), worst=False, num_sms=20)
        return HybridDispatch(
            buffer=buffer.opened.buffer,
            case=replace(case, tokens=tuple(min(40, one) for one in case.tokens)),
            with_probs=rng.random() < 0.5,
            as_lists=rng.random() < 0.5,
        )

    def hybrid_combine(self, buffer: DrawnBuffer) -> HybridCombine:
        of = self.rng.choice(buffer.having(HybridDispatch))
        with_probs = self.rng.random() < 0.5
        return HybridCombine(buffer=buffer.opened.buffer, handle=of.number, with_probs=with_probs)

    def copies(self) -> list[Given]:
        """Handles that may be copied now."""
        return [one for one in self.given if one.over and one.handle and type(one.step) in COPIES]

    def act_copy(self) -> None:
        one = self.rng.choice(self.copies())
        self._add(Copied(of=one.number, how=self.rng.choice(COPIES[type(one.step)])))

    def scribbled(self) -> list[Given]:
        """What came, and may be written over: no call that may still be on its way reads it."""
        read = {
            number
            for step in self.steps
            if getattr(step, "is_async", False)
            for number in (getattr(step, "rows", None), getattr(step, "x_of", None))
        }
        over = [one for one in self.given if one.over and one.rows and one.number not in read]
        return [one for one in over if type(one.step) in _SCRIBBLED]

    def act_scribble(self) -> None:
        one = self.rng.choice(self.scribbled())
        self._add(Scribble(of=one.number))
        one.rows = False

    def held(self, size: int, num_experts: int) -> Held:
        """Copies of experts by chance, at least one of each."""
        slots: list[list[int]] = [[] for _ in range(size)]
        for expert in range(num_experts):
            for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
                slots[self.rng.randrange(size)].append(expert)
        for one in slots:
            self.rng.shuffle(one)
        return tuple(map(tuple, slots))


def splits(size: int) -> list[int | tuple[int, ...]]:
    """Ways to spread ranks over nodes."""
    ways: dict[int, list[int | tuple[int, ...]]] = {
        2: [1, 2, (1, 1)],
        3: [1, 3, (1, 2), (2, 1)],
        4: [1, 2, 4, (1, 3), (2, 1, 1)],
    }
    return ways.get(size, [1, size, (2, size - 2), (size - 1, 1), (size - 3, 1, 2)])
