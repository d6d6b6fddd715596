"""Buffers with a balance equal `spec`, bit for bit, on every transport; and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.balance import check, draw_case, job
from tests.cases.lanes import at_night, random_cases
from tests.cases.processes import Pools
from tokenyard import CallMismatch, PeerInputError
from tokenyard.testing import assert_same, routing, run_virtual

TRANSPORTS = pytest.mark.parametrize("transport", ["direct", "ring", "collective", "hierarchical"])
ROUNDS = 5


@TRANSPORTS
@pytest.mark.parametrize("num_ranks", at_night(range(1, 9), gate=(2, 5)))
def test_virtual_ranks(transport: str, num_ranks: int) -> None:
    """At night 5,000 rounds, TOKENYARD_TEST_CASES=8 times as many as here."""
    for number in range(random_cases(4)):
        case = draw_case(1000 * num_ranks + number, transport, num_ranks, ROUNDS)
        check(case, run_virtual(job, num_ranks, case).results)


@TRANSPORTS
@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))
def test_processes(transport: str, num_ranks: int, processes: Pools) -> None:
    for number in range(2):
        case = draw_case(number, transport, num_ranks, ROUNDS)
        check(case, processes(num_ranks).run(job, case))


@TRANSPORTS
def test_calls_by_owner_come_between(transport: str) -> None:
    """The same bits as without a balance, before and after calls of that shape with it."""

    def job(group: Any, balance: float | None) -> list[Any]:
        ids, weights = routing("skewed", 40, 4, 10, seed=group.rank())
        x, got = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)), []
        with tokenyard.Buffer(group, transport=transport, balance=balance) as buffer:
            for balanced in (False, True, True, False, False):
                given: Any = {"num_experts": 10, "balanced": balanced}
                rows: Any = buffer.dispatch_by_expert(x, ids, weights, **given)
                sums = buffer.combine_by_expert(rows.x, rows.handle)
                if not balanced:
                    got.append([rows.x, rows.offsets, sums])
        return got

    plain, balanced = (run_virtual(job, 2, one).results for one in (None, 0.0))
    assert_same(balanced, plain)


def test_slots_are_told_from_as_many_experts() -> None:
    """3 experts of uneven nodes have 5 slots, and 5 experts live elsewhere than those."""

    def job(group: Any, first: bool) -> list[Any]:
        x, ids = torch.randn(6, 8), (torch.arange(6) % 5)[:, None]
        weights, got = torch.ones(6, 1), []
        with tokenyard.Buffer(
            group, transport="direct", ranks_per_node=[1, 2], balance=0.0
        ) as buffer:
            if first:
                few = torch.zeros_like(ids)
                buffer.dispatch_by_expert(x, few, weights, num_experts=3)
                buffer.dispatch(x, topk_idx=few, topk_weights=weights, num_experts=3)
            for _ in range(3):
                given: Any = {"num_experts": 5, "balanced": False}
                rows: Any = buffer.dispatch_by_expert(x, ids, weights, **given)
                got.append([list(rows.x.shape), rows.offsets])
                plain = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **given)
                got.append([plain.recv_topk_idx, plain.num_recv_tokens_per_expert_list])
            return [*got, buffer.stats()["expert_load"]]

    after, alone = (run_virtual(job, 3, first).results for first in (True, False))
    assert_same(after, alone)


def wrong_calls(group: Any) -> list[str]:
    """Calls with a fault on rank 1, after each of which the Buffer goes on."""
    told, rank = [], group.rank()
    x, ids = torch.ones(3, 8), torch.tensor([[0, 1], [1, 0], [0, 2]])
    weights = torch.ones(3, 2)
    buffer: Any
    with tokenyard.Buffer(group, balance="exact") as buffer:
        layout: Any = {"num_tokens_per_rank": torch.ones(2, dtype=torch.int32)}
        for wrong in (
            lambda: buffer.dispatch_by_expert(x, ids + 5, weights, num_experts=4),
            lambda: buffer.dispatch_by_expert(x.double(), ids, weights, num_experts=4),
            lambda: buffer.dispatch_by_expert(x, ids, weights, num_experts=5),
            lambda: buffer.dispatch_by_expert(x, ids, weights, num_experts=4, balanced=False),
            lambda: buffer.dispatch_by_expert(x, ids, weights, num_experts=4, expert_alignment=0),
            lambda: buffer.dispatch_by_expert(x, ids, weights, num_experts=4, balanced=1),
            lambda: buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout),
        ):
            for _ in range(2):  # with a plan that is found, too
                buffer.dispatch_by_expert(x, ids, weights, num_experts=4)
            try:
                if rank == 1:
                    wrong()
                else:
                    buffer.dispatch_by_expert(x, ids, weights, num_experts=4)
                told.append("nothing")
            except (CallMismatch, PeerInputError) as error:
                told.append(type(error).__name__)
            except ValueError as error:
                told.append(str(error))
        with pytest.raises(ValueError, match="has a balance, for which ranks count together"):
            buffer.get_dispatch_layout(ids, 4)
        got: Any = buffer.dispatch_by_expert(x, ids, weights, num_experts=4)
        again = buffer.dispatch_by_expert(x, ids, weights, num_experts=4)
        assert torch.equal(got.x, again.x)
        return told


@pytest.mark.parametrize("num_ranks", [2])
def test_bad_input_raises_on_all_ranks(num_ranks: int) -> None:
    first, second = run_virtual(wrong_calls, num_ranks).results
    assert "nothing" not in first + second
    peer = "PeerInputError"
    assert first == [peer, "CallMismatch", "CallMismatch", "CallMismatch", peer, peer, peer]
    assert "topk_idx[0, 0] is 5, want -1..3" in second[0]
    assert second[1:4] == ["CallMismatch"] * 3
    assert "balanced is 1, want True or False" in second[5]


def open_wrong(group: Any, options: dict[str, Any]) -> None:
    with tokenyard.Buffer(group, **options):
        pass


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"balance": -0.1}, "balance is -0.1, want 'exact' or the slack, 0 to 10"),
        ({"balance": True}, "balance is True, want 'exact'"),
        ({"balance": 0.1, "low_latency_mode": True}, "want neither low_latency_mode nor Replicas"),
        (
            {"balance": 0.1, "placement": tokenyard.Replicas([[0, 1], [1, 0]])},
            "want neither low_latency_mode nor Replicas",
        ),
    ],
)
def test_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_virtual(open_wrong, 2, options)


def count(group: Any) -> tuple[Any, Any]:
    with tokenyard.Buffer(group, kernels="reference", balance=0.05) as buffer:
        return buffer.balance, buffer.get_node_experts(4)


def test_where_no_memory_is_shared_experts_stay(caplog: pytest.LogCaptureFixture) -> None:
    assert run_virtual(count, 2).results == [(None, [0, 1]), (None, [2, 3])]
    assert "balance=0.05 has no effect, since ranks share no memory" in caplog.text
