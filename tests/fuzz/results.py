"""What a call of a program gives, where it is made, and what the culprit gives it instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.given import Expected, Named
from tests.fuzz.steps import Program, Trouble
from tokenyard.runtime.events import EventOverlap
from tokenyard.spec import LowLatencyReceived
from tokenyard.testing import assert_same


@dataclass
class Result:
    """What a call gave: tensors and lists by name, or how to get them once they are there."""

    named: dict[str, Any] = field(default_factory=dict)
    handle: Any = None
    event: EventOverlap | None = None
    hook: Callable[[], None] | None = None
    is_over: bool = False
    reads: dict[str, str] = field(default_factory=dict)  # what the handle tells, and as what

    def read(self) -> None:
        """What the handle tells, which is made when somebody asks."""
        self.named.update({name: getattr(self.handle, told) for name, told in self.reads.items()})

    @property
    def is_later(self) -> bool:
        return self.event is not None or self.hook is not None

    def finish(self) -> None:
        if self.hook is not None:
            self.hook()
        if self.event is not None:
            self.event.current_stream_wait()
        self.is_over = True

    def problem(self, want: Named) -> str | None:
        """What differs from what `spec` says."""
        try:
            self.read()
            for name, value in want.items():
                got = self.named[name]
                if isinstance(value, LowLatencyReceived):
                    _check_slots(got, value)
                else:
                    assert_same(got() if callable(got) else got, value, name)
        except AssertionError as error:
            return str(error)
        return None


def _check_slots(got: Any, want: LowLatencyReceived) -> None:
    x, scales, count, src_info, layout_range = got
    assert_same(count, want.count, "count")
    assert_same(layout_range, want.layout_range, "layout_range")
    for local, rows in enumerate(count.tolist()):
        assert_same(x[local, :rows], want.x[local, :rows], f"x of local expert {local}")
        assert_same(src_info[local, :rows], want.src_info[local, :rows], "src_info")
        if want.scales is not None:
            assert_same(scales[local, :rows], want.scales[local, :rows], "scales")


@dataclass
class Scene:
    """Where a rank is in a program."""

    program: Program
    expected: Expected
    results: dict[int, Result]
    number: int  # of the step
    place: int  # the rank in its group


def later(event: EventOverlap) -> EventOverlap | None:
    return None if event.event is None else event


def spoil(mine: Trouble | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the culprit gives instead. Every kind of bad input is bad for the calls that draw it."""
    if mine is None or mine.kind not in ("bad", "mismatch"):
        return arguments
    given = arguments["x"]
    x = given[0] if isinstance(given, tuple) else given
    wider = torch.zeros(*x.shape[:-1], x.shape[-1] + 512, dtype=x.dtype)
    plain = {name: None for name in ("bias", "out") if name in arguments}
    changes: dict[str, Any] = {
        "": {"x": (wider, given[1]) if isinstance(given, tuple) else wider, **plain},
        "none": {"x": None},
        "dtype": {"x": torch.zeros(x.shape, dtype=torch.int64)},
        "shape": {"x": x[None]},
        "tokens": {"x": torch.zeros(x.shape[0] + 1, x.shape[1], dtype=x.dtype)},
        "handle": {"handle": 7},
        "worst": {"num_worst_tokens": -1},
        "topk": {"topk_idx": "topk_idx" in arguments and arguments["topk_idx"].int()},
    }
    if mine.what == "expert":
        topk_idx = arguments["topk_idx"].clone()
        changes["expert"] = changes["topk"]
        if len(topk_idx):
            topk_idx[-1, -1] = arguments["num_experts"]
            changes["expert"] = {"topk_idx": topk_idx}
    return {**arguments, **changes[mine.what]}


def written(memory: Tensor, rows: Tensor) -> Tensor:
    """What was lent inside of inference_mode is written to there."""
    with torch.inference_mode(memory.is_inference()):
        return memory.copy_(rows)
