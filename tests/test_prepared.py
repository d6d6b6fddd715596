"""A prepared exchange: equal to `spec` on every transport, and what it promises beside."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.conformance import BASE, CASES, case_of
from tests.cases.lanes import at_night
from tests.cases.prepared import can, check, job
from tests.cases.processes import Pools
from tokenyard.testing import Exited, Processes, assert_same, poisoned, run_virtual

NAMES = [name for name in CASES if can(case_of(name, 2))]
LAYOUTS = pytest.mark.parametrize("by_expert", [True, False], ids=["by expert", "by source"])
SHAPE: dict[str, Any] = {"max_tokens": 4, "hidden": 8, "num_topk": 2, "num_experts": 4}


@LAYOUTS
@pytest.mark.parametrize("num_ranks", at_night([1, 2, 3, 5, 8], gate=(1, 3)))
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_share_memory(name: str, num_ranks: int, by_expert: bool) -> None:
    check_virtual(name, num_ranks, "direct", by_expert)


@LAYOUTS
@pytest.mark.parametrize("transport", ["auto", "ring", "collective", "hierarchical"])
@pytest.mark.parametrize("name", at_night(NAMES, gate=("plain", "two-a-node", "alignment")))
def test_other_transports(name: str, transport: str, by_expert: bool) -> None:
    check_virtual(name, 4, transport, by_expert)


def check_virtual(name: str, num_ranks: int, transport: str, by_expert: bool) -> None:
    case = replace(case_of(name, num_ranks), transport=transport)
    if transport != "auto":
        case = replace(case, kernels="numba")
    with poisoned():
        outs = run_virtual(job, num_ranks, case, by_expert).results
    check(case, by_expert, outs)


@LAYOUTS
@pytest.mark.parametrize("name", at_night(NAMES, gate=("plain", "holes")))
def test_17_virtual_ranks(name: str, by_expert: bool) -> None:
    case = replace(case_of(name, 17), transport="direct", kernels="numba")
    check(case, by_expert, run_virtual(job, 17, case, by_expert).results)


@LAYOUTS
@pytest.mark.parametrize(
    "placement",
    [(0, 0, 0, 0), (2, 0, 2, 2, 0, 2)],
    ids=["all-on-one-rank", "ranks-without-experts"],
)
def test_placement(placement: tuple[int, ...], by_expert: bool) -> None:
    case = replace(
        BASE, num_ranks=3, num_experts=len(placement), placement=placement, transport="direct"
    )
    check(case, by_expert, run_virtual(job, 3, case, by_expert).results)


@pytest.mark.processes
@LAYOUTS
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", at_night(NAMES, gate=("plain", "alignment", "long-rows")))
def test_processes(name: str, num_ranks: int, by_expert: bool, processes: Pools) -> None:
    case = replace(case_of(name, num_ranks), transport="direct", kernels="numba")
    check(case, by_expert, processes(num_ranks).run(job, case, by_expert))


def inputs(rank: int, num_tokens: int = 3, **changes: Any) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(rank)
    given = {
        "x": torch.randn(num_tokens, 8, generator=generator).to(torch.bfloat16),
        "topk_idx": torch.rand(num_tokens, 4, generator=generator).topk(2).indices,
        "topk_weights": torch.rand(num_tokens, 2, generator=generator),
    }
    given |= changes
    return given["x"], given["topk_idx"], given["topk_weights"]


def both(buffer: tokenyard.Buffer, step: Any, given: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor]:
    """The sums of a prepared exchange by expert, and those of the ordinary calls."""
    rows = step.dispatch(*given)
    ours = step.combine(rows.x * 2)
    got: Any = buffer.dispatch_by_expert(*given, num_experts=4)
    return ours, buffer.combine_by_expert(got.x * 2, got.handle)


BAD = {
    "too many tokens": (inputs(0, 5), "x has 5 tokens, want at most 4, which were prepared"),
    "hidden": (inputs(0, x=torch.zeros(3, 9, dtype=torch.bfloat16)), "hidden is 9, want 8"),
    "dtype": (inputs(0, x=torch.zeros(3, 8)), "dtype is torch.float32, want torch.bfloat16"),
    "top-k": (
        inputs(0, topk_idx=torch.zeros(3, 3, dtype=torch.int64), topk_weights=torch.zeros(3, 3)),
        "num_topk is 3, want 2",
    ),
    "a pair": (inputs(0, x=(torch.zeros(3, 8), torch.zeros(3, 1))), "x is a pair"),
    "no such expert": (
        inputs(0, topk_idx=torch.tensor([[0, 1], [2, 4], [1, 0]])),
        r"topk_idx\[1, 1\] is 4, want -1..3",
    ),
    "no weights": (inputs(0, topk_weights=None), "topk_weights"),
    "no ids": (inputs(0, topk_idx=None), "topk_idx is None"),
    "rows of ids": (inputs(0, topk_idx=torch.zeros(2, 2, dtype=torch.int64)), "topk"),
}


def bad_input(group: Any, by_expert: bool, given: Any) -> list[str]:
    """What is said where one rank gives bad input; afterwards all goes on."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(**SHAPE, by_expert=by_expert)
        said = []
        for culprit in range(2):
            mine = given if group.rank() == culprit else inputs(group.rank())
            try:
                step.dispatch(*mine)
            except ValueError as error:
                said.append(f"{type(error).__name__}: {error}")
        ours, want = both(buffer, buffer.prepare(**SHAPE), inputs(group.rank()))
        assert_same(ours, want)
        return said


@LAYOUTS
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_on_all_ranks(name: str, by_expert: bool) -> None:
    given, words = BAD[name]
    for rank, said in enumerate(run_virtual(bad_input, 2, by_expert, given).results):
        assert len(said) == 2
        assert said[rank].startswith("ValueError: dispatch")
        assert said[1 - rank].startswith("PeerInputError")
        for one in said:
            assert words.split("\\")[0].split(",")[0] in one


def bad_combine(group: Any, by_expert: bool) -> list[str]:
    said = []
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(**SHAPE, by_expert=by_expert)

        def refused(y: Any, **more: Any) -> None:
            with pytest.raises(ValueError) as caught:
                step.combine(y, **more)
            said.append(str(caught.value))

        refused(torch.zeros(1, 8, dtype=torch.bfloat16))
        rows = step.dispatch(*inputs(group.rank()))
        y = torch.ones_like(rows.x)
        refused(y[:-1])
        refused(y.float())
        refused(y[:, :-1])
        refused(None)
        refused(y, weigh=1)
        refused(y, out=torch.zeros(3, 8))
        refused(y, out=y[:3])
        assert step.combine(y).shape == (3, 8)
    return said


@LAYOUTS
def test_bad_combines_raise(by_expert: bool) -> None:
    for said in run_virtual(bad_combine, 2, by_expert).results:
        assert "combine before the first dispatch" in said[0]
        assert len(said) == 8


def different(group: Any, of_rank: list[dict[str, Any]]) -> str:
    """What is said where ranks have prepared, or call, something else."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        mine = dict(of_rank[group.rank()])
        ordinary = mine.pop("ordinary", False)
        step = buffer.prepare(**{**SHAPE, **mine})
        try:
            if ordinary:
                buffer.dispatch_by_expert(*inputs(0), num_experts=4)
            else:
                step.dispatch(*inputs(0))
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"by_expert": False}),
        ({"by_expert": False}, {"ordinary": True}),
    ],
    ids=str,
)
def test_ranks_that_prepared_something_else_raise(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    for said in run_virtual(different, 2, [first, second]).results:
        assert said.startswith("CallMismatch")


def mixed(group: Any, by_expert: bool) -> None:
    """A rank may make the ordinary calls where others have prepared theirs, with any max_tokens."""
    rank = group.rank()
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(**{**SHAPE, "max_tokens": 3 + rank, "by_expert": by_expert})
        for turn in range(6):
            given = inputs(turn + rank)

            def ordinary(given: Any = given) -> tuple[Any, Any, Any]:
                if by_expert:
                    got: Any = buffer.dispatch_by_expert(*given, num_experts=4)
                    sums = buffer.combine_by_expert(got.x, got.handle)
                    return got.x, got.num_tokens_per_expert, sums
                x, ids, weights = given
                one: Any = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=4)
                sums = buffer.combine(one.recv_x, one.handle).x
                return one.recv_x, one.num_recv_tokens_per_expert_list, sums

            want = ordinary()
            if (turn + rank) % 3:
                rows = step.dispatch(*given)
                assert_same((rows.x, rows.num_tokens_per_expert, step.combine(rows.x)), want)
            else:
                assert_same(ordinary(), want)


@LAYOUTS
def test_some_ranks_may_make_ordinary_calls(by_expert: bool) -> None:
    run_virtual(mixed, 3, by_expert)


class Kind(Tensor):
    """A kind of tensor of its own."""


@torch.no_grad()
def unusual(group: Any, by_expert: bool) -> None:
    """Tensors that are not plain are made plain."""
    rank = group.rank()
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(**SHAPE, by_expert=by_expert)
        x, ids, weights = inputs(rank)
        want = step.dispatch(x, ids, weights).x.clone()
        sums = step.combine(want)
        wide = torch.zeros(3, 16, dtype=torch.bfloat16)
        wide[:, ::2] = x
        for given in (
            (wide[:, ::2], ids, weights),
            (x, ids.t().contiguous().t(), weights.t().contiguous().t()),
            (torch._neg_view(-x), ids, weights),
            (torch.nn.Parameter(x), ids, weights),
            (x.as_subclass(Kind), ids.as_subclass(Kind), weights.as_subclass(Kind)),
            (x.clone().requires_grad_(), ids, weights.clone().requires_grad_()),
        ):
            assert_same(step.dispatch(*given).x, want)
            assert not step.combine(want.clone().requires_grad_()).requires_grad
            assert_same(step.combine(torch._neg_view(-want)), sums)
            assert_same(step.combine(want.as_subclass(Kind)), sums)
            assert_same(step.combine(torch.stack([want, want], 2)[:, :, 1]), sums)


@LAYOUTS
def test_unusual_tensors(by_expert: bool) -> None:
    run_virtual(unusual, 3, by_expert)


def results_are_kept(group: Any) -> None:
    """Sums stay as they were whatever comes, and whatever is done to tensors that were handed out
    changes no later ones.
    """
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(max_tokens=40, hidden=1024, num_topk=2, num_experts=4)
        kept = []
        for turn in range(6):
            tokens = 40 - turn
            generator = torch.Generator().manual_seed(turn)
            x = torch.randn(tokens, 1024, generator=generator).to(torch.bfloat16)
            ids = torch.rand(tokens, 4, generator=generator).topk(2).indices
            rows = step.dispatch(x, ids, torch.ones(tokens, 2))
            sums = step.combine(rows.x)
            kept.append((sums, sums.clone(), rows.num_tokens_per_expert))
            assert rows.offsets is not None
            rows.offsets.resize_(0)
            rows.x.resize_(0)
        for sums, copy, per_expert in kept:
            assert_same(sums, copy)
            assert sum(per_expert) > 0


def test_sums_are_the_callers() -> None:
    run_virtual(results_are_kept, 2)


def in_inference_mode(group: Any, by_expert: bool) -> None:
    """What was first used in inference mode can be used outside of it, and the other way round."""
    with tokenyard.Buffer(group, transport="direct") as buffer:
        with torch.inference_mode(group.rank() == 1):
            step = buffer.prepare(**SHAPE, by_expert=by_expert)
        for turn in range(6):
            with torch.inference_mode(turn in (1, 2)):
                rows = step.dispatch(*inputs(turn))
                rows.x.mul_(2)
                sums = step.combine(rows.x)
                sums.mul_(2)
        weight = torch.ones(8, requires_grad=True, dtype=torch.bfloat16)
        (rows.x * weight).sum().backward()


@LAYOUTS
def test_inference_mode(by_expert: bool) -> None:
    run_virtual(in_inference_mode, 2, by_expert)


def to_one_rank(group: Any, prepared: bool) -> None:
    """All tokens go to one rank, which has prepared for fewer than the others."""
    rank, size = group.rank(), group.size()
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(**{**SHAPE, "max_tokens": 2 if rank == 0 else 40})
        for turn in range(4):
            given = inputs(rank, 1 if rank == 0 else 10 * (turn + 1))
            given[1].copy_(torch.tensor([0, 1]))
            want: Any = buffer.dispatch_by_expert(*given, num_experts=4)
            sums = buffer.combine_by_expert(want.x, want.handle)
            assert len(want.x) == (0 if rank else 2 * (1 + (size - 1) * 10 * (turn + 1)))
            if prepared:
                rows = step.dispatch(*given)
                assert_same(rows.x, want.x)
                assert_same(step.combine(rows.x), sums)


@pytest.mark.parametrize("prepared", [True, False])
def test_more_rows_than_a_rank_sends(prepared: bool) -> None:
    run_virtual(to_one_rank, 2, prepared)


def rebalanced(group: Any) -> None:
    rank = group.rank()
    with tokenyard.Buffer(group, transport="direct") as buffer:
        step = buffer.prepare(**SHAPE)
        assert_same(*both(buffer, step, inputs(rank)))
        buffer.rebalance(torch.tensor([1, 0, 1, 0]))
        assert_same(*both(buffer, step, inputs(rank)))
        rows = step.dispatch(*inputs(rank))
        got: Any = buffer.dispatch_by_expert(*inputs(rank), num_experts=4)
        assert_same(rows.x, got.x)


def test_experts_may_move() -> None:
    run_virtual(rebalanced, 2)


def with_replicas(group: Any) -> None:
    slots = tokenyard.Replicas([[0, 1, 2], [3, 0, 2]])
    with tokenyard.Buffer(group, transport="direct", placement=slots) as buffer:
        for turn in range(3):
            given = inputs(10 * turn + group.rank())
            assert_same(*both(buffer, buffer.prepare(**SHAPE), given))


def test_experts_with_copies() -> None:
    run_virtual(with_replicas, 2)


def closed(group: Any) -> str:
    buffer = tokenyard.Buffer(group, transport="direct")
    step = buffer.prepare(**SHAPE)
    step.combine(step.dispatch(*inputs(0)).x)
    buffer.close()
    try:
        step.dispatch(*inputs(0))
    except tokenyard.BufferClosed as error:
        return str(error)
    return "nothing"


def test_a_closed_buffer_refuses() -> None:
    for said in run_virtual(closed, 2).results:
        assert "closed" in said


def held_by_its_step(group: Any) -> Tensor:
    step = tokenyard.Buffer(group, transport="direct").prepare(**SHAPE)
    return step.combine(step.dispatch(*inputs(0)).x)


def test_a_step_keeps_its_buffer() -> None:
    first, second = run_virtual(held_by_its_step, 2).results
    assert_same(first, second)


def dies(group: Any) -> str:
    """Rank 1 is gone after the first call; the others name it."""
    buffer = tokenyard.Buffer(group, transport="direct", timeout=scaled(20))
    step = buffer.prepare(**SHAPE)
    try:
        rows = step.dispatch(*inputs(0))
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step.combine(rows.x)
    except tokenyard.PeerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.processes
def test_a_rank_that_dies_is_named() -> None:
    with Processes(3) as ranks:
        first, second, third = ranks.run(dies, may_die=True)
    assert isinstance(second, Exited)
    for said in (first, third):
        assert said.startswith("PeerDied")
        assert "rank 1" in said


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"max_tokens": 0}, "max_tokens is 0, want at least 1"),
        ({"hidden": "8"}, "hidden is '8', want an integer"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn"),
        ({"by_expert": 1}, "by_expert is 1, want True or False"),
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"num_experts": 0}, "num_experts is 0"),
    ],
)
def test_bad_shapes(wrong: dict[str, Any], words: str) -> None:
    def refuses(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer, pytest.raises(ValueError) as caught:
            buffer.prepare(**{**SHAPE, **wrong})
        assert words in str(caught.value)

    run_virtual(refuses, 1)
