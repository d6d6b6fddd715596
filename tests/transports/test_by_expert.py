"""dispatch_by_expert and combine_by_expert equal `spec`, bit for bit, on every transport."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tokenyard
from tests.cases.by_expert import check, job
from tests.cases.conformance import BASE, CASES, case_of
from tests.cases.exchange import Case
from tests.cases.inside import little_is_much
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tokenyard.testing import assert_same, numbered_tokens, poisoned, routing, run_virtual
from tokenyard.transports import available

# Biases, a fixed number of rows and channels are no concern of these calls.
NAMES = [name for name in CASES if name not in ("worst-tokens", "one-channel")]
EVERY_CASE = pytest.mark.parametrize("name", NAMES)
FEW = ("plain", "fp8", "alignment", "holes", "no-tokens-on-some", "no-tokens-at-all", "two-a-node")
FEWER = at_night(FEW, gate=("fp8", "alignment", "no-tokens-on-some", "two-a-node"))


def check_virtual(case: Case) -> None:
    with poisoned():
        outs = run_virtual(job, case.num_ranks, case).results
    check(case, outs)


@pytest.mark.parametrize("num_ranks", at_night([1, 2, 5], gate=(1, 5)))
@EVERY_CASE
def test_virtual_ranks(name: str, num_ranks: int) -> None:
    check_virtual(case_of(name, num_ranks))


@pytest.mark.parametrize("transport", ["direct", "ring"])
@pytest.mark.parametrize("num_ranks", at_night([1, 3], gate=(3,)))
@EVERY_CASE
def test_virtual_ranks_that_share_memory(name: str, num_ranks: int, transport: str) -> None:
    case = replace(case_of(name, num_ranks), transport=transport, kernels="numba")
    check(case, run_virtual(job, num_ranks, case).results)


@pytest.mark.parametrize(
    "placement",
    [(0, 0, 0, 0), (3, 2, 1, 0, 0, 1, 2, 3), (2, 0, 2, 2, 0, 2)],
    ids=["all-on-one-rank", "interleaved", "ranks-without-experts"],
)
@pytest.mark.parametrize("transport", ["collective", "direct"])
def test_placement(placement: tuple[int, ...], transport: str) -> None:
    case = replace(
        BASE, num_ranks=4, num_experts=len(placement), placement=placement, transport=transport
    )
    check_virtual(replace(case, expert_alignment=4))


@pytest.mark.processes
@pytest.mark.parametrize("transport", available())
@pytest.mark.parametrize("name", FEWER)
def test_processes(name: str, transport: str, processes: Pools) -> None:
    case = replace(case_of(name, 4), transport=transport)
    if transport == "hierarchical":
        case = replace(case, ranks_per_node=2)
    check(case, processes(4).run(job, case))


@EVERY_CASE
def test_threads_move_rows(name: str) -> None:
    case = replace(case_of(name, 3), transport="direct", kernels="numba")
    with little_is_much():
        check(case, run_virtual(job, 3, case).results)


def aligned(group: Any, transport: str) -> tuple[Any, ...]:
    """Each rank has an alignment of its own, and memory that rows have lain in before."""
    with tokenyard.Buffer(group, transport=transport, kernels="numba") as buffer:
        topk_idx, weights = routing("uniform", 30, 2, 8, seed=buffer.rank)
        x = numbered_tokens(30, 64, first=1 + 100 * buffer.rank)
        for alignment in (1, 2 + 3 * buffer.rank):
            got: Any = buffer.dispatch_by_expert(
                x, topk_idx, weights, num_experts=8, expert_alignment=alignment
            )
            if alignment == 1:
                del got
        return got.x.clone(), got.offsets, got.num_tokens_per_expert


def test_ranks_may_align_differently() -> None:
    one, other = (run_virtual(aligned, 3, name).results for name in ("direct", "ring"))
    assert_same(one, other)
    for rank, (_, offsets, _) in enumerate(one):
        assert (offsets % (2 + 3 * rank) == 0).all()


def mixed(group: Any, transport: str) -> None:
    """Calls of all kinds, with more and fewer tokens, while others are on their way."""
    with tokenyard.Buffer(group, transport=transport) as buffer:
        for turn, num_tokens in enumerate((3, 700, 5, 0, 900, 900)):
            x = numbered_tokens(num_tokens, 512, first=1000 * (turn + 10 * buffer.rank))
            topk_idx, weights = routing("holes", num_tokens, 4, 8, seed=turn)
            routed: Any = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": 8}
            later: Any = buffer.dispatch(x, **routed, async_finish=True)
            rows: Any = buffer.dispatch_by_expert(x, **routed)
            later.event.current_stream_wait()
            want = tokenyard.permute(
                later.recv_x, later.recv_topk_idx, len(rows.num_tokens_per_expert)
            )
            assert_same(rows.x, want.x)
            assert_same(rows.offsets, want.offsets)
            share = tokenyard.unpermute(want.x, want.row_of, weights=later.recv_topk_weights)
            sums = buffer.combine(share, later.handle, async_finish=True)
            weights.zero_()  # the user's again
            got = buffer.combine_by_expert(rows.x, rows.handle)
            sums.event.current_stream_wait()
            assert_same(got, sums.x)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_among_other_calls(transport: str, processes: Pools) -> None:
    processes(2).run(mixed, transport)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "ring"])
def test_rows_that_are_streamed(transport: str, processes: Pools) -> None:
    """Long ones, more than a megabyte in all."""
    case = replace(BASE, num_ranks=2, tokens=(90, 70), hidden=1024, num_topk=6, expert_alignment=8)
    case = replace(case, transport=transport)
    check(case, processes(2).run(job, case))
