"""Calls where all ranks share memory: what they keep, whatever their sizes and tensors."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.compiled import OTHER, PLAIN, TENSORS, fields, inputs
from tests.cases.inside import little_is_much
from tests.cases.processes import Pools
from tokenyard.testing import assert_same, run_virtual


@torch.no_grad()
def all_kinds(group: Any) -> dict[str, list[Any]]:
    """What every kind of dispatch brings, and its combine."""
    out = {}
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for name, change in {**PLAIN, **OTHER}.items():
            given = inputs(group.rank())
            got: Any = buffer.dispatch(**{**given, **change(given)})
            if name == "asynchronous":
                got.event.current_stream_wait()
            received = got.recv_x[0] if isinstance(got.recv_x, tuple) else got.recv_x
            y = received.float()
            sums = buffer.combine(y, got.handle, got.recv_topk_weights)
            later = buffer.combine(y, got.handle, got.recv_topk_weights, async_finish=True)
            later.event.current_stream_wait()
            assert_same([*later[:2]], [*sums[:2]])
            out[name] = [*got[1:4], y, *sums[:2]]
        return out


def test_calls_of_all_kinds_bring_the_same() -> None:
    """Tensors that are not plain, rows that move later, and rows that threads move."""
    for answer in run_virtual(all_kinds, 2).results:
        for name in (*TENSORS, "asynchronous", "after an event", "tagged", "another config"):
            if name not in ("with scales", "negated"):
                assert_same(answer[name], answer["as it is"], name)
    once = run_virtual(all_kinds, 2).results
    with little_is_much():
        shared = run_virtual(all_kinds, 2).results
    for one, other in zip(shared, once, strict=True):
        assert_same(list(one.values()), list(other.values()))


@torch.no_grad()
def by_expert(group: Any) -> dict[str, list[Tensor]]:
    with tokenyard.Buffer(group, transport="direct") as buffer:
        out = {}
        for name, change in {**PLAIN, **TENSORS}.items():
            given = inputs(group.rank())
            given |= change(given)
            given.pop("config", None)
            got: Any = buffer.dispatch_by_expert(**given)
            x = got.x[0] if isinstance(got.x, tuple) else got.x
            out[name] = [x, got.offsets]
            for weigh in (True, False):
                sums = buffer.combine_by_expert(x.float(), got.handle, weigh=weigh)
                into = torch.empty_like(sums)
                buffer.combine_by_expert(x.float(), got.handle, weigh=weigh, out=into)
                assert_same(into, sums)
                out[name].append(sums)
        return out


def test_tensors_of_all_kinds_bring_the_same_by_expert() -> None:
    for answer in run_virtual(by_expert, 2).results:
        for name in (*TENSORS, "tagged"):
            if name not in ("with scales", "negated"):
                assert_same(answer[name], answer["as it is"], name)


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


def handles(group: Any) -> list[Any]:
    """Handles, as they are and copied, serve the same calls."""
    rank, out = group.rank(), []
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for turn, dtype in enumerate([torch.bfloat16, torch.float16, torch.float32, torch.float64]):
            given = inputs(rank, turn, num_tokens=(turn * 3 + rank * 5) % 9)
            given |= {"x": given["x"].to(dtype), "expert_alignment": 1 + turn % 2}
            given |= {"num_worst_tokens": 40 * (turn % 2)}
            got: Any = buffer.dispatch(**given)
            y = got.recv_x * 2
            want = buffer.combine(y, got.handle).x
            known = fields(got.handle)
            out += [want, known]
            for handle in (
                replace(got.handle, hidden=40),
                copy.deepcopy(got.handle),
                pickle.loads(pickle.dumps(got.handle)),
            ):
                assert_same(buffer.combine(y, handle).x, want)
                assert_same(buffer.dispatch(given["x"], handle=handle).recv_x, got.recv_x)
                assert_same(fields(handle), known)
    return out


def test_copies_of_handles_serve_the_same_calls() -> None:
    run_virtual(handles, 3)


def grow(group: Any) -> dict[str, int]:
    """More and more rows arrive, until a block, and a ledger, are too small again and again."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for turn, num_tokens in enumerate([1, 40, 3, 700, 2, 699, 5000, 1]):
            given = inputs(group.rank(), turn, num_tokens, hidden=64)
            got: Any = buffer.dispatch(**given)
            copies = got.handle.is_token_in_rank.sum(1, keepdim=True)
            want = (given["x"].float() * copies).to(given["x"].dtype)
            assert_same(buffer.combine(got.recv_x, got.handle).x, want + 0.0)
        return buffer.stats()["ways"]["dispatch"]


@pytest.mark.processes
def test_any_number_of_tokens_after_any_other(processes: Pools) -> None:
    for made in processes(2).run(grow):
        assert made == {"compiled": 8, "enclosed": 0, "general": 0}


def many_experts(group: Any) -> None:
    """More counts than fit a message."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        for num_experts in (8, 300, 2000):
            x = torch.arange(5.0).repeat(7, 1).T.contiguous() + group.rank()
            idx = torch.randint(0, num_experts, (5, 3))
            weights = torch.rand(5, 3)
            got: Any = buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_experts=num_experts
            )
            own = buffer.get_local_experts(num_experts)
            counts = torch.tensor(got.num_recv_tokens_per_expert_list)
            told = buffer.all_gather(idx).x
            assert_same(counts, torch.bincount(told.flatten(), minlength=num_experts)[own])
            copies = got.handle.is_token_in_rank.sum(1, keepdim=True)
            assert_same(buffer.combine(got.recv_x, got.handle).x, x * copies)


def test_more_counts_than_fit_a_message() -> None:
    run_virtual(many_experts, 2)


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
