"""One rank's way through a program: it makes the calls, and notes what came of them."""

from __future__ import annotations

import io
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

import tokenyard
from tests.cases import inside
from tests.cases.surroundings import AROUND, Surrounded
from tests.fuzz import calls, collectives, copied, faults, wholes
from tests.fuzz.given import Expected
from tests.fuzz.leaks import Holdings
from tests.fuzz.oracle import Outcome, Report
from tests.fuzz.ready import GROUPS
from tests.fuzz.results import Result
from tests.fuzz.steps import (
    BREAKING,
    Call,
    Close,
    Collective,
    Copied,
    Drop,
    EndCollective,
    Finish,
    LowCombine,
    LowDispatch,
    Move,
    Open,
    Program,
    Scribble,
    Step,
    Through,
    Trouble,
    Whole,
)
from tokenyard.runtime.events import EventHandle, EventOverlap


def interpret(world: Any, program: Program, expected: bytes, folder: str) -> Report:
    before, threads = Holdings.now(), program.threads[world.rank()]
    torch.set_num_threads(threads)
    # Several threads share what has some thousand bytes: most calls have less.
    inside.share_from(8 << 10 if threads > 1 else None)
    known = torch.load(io.BytesIO(expected), weights_only=False)
    rank = Rank(world.rank(), program, known, GROUPS)
    said = _Said()
    with said.heard(), ExitStack() as watching:
        for one in program.watched:
            watch = tokenyard.trace if one == "trace" else tokenyard.record
            watching.enter_context(watch(f"{folder}/{one}"))
        for number, step in enumerate(program.steps):
            rank.do(number, step)
        report = rank.report
        rank.leave()
    del rank
    report.leaks = before.grown()
    report.said = said.lines
    return report


def interpret_virtual(group: Any, program: Program, expected: bytes) -> Report:
    known = torch.load(io.BytesIO(expected), weights_only=False)
    rank = Rank(group.rank(), program, known, {tuple(range(group.size())): group})
    for number, step in enumerate(program.steps):
        rank.do(number, step)
    report = rank.report
    rank.leave()
    return report


class _Said(logging.Handler):
    """What traces and recordings say when they fail: they may not raise."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if "could not be noted" in line or "cannot be written" in line:
            self.lines.append(line)

    @contextmanager
    def heard(self) -> Iterator[None]:
        log = logging.getLogger("tokenyard")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)


@dataclass
class Rank:
    rank: int  # of the world
    program: Program
    expected: Expected
    groups: dict[tuple[int, ...], Any]
    report: Report = field(default_factory=Report)
    buffers: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    works: dict[int, collectives.Begun] = field(default_factory=dict)
    arms: list[faults.Arm] = field(default_factory=list)
    junk: list[Any] = field(default_factory=list)  # in memory of handles that died

    def do(self, number: int, step: Step) -> None:
        """What goes wrong is noted, and the rank goes on: the others do."""
        if isinstance(step, (Open, Collective, Whole)):
            members = step.members
        elif isinstance(step, (Finish, Drop, Copied, Scribble, EndCollective)):
            members = self._members(self.program.steps[step.of])
        else:
            members = self._members(step)
        if self.rank not in members:
            return
        place = members.index(self.rank)
        trouble: Trouble | None = getattr(step, "trouble", None)
        mine = trouble if trouble is not None and trouble.rank == place else None
        names: tuple[Any, ...] = ()
        arm: faults.Arm | faults.Poor | None = None
        begin, kind, text = time.monotonic(), "ok", ""
        try:
            with ExitStack() as stack:
                if mine is not None and mine.what and mine.kind != "bad":
                    if mine.kind in ("raise", "errno"):
                        self._let_calls_end()  # the trouble is this step's, and no earlier one's
                    arm = armed = faults.Arm(mine)
                    if mine.kind == "stall":  # for as long as the program runs
                        self.arms.append(armed)
                    else:
                        stack.callback(armed.disarm)
                elif mine is not None and mine.kind == "memory":
                    self._let_calls_end()
                    arm = stack.enter_context(faults.without_memory(mine.nth))
                kind = self._step(number, step, place, mine)
                if mine is not None and mine.kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
            names = getattr(error, "ranks", None)
            if names is None:
                names = (error.rank,) if hasattr(error, "rank") else ()
            error.__traceback__ = None
        seconds = time.monotonic() - begin
        self.report.outcomes[number] = Outcome(
            kind=kind, text=text, names=names, seconds=seconds, fired=arm is not None and arm.fired
        )

    def _let_calls_end(self) -> None:
        """The asynchronous ones of all Buffers. What fails in them is told where it counts."""
        for buffer in self.buffers.values():
            with suppress(Exception):
                inside.worker_of(_inner(buffer)).drain()

    def leave(self) -> None:
        for arm in self.arms:
            arm.disarm()
        self.results.clear()
        for buffer in self.buffers.values():  # left over by a program that failed
            _close(buffer)
        self.buffers.clear()
        self.junk.clear()

    def _members(self, step: Any) -> tuple[int, ...]:
        return step.members if hasattr(step, "members") else self._opened(step).members

    def _opened(self, step: Any) -> Open:
        return self.program.opened(step.buffer)

    def _step(self, number: int, step: Step, place: int, mine: Trouble | None) -> str:
        if isinstance(step, Open):
            self.buffers[step.buffer] = calls.open_buffer(self.groups[step.members], step, mine)
        elif isinstance(step, Close):
            closed = self.buffers.pop(step.buffer, None)
            if closed is not None and not step.forget:
                _close(closed)
                self._check_closed(closed)
        elif isinstance(step, Finish):
            self._finish(step.of, place)
        elif isinstance(step, Drop):
            self._drop(step, place)
        elif isinstance(step, Copied):
            self._copy(step, place)
        elif isinstance(step, Scribble):
            self._scribble(step, place)
        elif isinstance(step, Move):
            self._move(step, place, mine)
        elif isinstance(step, Whole):
            self.report.outs[number] = wholes.run(self.groups[step.members], step)
        elif isinstance(step, Collective):
            self._collective(number, step, place)
        elif isinstance(step, EndCollective):
            self._end_collective(step.of)
        else:
            return self._call(number, step, place, mine)
        return "ok"

    def _call(self, number: int, step: Call, place: int, mine: Trouble | None) -> str:
        buffer = self.buffers.get(step.buffer)
        if buffer is None:  # its opening failed, as it may have been meant to
            return "BufferClosed"
        if mine is not None and mine.kind == "leave":
            _close(buffer)
            return "left"
        event = None
        if step.after is not None and step.after in self.results:
            event = self.results[step.after].event
        if mine is not None and mine.kind == "event":
            event = _failing_event()
        scene = calls.Scene(self.program, self.expected, self.results, number, place)
        _leave_compiled_calls(
            _inner(buffer), random.Random(f"{self.program.seed} {number} {place}")
        )

        def call() -> Result:
            surrounded: Any = buffer
            if step.around and not isinstance(step, Through):
                surrounded = Surrounded(buffer, AROUND[step.around])
            return calls.call(surrounded, scene, step, event, mine)

        if mine is not None and mine.kind == "thread":
            result = self._intruded(buffer, step, call)
        else:
            result = _on_thread(call) if step.thread else call()
        self.results[number] = result
        trouble = step.trouble
        if not result.is_later or (trouble is not None and trouble.kind in _ENDS):
            del result
            self._finish(number, place)
        if trouble is not None and trouble.kind in BREAKING | {"memory"}:
            self.results.pop(number)
        return "ok"

    def _intruded(self, buffer: tokenyard.Buffer, step: Call, call: Callable[[], Result]) -> Result:
        """The second thread must be refused, and must not be noticed otherwise."""
        said: list[BaseException | None] = []
        point = "Agreement.meet"
        if isinstance(step, (LowDispatch, LowCombine)):
            point = "Slots.send" if self._opened(step).shares_memory else "gloo"
        x, idx = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
        weights, num_experts = torch.ones(2, 1), self._opened(step).num_experts

        def intrude() -> None:
            buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=num_experts)

        with faults.intruding(point, intrude, said):
            result = call()
        for error in said:
            refused = isinstance(error, tokenyard.TokenyardError) and "thread" in str(error)
            assert refused, f"a second thread was not refused: {error!r}"
        return result

    def _finish(self, of: int, place: int) -> None:
        result = self.results[of]
        result.finish()
        self._check(of, place)

    def _check(self, of: int, place: int) -> None:
        if of not in self.expected:  # a prepared exchange
            return
        problem = self.results[of].problem(self.expected[of][place])
        if problem:
            self.report.wrong.setdefault(of, problem)

    def _drop(self, step: Drop, place: int) -> None:
        """What was there once must still be the same."""
        result = self.results.get(step.of)
        if result is None:
            return
        if result.is_over:
            self._check(step.of, place)
        if step.but_handle:
            self.results[step.of] = Result(handle=result.handle)
        else:
            del self.results[step.of]

    def _copy(self, step: Copied, place: int) -> None:
        result = self.results.get(step.of)
        if result is not None and result.handle is not None:
            self.junk = copied.replace(result, step.how)
            if result.named:
                self._check(step.of, place)

    def _scribble(self, step: Scribble, place: int) -> None:
        result = self.results.get(step.of)
        if result is not None:
            self._check(step.of, place)
            copied.scribble(result)
            self.results[step.of] = Result(handle=result.handle)

    def _move(self, step: Move, place: int, mine: Trouble | None) -> None:
        buffer, size = self.buffers[step.buffer], len(self._opened(step).members)
        buffer.rebalance(calls.placement_of(step, size, mine))
        held = step.held or [
            [expert for expert, rank in enumerate(step.placement) if rank == owner]
            for owner in range(size)
        ]
        num_experts = max(max(one, default=0) for one in held) + 1
        assert buffer.get_local_experts(num_experts) == list(held[place])

    def _check_closed(self, buffer: tokenyard.Buffer) -> None:
        _close(buffer)  # twice is fine
        if not isinstance(buffer, tokenyard.Buffer):
            return
        try:
            buffer.get_local_experts(8)
        except tokenyard.BufferClosed:
            return
        raise AssertionError("a closed Buffer was used")

    def _collective(self, number: int, step: Collective, place: int) -> None:
        self.works[number] = collectives.begin(self.groups[step.members], step, number, place)
        if not step.is_async:
            self._end_collective(number)

    def _end_collective(self, of: int) -> None:
        work, out, want = self.works.pop(of)
        work.wait()
        if not torch.equal(out, want):
            self.report.wrong[of] = f"the user's collective gave {out}, want {want}"


# After these no call may be on its way, so that its end is part of the step.
_ENDS = BREAKING | {"bad", "mismatch", "thread", "memory"}


def _inner(buffer: Any) -> Any:
    """The Buffer that one of HybridEP's has."""
    return buffer._buffer if isinstance(buffer, tokenyard.HybridEPBuffer) else buffer


def _close(buffer: Any) -> None:
    _inner(buffer).close()


def _leave_compiled_calls(buffer: tokenyard.Buffer, draw: random.Random) -> None:
    """One in four of this rank's compiled calls between nodes is made step by step, from a phase
    on.
    """
    phase = draw.choice((*[inside.NOWHERE] * 6, inside.POSTED, inside.MET))
    inside.leave_compiled_calls_at(buffer, phase)


def _failing_event() -> EventOverlap:
    future: Future[None] = Future()
    event = EventOverlap(EventHandle(future))
    threading.Timer(0.05, future.set_exception, [faults.Injected("an earlier call failed")]).start()
    return event


def _on_thread(call: Callable[[], Result]) -> Result:
    got: list[Result | BaseException] = []

    def run() -> None:
        try:
            got.append(call())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run, name="fuzz-caller")
    thread.start()
    thread.join()
    if isinstance(got[0], BaseException):
        raise got.pop()  # type: ignore[misc]
    return got.pop()  # type: ignore[return-value]
