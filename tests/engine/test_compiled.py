"""Compiled calls: which calls they make, what they leave to the engine, and what they keep."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.compiled import (
    OTHER,
    PLAIN,
    TENSORS,
    both_ways,
    inputs,
    leave_and_go_on,
    way_of,
    which_are_compiled,
)
from tests.cases.inside import HEARD, NOWHERE, POSTED
from tests.cases.processes import Pools
from tokenyard.testing import assert_same, run_virtual


def test_plain_calls_are_compiled() -> None:
    for answer in run_virtual(which_are_compiled, 2, PLAIN).results:
        assert answer == dict.fromkeys(PLAIN, True)


def test_other_calls_are_the_engines() -> None:
    for answer in run_virtual(which_are_compiled, 2, OTHER).results:
        assert answer == dict.fromkeys(OTHER, False)


@torch.no_grad()
def by_expert(group: Any, changes: Iterable[str]) -> dict[str, bool]:
    """Which calls of few rows by expert are compiled."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        buffer.dispatch_by_expert(**inputs(group.rank()))  # in one step, since it is the first
        out = {}
        for name in changes:
            given = inputs(group.rank())
            given |= {**PLAIN, **TENSORS}[name](given)
            given.pop("config", None)
            buffer.stats(reset=True)
            got: Any = buffer.dispatch_by_expert(**given)
            y = torch.zeros(got.x[0].shape if isinstance(got.x, tuple) else got.x.shape)
            for weigh in (True, False):
                sums = buffer.combine_by_expert(y, got.handle, weigh=weigh)
                into = torch.empty_like(sums)
                buffer.combine_by_expert(y, got.handle, weigh=weigh, out=into)
            compiled = sum(each["compiled"] for each in buffer.stats()["ways"].values())
            assert compiled in (0, 5)
            out[name] = compiled == 5
        return out


def test_plain_calls_by_expert_are_compiled() -> None:
    for answer in run_virtual(by_expert, 2, PLAIN).results:
        assert answer == dict.fromkeys(PLAIN, True)


def test_other_calls_by_expert_are_compiled_too() -> None:
    """Tensors that are not plain are made so first, and scales of FP8 go with their rows."""
    for answer in run_virtual(by_expert, 2, TENSORS).results:
        assert answer == dict.fromkeys(TENSORS, True)


def test_a_switch_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENYARD_COMPILED_CALLS", "0")
    run = run_virtual(which_are_compiled, 2, PLAIN)
    assert run.results == [dict.fromkeys(PLAIN, False)] * 2


@torch.no_grad()
def between_larger_calls(group: Any) -> list[bool]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        seen = []
        for _ in range(4):
            buffer.dispatch(**inputs(group.rank()))
            seen.append(way_of(buffer) == "compiled")
            buffer.all_gather(torch.zeros(2000, 40))
        return seen


def test_a_call_of_another_shape_between_two_changes_nothing() -> None:
    """The first call of a shape may find too little room."""
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
    run_virtual(both_ways, 3, (3,))


def grow(group: Any) -> int:
    """More and more rows arrive, until a block, and a ledger, are too small again and again."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for turn, num_tokens in enumerate([1, 40, 3, 700, 2, 699, 5000, 1]):
            given = inputs(group.rank(), turn, num_tokens, hidden=64)
            got: Any = buffer.dispatch(**given)
            copies = got.handle.is_token_in_rank.sum(1, keepdim=True)
            want = (given["x"].float() * copies).to(given["x"].dtype)
            assert_same(buffer.combine(got.recv_x, got.handle).x, want + 0.0)
        return int(buffer.stats()["ways"]["dispatch"]["compiled"])


@pytest.mark.processes
def test_any_number_of_tokens_after_any_other(processes: Pools) -> None:
    for made in processes(2).run(grow):
        assert 4 <= made < 8  # where a block is too small, the engine goes on


def wander(group: Any, by_expert: bool) -> list[int]:
    """Sizes as they come to a server: how many of its calls were compiled, of each hundred."""
    sizes = random.Random(7)
    told = []
    with tokenyard.Buffer(group, transport="direct") as buffer:
        call = buffer.dispatch_by_expert if by_expert else buffer.dispatch
        stage = "dispatch by expert" if by_expert else "dispatch"
        for turn in range(300):
            call(**inputs(group.rank(), turn, sizes.randint(1, 64), hidden=64))
            if turn % 100 == 99:
                told.append(int(buffer.stats(reset=True)["ways"][stage]["compiled"]))
    return told


@pytest.mark.processes
@pytest.mark.parametrize("by_expert", [False, True], ids=["by rank", "by expert"])
def test_calls_of_changing_sizes_stay_compiled(by_expert: bool, processes: Pools) -> None:
    for told in processes(2).run(wander, by_expert):
        assert min(told[1:]) >= 90, told


def keep_small_after_large(group: Any) -> tuple[int, int]:
    """Bytes of shared results, with one large result and after a hundred small ones are kept."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        got = buffer.dispatch(**inputs(group.rank(), 0, 4000, hidden=512))
        large = buffer.stats()["memory"]["results"]
        del got
        kept = [buffer.dispatch(**inputs(group.rank(), turn, 2, hidden=512)) for turn in range(100)]
        return large, buffer.stats()["memory"]["results"] - 100 * (len(kept) << 10)


@pytest.mark.processes
def test_small_results_that_are_kept_do_not_keep_large_memory(processes: Pools) -> None:
    for large, after in processes(2).run(keep_small_after_large):
        assert after < 4 * large, (large, after)


@pytest.mark.processes
@pytest.mark.parametrize("phase", [POSTED, HEARD])
def test_one_rank_leaves_a_compiled_call(phase: int, processes: Pools) -> None:
    wanted = processes(3).run(leave_and_go_on, (3,), NOWHERE)
    assert_same(processes(3).run(leave_and_go_on, (3,), phase), wanted)
