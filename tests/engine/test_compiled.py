"""Compiled calls: which calls they make, what they leave to the engine, and what they keep."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.processes import Pools
from tokenyard.engine.handle import CompiledHandle
from tokenyard.testing import assert_same, numbered_tokens, routing, run_virtual
from tokenyard.wire.exchange_table import HEARD, POSTED

NUM_EXPERTS = 12


def inputs(rank: int, turn: int = 0, num_tokens: int = 9, hidden: int = 40) -> dict[str, Any]:
    x = numbered_tokens(num_tokens, hidden, first=1000 * turn + 100 * rank)
    topk_idx, weights = routing("holes", num_tokens, 4, NUM_EXPERTS, seed=10 * turn + rank)
    return {"x": x, "topk_idx": topk_idx, "topk_weights": weights, "num_experts": NUM_EXPERTS}


def is_compiled(buffer: tokenyard.Buffer, given: dict[str, Any]) -> bool:
    got: Any = buffer.dispatch(**given)
    received = got.recv_x[0] if isinstance(got.recv_x, tuple) else got.recv_x
    buffer.combine(torch.zeros(received.shape), got.handle)
    return type(got.handle) is CompiledHandle


def which_are_compiled(group: Any, changes: list[Callable[[dict[str, Any]], Any]]) -> list[bool]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        out = []
        for change in changes:
            given = inputs(group.rank())
            given.update(change(given) or {})
            out.append(is_compiled(buffer, given))
        return out


def spread(x: Tensor) -> Tensor:
    """The same numbers, not next to each other."""
    return x.repeat_interleave(2, dim=1)[:, ::2]


PLAIN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as it is": lambda _: {},
    "aligned": lambda _: {"expert_alignment": 8},
    "tagged": lambda _: {"tag": 7},
    "another config": lambda _: {"config": tokenyard.Config(4)},
    "no tokens": lambda g: {
        name: g[name][:0].contiguous() for name in ("x", "topk_idx", "topk_weights")
    },
    "a gradient that nobody wants": lambda g: {"x": g["x"].float().requires_grad_()},
}
OTHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "strided x": lambda g: {"x": spread(g["x"])},
    "strided ids": lambda g: {"topk_idx": spread(g["topk_idx"])},
    "strided weights": lambda g: {"topk_weights": spread(g["topk_weights"])},
    "a parameter": lambda g: {"x": torch.nn.Parameter(g["x"], requires_grad=False)},
    "negated": lambda g: {"x": torch._neg_view(g["x"])},
    "with scales": lambda g: {"x": (g["x"].to(torch.float8_e4m3fn), torch.ones(9, 1))},
    "more rows than arrive": lambda _: {"num_worst_tokens": 64},
    "asynchronous": lambda _: {"async_finish": True},
    "after an event": lambda _: {"previous_event": tokenyard.Buffer.capture()},
}

# Those that are about tensors, and not about options that calls by expert do not have.
TENSORS = ("strided x", "strided ids", "strided weights", "a parameter", "negated", "with scales")


@torch.no_grad()
def run_plain(group: Any) -> list[bool]:
    return which_are_compiled(group, list(PLAIN.values()))


@torch.no_grad()
def run_other(group: Any) -> list[bool]:
    return which_are_compiled(group, list(OTHER.values()))


def test_plain_calls_are_compiled() -> None:
    for answer in run_virtual(run_plain, 2).results:
        assert dict(zip(PLAIN, answer)) == dict.fromkeys(PLAIN, True)


def test_other_calls_are_the_engines() -> None:
    for answer in run_virtual(run_other, 2).results:
        assert dict(zip(OTHER, answer)) == dict.fromkeys(OTHER, False)


@torch.no_grad()
def by_expert(group: Any, changes: list[Callable[[dict[str, Any]], Any]]) -> list[bool]:
    """Which calls of few rows by expert are compiled."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        buffer.dispatch_by_expert(**inputs(group.rank()))  # in one step, since it is the first
        out, engine = [], buffer._engine
        for change in changes:
            given = inputs(group.rank())
            given.update(change(given) or {})
            given.pop("config", None)
            with mock.patch.object(engine, "combine", wraps=engine.combine) as general:
                got: Any = buffer.dispatch_by_expert(**given)
                y = torch.zeros(got.x[0].shape if isinstance(got.x, tuple) else got.x.shape)
                for weigh in (True, False):
                    sums = buffer.combine_by_expert(y, got.handle, weigh=weigh)
                    into = torch.empty_like(sums)
                    buffer.combine_by_expert(y, got.handle, weigh=weigh, out=into)
            assert general.call_count in (0, 4)
            out.append(type(got.handle) is CompiledHandle and not general.call_count)
        return out


def test_plain_calls_by_expert_are_compiled() -> None:
    for answer in run_virtual(by_expert, 2, list(PLAIN.values())).results:
        assert dict(zip(PLAIN, answer)) == dict.fromkeys(PLAIN, True)


def test_other_calls_by_expert_are_the_engines() -> None:
    kinds = {name: change for name, change in OTHER.items() if name in TENSORS}
    for answer in run_virtual(by_expert, 2, list(kinds.values())).results:
        assert dict(zip(kinds, answer)) == dict.fromkeys(kinds, False)


def test_a_switch_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENYARD_COMPILED_CALLS", "0")
    assert run_virtual(run_plain, 2).results == [[False] * len(PLAIN)] * 2


def fields(handle: tokenyard.Handle) -> list[Any]:
    flow = handle.flow
    return [*handle, flow.route.send_token, list(flow.route.send_counts), list(flow.recv_counts)]


def both_ways(group: Any) -> None:
    """Handles, whichever way made them, hold the same and serve the same calls."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        compiled: Any = buffer._engine.compiled
        for turn in range(3):
            given = inputs(group.rank(), turn)
            quick: Any = buffer.dispatch(**given)
            compiled.leave_at = POSTED
            slow: Any = buffer.dispatch(**given)
            compiled.leave_at = 0
            assert type(slow.handle) is tokenyard.Handle
            assert_same(fields(quick.handle), fields(slow.handle))
            for handle in (
                quick.handle,
                replace(quick.handle, hidden=40),
                copy.deepcopy(quick.handle),
                pickle.loads(pickle.dumps(quick.handle)),
            ):
                y = quick.recv_x * 2
                assert_same(buffer.combine(y, handle).x, buffer.combine(y, slow.handle).x)
                assert_same(buffer.dispatch(given["x"], handle=handle).recv_x, quick.recv_x)
                assert_same(fields(handle), fields(slow.handle))


@torch.no_grad()
def between_larger_calls(group: Any) -> list[bool]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        seen = []
        for _ in range(4):
            seen.append(is_compiled(buffer, inputs(group.rank())))
            buffer.all_gather(torch.zeros(2000, 40))
        return seen


def test_a_call_of_another_shape_between_two_changes_nothing() -> None:
    """The first call of a shape may find too little room, or too much."""
    for seen in run_virtual(between_larger_calls, 2).results:
        assert seen[2:] == [True, True]


def test_what_a_caller_does_with_sums_changes_no_later_ones() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group, transport="direct") as buffer:

            def sums(num_tokens: int) -> Tensor:
                given = inputs(group.rank(), num_tokens=num_tokens, hidden=16)
                got: Any = buffer.dispatch(**given)
                return buffer.combine(got.recv_x, got.handle).x

            first = sums(1)
            first.squeeze_(0)  # [16]
            assert sums(16).shape == (16, 16)

    run_virtual(job, 2)


def test_handles_of_both_ways_are_alike() -> None:
    run_virtual(both_ways, 3)


def grow(group: Any) -> int:
    """More and more rows arrive, until a block, and a ledger, are too small again and again."""
    made = 0
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for turn, num_tokens in enumerate([1, 40, 3, 700, 2, 699, 5000, 1]):
            given = inputs(group.rank(), turn, num_tokens, hidden=64)
            got: Any = buffer.dispatch(**given)
            made += type(got.handle) is CompiledHandle
            copies = got.handle.is_token_in_rank.sum(1, keepdim=True)
            want = (given["x"].float() * copies).to(given["x"].dtype)
            assert_same(buffer.combine(got.recv_x, got.handle).x, want + 0.0)
    return made


@pytest.mark.processes
def test_any_number_of_tokens_after_any_other(processes: Pools) -> None:
    for made in processes(2).run(grow):
        assert 1 <= made < 8  # where a block is too small, or far too large, the engine goes on


def leave_and_go_on(group: Any, phase: int) -> list[Tensor]:
    """Rank 1 leaves its compiled calls at this phase; the others do not."""
    out = []
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for turn in range(4):
            given = inputs(group.rank(), turn)
            compiled: Any = buffer._engine.compiled
            compiled.leave_at = phase if group.rank() == 1 else 0
            got: Any = buffer.dispatch(**given)
            y = got.recv_x if turn % 2 else got.recv_x.clone()
            out += [got.recv_x.clone(), buffer.combine(y, got.handle).x]
    return out


@pytest.mark.processes
@pytest.mark.parametrize("phase", [POSTED, HEARD])
def test_one_rank_leaves_a_compiled_call(phase: int, processes: Pools) -> None:
    wanted = processes(3).run(leave_and_go_on, 0)
    assert_same(processes(3).run(leave_and_go_on, phase), wanted)
