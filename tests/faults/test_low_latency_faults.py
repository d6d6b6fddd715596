"""The low-latency mode with bad input, and with ranks that die, stall, or are left out."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.low_latency_rounds import Rounds
from tests.cases.peers import kill_once_stopped
from tests.cases.processes import Pools
from tokenyard.testing import Exited, Processes, run_virtual

pytestmark = pytest.mark.faults


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


def tokens(num_tokens: int = 2, hidden: int = 16, **changes: Any) -> dict[str, Any]:
    given = {
        "x": torch.ones(num_tokens, hidden),
        "topk_idx": torch.tensor([[0, 1]] * num_tokens).view(-1, 2),
        "num_max_dispatch_tokens_per_rank": 4,
        "num_experts": 6,
        "use_fp8": False,
    }
    return {**given, **changes}


# What rank 1 gives, and what it is told.
BAD_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "too-many": (tokens(5), "x has 5 tokens, want at most 4 (num_max_dispatch_tokens_per_rank)"),
    "no-tensor": (tokens(x=None), "x is None, want a torch.Tensor"),
    "no-hidden": (tokens(hidden=0), "x has hidden size 0, want at least 1"),
    "no-integer": (
        tokens(num_max_dispatch_tokens_per_rank=2.5),
        "num_max_dispatch_tokens_per_rank is 2.5, want an integer",
    ),
    "no-number": (tokens(num_experts=[6]), "num_experts is [6], want an integer"),
    "past-the-end": (
        tokens(topk_idx=torch.tensor([[0, 1], [6, 2]])),
        "topk_idx[1, 0] is 6, want -1..5 (num_experts=6)",
    ),
    "below": (
        tokens(topk_idx=torch.tensor([[0, 1], [2, -2]])),
        "topk_idx[1, 1] is -2, want -1..5 (num_experts=6)",
    ),
    "twice": (
        tokens(topk_idx=torch.tensor([[0, 1], [3, 3]])),
        "topk_idx[1] names expert 3 2 times, want once at most",
    ),
    "other-tokens": (
        tokens(topk_idx=torch.tensor([[0, 1]])),
        "topk_idx has shape [1, 2], want [2, topk]",
    ),
    "int32": (
        tokens(topk_idx=torch.ones(2, 2, dtype=torch.int32)),
        "topk_idx has dtype int32, want int64",
    ),
    "fp8-of-16": (tokens(use_fp8=True), "x has hidden size 16, want a multiple of 128 in FP8"),
    "ue8m0-alone": (
        tokens(use_fp8=True, use_ue8m0=True),
        "use_ue8m0 is True with round_scale=False, want round_scale=True",
    ),
    "hook-and-event": (
        tokens(return_recv_hook=True, async_finish=True),
        "async_finish and return_recv_hook are both True, want one at most",
    ),
    "stats": (
        tokens(dispatch_wait_recv_cost_stats=torch.zeros(2)),
        "wait_recv_cost_stats has shape [2], want [3]",
    ),
    "totals": (
        tokens(cumulative_local_expert_recv_stats=torch.zeros(2)),
        "cumulative_local_expert_recv_stats has dtype float32, want int32",
    ),
}

Change = Callable[[dict[str, Any]], dict[str, Any]]
BAD_ROWS: dict[str, tuple[Change, str]] = {
    "shape": (
        lambda given: {"x": given["x"][:, 1:]},
        "x has shape [2, 11, 16], want [2, 12, 16]",
    ),
    "dtype": (
        lambda given: {"x": given["x"].int()},
        "x has dtype int32, want float64, float32, float16, bfloat16",
    ),
    "handle": (
        lambda given: {"handle": tuple(given["handle"])},
        "handle is a tuple, want the handle that low_latency_dispatch returned",
    ),
    "unsent": (
        lambda given: {"topk_idx": torch.tensor([[0, 1], [0, 2]])},
        "topk_idx[1, 1] is 2, want an expert that the token had in dispatch, or -1",
    ),
    "topk": (
        lambda given: {"topk_idx": torch.zeros(2, 3).long()},
        "topk_idx has top-k 3, want 2, that of the dispatch",
    ),
    "weights": (
        lambda given: {"topk_weights": torch.ones(2, 2).double()},
        "topk_weights has dtype float64, want float32",
    ),
    "out": (
        lambda given: {"out": torch.ones(2, 8)},
        "out has shape [2, 8], want [2, 16]",
    ),
}


def bad_tokens(group: Any, transport: str) -> list[str]:
    told = []
    with tokenyard.Buffer(
        group, low_latency_mode=True, transport=transport, timeout=scaled(60)
    ) as buffer:
        rounds = Rounds(buffer)
        rounds.check(0)
        for turn, (given, _) in enumerate(BAD_TOKENS.values()):
            good = tokens(return_recv_hook=turn % 2 == 1)
            with pytest.raises(ValueError) as caught:
                receive(buffer, given if group.rank() == 1 else good)
            told.append(f"{type(caught.value).__name__}: {caught.value}")
            rounds.check(turn)
    return told


def receive(buffer: tokenyard.Buffer, given: dict[str, Any]) -> None:
    got = buffer.low_latency_dispatch(**given)
    if got.hook is not None:
        got.hook()


def bad_rows(group: Any, transport: str) -> list[str]:
    told = []
    with tokenyard.Buffer(
        group, low_latency_mode=True, transport=transport, timeout=scaled(60)
    ) as buffer:
        rounds = Rounds(buffer)
        for turn, (change, _) in enumerate(BAD_ROWS.values()):
            got: Any = buffer.low_latency_dispatch(**tokens())
            given = {
                "x": got.recv_x.clone(),
                "topk_idx": torch.tensor([[0, 1]] * 2),
                "topk_weights": torch.ones(2, 2),
                "handle": got.handle,
            }
            changed = {**given, **change(given)} if group.rank() == 1 else given
            with pytest.raises(ValueError) as caught:
                buffer.low_latency_combine(**changed)
            told.append(f"{type(caught.value).__name__}: {caught.value}")
            again = buffer.low_latency_combine(**given)  # the handle is as good as before
            assert torch.equal(again.combined_x, torch.full((2, 16), 2.0))
            rounds.check(turn)
            del got
    return told


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "collective"])
@pytest.mark.parametrize("job, cases", [(bad_tokens, BAD_TOKENS), (bad_rows, BAD_ROWS)])
def test_bad_input_of_one_rank_raises_on_all(
    ranks: Processes, job: Any, cases: dict[str, tuple[Any, str]], transport: str
) -> None:
    stage = "low-latency dispatch" if job is bad_tokens else "low-latency combine"
    for rank, told in enumerate(ranks.run(job, transport)):
        for got, (_, text) in zip(told, cases.values(), strict=True):
            whole = f"{stage}: {text}, on rank 1"
            if rank == 1:
                assert got == f"ValueError: {whole}"
            else:
                before = "PeerInputError: rank 1 rejected its input, so no rank went on: "
                assert got == before + whole


def first_call_is_bad(group: Any) -> str:
    with tokenyard.Buffer(group, low_latency_mode=True, transport="collective") as buffer:
        with pytest.raises(ValueError) as caught:
            buffer.low_latency_dispatch(**tokens(5 if group.rank() == 1 else 2))
        Rounds(buffer).check(1)
        return str(caught.value)


def test_bad_input_before_ranks_have_agreed_on_sizes() -> None:
    texts = run_virtual(first_call_is_bad, 3).results
    assert texts[1].startswith("low-latency dispatch: x has 5 tokens, want at most 4")
    assert texts[0] == texts[2] == f"rank 1 rejected its input, so no rank went on: {texts[1]}"


def refused_locally(group: Any) -> None:
    with tokenyard.Buffer(group) as buffer:
        assert not buffer.low_latency_mode
        with pytest.raises(ValueError, match="low_latency_mode is False, want Buffer"):
            buffer.low_latency_dispatch(**tokens())
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        with pytest.raises(ValueError, match="enable_shrink is False, want Buffer"):
            buffer.low_latency_update_mask_buffer(0, True)
        got: Any = buffer.low_latency_dispatch(**tokens())
        idx, weights = torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        with pytest.raises(ValueError, match=r"use_logfmt=True, want torch\.bfloat16"):
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, use_logfmt=True)
        buffer.clean_low_latency_buffer(4, 16, 6)
        answer = buffer.low_latency_combine(got.recv_x, idx, weights, got.handle)
        assert answer.combined_x.sum() == 2 * 2 * 16
    with tokenyard.Buffer(group, low_latency_mode=True) as other:
        assert other.low_latency_mode
        with pytest.raises(ValueError, match="on another Buffer or rank"):
            other.get_next_low_latency_combine_buffer(got.handle)
    with pytest.raises(tokenyard.BufferClosed):
        other.low_latency_dispatch(**tokens())


def test_what_raises_at_once() -> None:
    run_virtual(refused_locally, 2)


@pytest.mark.processes
def test_private_rows_are_no_zero_copy(ranks: Processes) -> None:
    for text in ranks.run(private_rows):
        assert "x is not the tensor of get_next_low_latency_combine_buffer" in text


def private_rows(group: Any) -> str:
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        got: Any = buffer.low_latency_dispatch(**tokens())
        idx, weights = torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        with pytest.raises(ValueError) as caught:
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle, zero_copy=True)
        return str(caught.value)


def other_sizes(group: Any) -> list[str]:
    told, is_odd = [], group.rank() == 1
    changes: list[dict[str, Any]] = [
        {"num_max_dispatch_tokens_per_rank": 5},
        {"hidden": 24},
        {"num_experts": 9},
        {"x": torch.ones(2, 16).bfloat16()},
        {"topk_idx": torch.tensor([[0], [1]])},
    ]
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        for change in changes:
            with pytest.raises(tokenyard.CallMismatch) as caught:
                buffer.low_latency_dispatch(**tokens(**(change if is_odd else {})))
            told.append(str(caught.value))
            Rounds(buffer).check(1)
        first = buffer.low_latency_dispatch(**tokens())
        second = buffer.low_latency_dispatch(**tokens())
        got: Any = second if is_odd else first
        idx, weights = torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        with pytest.raises(tokenyard.CallMismatch) as caught:
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle)
        told.append(str(caught.value))
    return told


@pytest.mark.processes
def test_calls_that_cannot_meet(ranks: Processes) -> None:
    told = ranks.run(other_sizes)
    assert told[0] == [
        "low-latency dispatch: ranks differ in num_max_dispatch_tokens_per_rank: 4 on rank 0, 5 "
        "on rank 1",
        "low-latency dispatch: ranks differ in hidden size: 16 on rank 0, 24 on rank 1",
        "low-latency dispatch: ranks differ in num_experts: 6 on rank 0, 9 on rank 1",
        "low-latency dispatch: ranks differ in dtype of x: float32 on rank 0, bfloat16 on rank 1",
        "low-latency dispatch: ranks differ in top-k: 2 on rank 0, 1 on rank 1",
        "low-latency combine: ranks differ in the handle (by the number of the call that made it): "
        "11 on rank 0, 12 on rank 1",
    ]
    assert all("on rank 1" in text for text in told[2])
    assert all(text.endswith("on rank 0") for text in told[1])


ORDERS: dict[str, tuple[str, str]] = {  # what rank 1 calls, and the others
    "dispatch": ("dispatch", "low-latency dispatch"),
    "low-latency dispatch": ("low-latency dispatch", "dispatch"),
    "combine": ("low-latency combine", "low-latency dispatch"),
    "normal combine": ("combine", "low-latency combine"),
    "sizes": ("other sizes", "low-latency dispatch"),
    "handle": ("other handle", "low-latency combine"),
}


def out_of_order(group: Any, transport: str) -> list[str]:
    """Each of the orders, after calls that went well, and calls that go well after each."""
    nodes, told = 2 if transport == "hierarchical" else None, []
    with tokenyard.Buffer(
        group, transport=transport, ranks_per_node=nodes, low_latency_mode=True, timeout=scaled(60)
    ) as buffer:
        rounds = Rounds(buffer)
        idx, weights = torch.tensor([[0, 1]] * 2), torch.ones(2, 2)

        def normal() -> Any:
            return buffer.dispatch(
                torch.ones(2, 16), topk_idx=idx, topk_weights=weights, num_experts=6
            )

        for turn, (odd, usual) in enumerate(ORDERS.values()):
            rounds.check(turn)
            got, rows = rounds.dispatch(turn), normal()
            later = rounds.dispatch(turn) if odd == "other handle" else None
            calls: dict[str, Callable[[], Any]] = {
                "dispatch": normal,
                "combine": partial(buffer.combine, rows.recv_x, rows.handle),
                "low-latency dispatch": partial(rounds.dispatch, turn),
                "low-latency combine": partial(rounds.combine, got, turn),
                "other sizes": partial(buffer.low_latency_dispatch, **tokens(num_experts=9)),
                "other handle": partial(rounds.combine, later, turn),
            }
            del got, later
            with pytest.raises(tokenyard.CallMismatch) as caught:
                calls[odd if group.rank() == 1 else usual]()
            told.append(str(caught.value))
            del calls, caught
            rounds.check(turn)
            combined = buffer.combine(rows.recv_x, rows.handle).x
            assert torch.equal(combined, torch.ones(2, 16)), f"turn {turn}"
    return told


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["collective", "hierarchical"])
def test_calls_out_of_order_where_ranks_share_no_memory(transport: str) -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        answers = ranks.run(out_of_order, transport, may_die=True)
    for rank, told in enumerate(answers):
        assert isinstance(told, list), f"rank {rank}: {told}"
        for text, (odd, usual) in zip(told, ORDERS.values(), strict=True):
            if odd == "other sizes":
                assert "ranks differ in num_experts" in text
            elif odd == "other handle":
                assert "ranks differ in the handle" in text
            else:
                mine, theirs = (odd, usual) if rank == 1 else (usual, odd)
                other = 0 if rank == 1 else 1
                said = f"what they call: {mine} on rank {rank}, {theirs} on rank {other}"
                assert text == f"{mine}: ranks differ in {said}"


def go_on(group: Any, victim: int, death: float, further: int) -> tuple[int, int, float]:
    """Rounds until the victim is left out, and so many more; every sum is over who is left in."""
    with tokenyard.Buffer(
        group, low_latency_mode=True, enable_shrink=True, timeout=scaled(60)
    ) as buffer:
        rounds, rank = Rounds(buffer, num_experts=2 * group.size()), group.rank()
        rounds.check(0)
        if rank == victim:
            threading.Timer(death, os.kill, (os.getpid(), signal.SIGKILL)).start()
        status = torch.zeros(group.size(), dtype=torch.int32)

        def left_out() -> list[int]:
            buffer.low_latency_query_mask_buffer(status)
            return status.nonzero().flatten().tolist()

        turn, since, longest = 1, 0, 0.0
        while since < further:
            start = time.monotonic()
            got = rounds.dispatch(turn, return_recv_hook=turn % 2 == 0)
            if got.hook is not None:
                got.hook()
            rounds.check_received(got, turn, left_out())
            out = rounds.combine(got, turn).combined_x
            assert torch.equal(out, rounds.expected(turn, left_out())), f"turn {turn} on {rank}"
            assert left_out() in ([], [victim])
            since += bool(left_out())
            longest = max(longest, time.monotonic() - start)
            turn += 1
            del got
        return turn, since, longest


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "times, further", [(2, 50), pytest.param(10, 1000, marks=pytest.mark.slow)]
)
def test_others_go_on_without_a_rank_that_died(times: int, further: int) -> None:
    chance = random.Random(further)
    for turn in range(times):
        num_ranks = chance.randint(2, 5)
        victim = chance.randrange(num_ranks)
        with Processes(num_ranks, timeout=scaled(120)) as ranks:
            answers = ranks.run(go_on, victim, chance.uniform(0, 0.2), further, may_die=True)
        assert answers.pop(victim) == Exited(-signal.SIGKILL)
        for done, since, longest in answers:
            assert since == further, f"turn {turn}"
            print(f"{done} rounds, the longest {longest:.2f} s")
            assert longest < scaled(20)


def one_stops(group: Any, is_killed: bool) -> tuple[str, tuple[int, ...], float]:
    buffer = tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(3.0))
    rounds = Rounds(buffer)
    rounds.check(0)
    if group.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL if is_killed else signal.SIGSTOP)
    start = time.monotonic()
    got = rounds.dispatch(1, return_recv_hook=True)  # which needs nobody
    with pytest.raises(tokenyard.PeerError) as caught:
        got.hook()
    seconds = time.monotonic() - start
    with pytest.raises(tokenyard.BufferClosed):
        rounds.dispatch(2)
    return type(caught.value).__name__, caught.value.ranks, seconds


@pytest.mark.alone
@pytest.mark.processes
@pytest.mark.parametrize(
    "is_killed", at_night([True, False], gate=(True,)), ids=["killed", "stopped"]
)
def test_without_shrinking_all_are_told(is_killed: bool) -> None:
    with Processes(3, timeout=scaled(120)) as ranks:
        if not is_killed:
            stuck = ranks.processes[2].pid
            undertaker = threading.Thread(target=kill_once_stopped, args=(stuck, scaled(8.0)))
            undertaker.start()
        answers = ranks.run(one_stops, is_killed, may_die=True)
        if not is_killed:
            undertaker.join()
    for kind, named, seconds in answers[:2]:
        assert (kind, named) == ("PeerDied" if is_killed else "PeerTimeout", (2,))
        assert seconds < scaled(2.5 if is_killed else 20)


def one_oversleeps(group: Any) -> list[list[int]]:
    """Rank 2 comes back after the others have gone on without it, and is alone then."""
    with tokenyard.Buffer(
        group, low_latency_mode=True, enable_shrink=True, timeout=scaled(0.5)
    ) as buffer:
        rounds, seen = Rounds(buffer), []
        rounds.check(0)
        for turn in range(1, 40):
            if turn == 10 and group.rank() == 2:
                time.sleep(scaled(1.5))
            got = rounds.dispatch(turn)
            rounds.check_received(got, turn, masks(buffer))
            out = rounds.combine(got, turn).combined_x
            assert torch.equal(out, rounds.expected(turn, masks(buffer))), f"turn {turn}"
            seen.append(masks(buffer))
        return seen


def masks(buffer: tokenyard.Buffer) -> list[int]:
    status = torch.zeros(buffer.group_size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.nonzero().flatten().tolist()


@pytest.mark.alone
@pytest.mark.processes
def test_others_go_on_without_a_rank_that_is_late(ranks: Processes) -> None:
    for rank, seen in enumerate(ranks.run(one_oversleeps)):
        assert seen[0] == []
        assert seen[-1] == ([0, 1] if rank == 2 else [2])


def by_hand(group: Any) -> None:
    with tokenyard.Buffer(
        group, low_latency_mode=True, enable_shrink=True, timeout=scaled(60)
    ) as buffer:
        rounds, rank = Rounds(buffer), group.rank()

        def check(turn: int, left_out: list[int]) -> None:
            got = rounds.dispatch(turn)
            rounds.check_received(got, turn, left_out)
            out = rounds.combine(got, turn).combined_x
            assert torch.equal(out, rounds.expected(turn, left_out)), f"turn {turn} on {rank}"
            assert masks(buffer) == left_out

        check(0, [])
        with pytest.raises(ValueError, match="rank_to_mask is 3, want at most 2"):
            buffer.low_latency_update_mask_buffer(3, True)
        with pytest.raises(ValueError, match=r"rank_to_mask is \d, want another rank than this"):
            buffer.low_latency_update_mask_buffer(rank, True)
        if rank != 2:
            buffer.low_latency_update_mask_buffer(2, mask=True)
        else:  # it need not be told: others leave it out, and it sees that
            buffer.low_latency_update_mask_buffer(0, mask=True)
            buffer.low_latency_update_mask_buffer(1, mask=True)
        for turn in range(1, 20):
            check(turn, [0, 1] if rank == 2 else [2])
        buffer.low_latency_clean_mask_buffer()
        for turn in range(20, 40):
            check(turn, [])
        if rank == 1:
            buffer.low_latency_update_mask_buffer(0, mask=True)
            buffer.low_latency_update_mask_buffer(0)
        check(41, [])


@pytest.mark.processes
def test_masks_by_hand(ranks: Processes) -> None:
    ranks.run(by_hand)


def shrink_without_memory(group: Any) -> str:
    with pytest.raises(ValueError) as caught:
        tokenyard.Buffer(group, low_latency_mode=True, enable_shrink=True, transport="collective")
    return str(caught.value)


def test_nobody_is_left_out_of_a_collective() -> None:
    for text in run_virtual(shrink_without_memory, 2).results:
        assert text.startswith("enable_shrink is True on transport 'collective over loopback'")
