"""What low-latency calls ask of their users, and of each other: order, lifetimes, counters."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.clock import scaled
from tests.cases.inside import worker_of
from tests.cases.low_latency_rounds import Rounds
from tests.cases.processes import Pools
from tokenyard.testing import Processes, run_virtual

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks(processes: Pools) -> Processes:
    return processes(3)


def one_call(group: Any, seconds: float) -> float:
    """A Buffer that is closed at once, while another rank still sleeps."""
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        idx = torch.arange(3)[None]
        if group.rank() == 2:
            time.sleep(seconds)
        got: Any = buffer.low_latency_dispatch(torch.ones(1, 64), idx, 1, 3, use_fp8=False)
        out = buffer.low_latency_combine(got.recv_x, idx, torch.ones(1, 3), got.handle)
    return out.combined_x.sum().item()


def test_a_buffer_may_be_closed_after_its_only_call(ranks: Processes) -> None:
    assert ranks.run(one_call, 0.5) == [3 * 64.0] * 3


def delayed_rounds(group: Any, transport: str, rounds: int) -> int:
    """Ranks sleep now and then, and receive at once, by hooks, or two calls at a time."""
    sleepy, together = random.Random(group.rank()), random.Random(7)
    with tokenyard.Buffer(group, low_latency_mode=True, transport=transport) as buffer:
        rounds_ = Rounds(buffer)
        for turn in range(0, rounds, 2):
            if sleepy.random() < 0.05:
                time.sleep(sleepy.random() * 0.005)
            if together.random() < 0.5:
                rounds_.check(turn)
                rounds_.check(turn + 1)
                continue
            first = rounds_.dispatch(turn, return_recv_hook=True)
            second = rounds_.dispatch(turn + 1, return_recv_hook=True)
            calls = [(first, turn), (second, turn + 1)]
            if sleepy.random() < 0.5:
                calls.reverse()
            for got, _ in calls:
                got.hook()
                if sleepy.random() < 0.05:
                    time.sleep(sleepy.random() * 0.002)
            sums = []
            for got, number in ((first, turn), (second, turn + 1)):
                rounds_.check_received(got, number)
                sums.append(rounds_.combine(got, number, return_recv_hook=True))
            for number, one in enumerate(sums):
                one.hook()
                assert torch.equal(one.combined_x, rounds_.expected(turn + number)), f"turn {turn}"
            del first, second, got, calls
    return rounds


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["direct", "collective"])
@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ranks_that_are_late(ranks: Processes, transport: str, rounds: int) -> None:
    assert ranks.run(delayed_rounds, transport, rounds, timeout=scaled(800)) == [rounds] * 3


def many_alive(group: Any, transport: str) -> int:
    """Rank 1 holds five results, one of them by a view alone; the others hold none."""
    with tokenyard.Buffer(group, low_latency_mode=True, transport=transport) as buffer:
        rounds, held = Rounds(buffer), []
        view = None
        for turn in range(5):
            got = rounds.dispatch(turn)
            if group.rank() == 1 and turn == 2:
                view, before = got.recv_x[0, 3:, 2:], got.recv_x[0, 3:, 2:].clone()
            elif group.rank() == 1:
                held.append((turn, got))
            del got
        for turn in range(5, 9):
            rounds.check(turn)
        for turn, got in held:
            rounds.check_received(got, turn)
        if view is not None:
            assert torch.equal(view.view(torch.int32), before.view(torch.int32))
        return len(held)


@pytest.mark.parametrize("transport", ["direct", "collective"])
def test_results_keep_their_memory(ranks: Processes, transport: str) -> None:
    """DeepEP writes a third result over the first."""
    assert ranks.run(many_alive, transport) == [0, 4, 0]


def forgotten_hooks(group: Any) -> None:
    with tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60)) as buffer:
        rounds = Rounds(buffer)
        kept = rounds.dispatch(0, return_recv_hook=True)
        with pytest.raises(ValueError, match="whose rows have not been received"):
            rounds.combine(kept, 0)
        rounds.dispatch(1, return_recv_hook=True)  # and never received
        later = rounds.dispatch(2)  # which takes the place of the first, and so receives it before
        rounds.check_received(kept, 0)
        rounds.check_received(later, 2)
        kept.hook()
        kept.hook()  # twice is fine
        rounds.check_received(kept, 0)
        del later
        for turn in range(3, 6):
            rounds.check(turn)
        del kept
        for turn in range(6):  # sums that nobody receives
            got = rounds.dispatch(turn)
            rounds.combine(got, turn, return_recv_hook=True)
        rounds.check(7)


def test_hooks_that_nobody_calls(ranks: Processes) -> None:
    ranks.run(forgotten_hooks)


def counted(group: Any, transport: str) -> tuple[Tensor, Tensor, Tensor, int]:
    with tokenyard.Buffer(group, low_latency_mode=True, transport=transport) as buffer:
        rounds = Rounds(buffer)
        totals = torch.full((2,), 100, dtype=torch.int32)
        there, back = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        received = 0
        for turn in range(4):
            if group.rank() == 2:
                time.sleep(0.05)
            got = rounds.dispatch(
                turn,
                cumulative_local_expert_recv_stats=totals,
                dispatch_wait_recv_cost_stats=there,
            )
            received += int(got.recv_count.sum())
            rounds.combine(got, turn, combine_wait_recv_cost_stats=back)
    return totals, there, back, received


def test_counts_and_waits_are_added_up(ranks: Processes) -> None:
    for rank, (totals, there, back, received) in enumerate(ranks.run(counted, "direct")):
        assert totals.sum() == 200 + received
        assert (back >= 0).all()
        if rank != 2:  # who waited for the sleeper, and not for the other
            assert there[2] > 0.1e9
            assert there[1 - rank] < there[2]
    for totals, there, _, received in ranks.run(counted, "collective"):
        assert totals.sum() == 200 + received
        assert (there > 0).all()


def partly(group: Any) -> None:
    """Combine may sum less than was sent, in another order, but nothing that was not sent."""
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        idx, weights = torch.tensor([[0, 3, 5], [4, 1, -1]]), torch.ones(2, 3)
        x = torch.tensor([[1.0], [10.0]])
        got = buffer.low_latency_dispatch(x, idx, 2, 6, use_fp8=False)
        y = got.recv_x * (torch.arange(2)[:, None, None] + 2.0 * group.rank() + 1)

        def total(idx: list[list[int]]) -> list[float]:
            answer = buffer.low_latency_combine(y, torch.tensor(idx), weights, got.handle)
            return answer.combined_x.flatten().tolist()

        assert total([[0, 3, 5], [4, 1, -1]]) == [11.0, 70.0]
        assert total([[5, -1, 3], [-1, -1, 1]]) == [10.0, 20.0]
        with pytest.raises(ValueError, match=r"topk_idx\[1, 2\] is 0, want an expert that the tok"):
            total([[0, 3, 5], [4, 1, 0]])
        assert total([[3, -1, 0], [1, 4, -1]]) == [5.0, 70.0]


def test_combine_of_some_pairs(ranks: Processes) -> None:
    ranks.run(partly)
    run_virtual(partly, 3)


def left_before_the_hook(group: Any, drops: bool, zero_copy: bool, later: bool) -> float:
    """Rank 1 calls its hook after rank 0 has let go of its Buffer, or while its thread ends the
    call there.
    """
    buffer = tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60))
    ids, weights = torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    x = torch.full((4, 64), group.rank() + 1.0)
    got = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
    y: Any = got.recv_x
    if zero_copy:
        y = buffer.get_next_low_latency_combine_buffer(got.handle).copy_(y)
    is_async = later and group.rank() == 0
    owed: Any = None
    if later:  # who owes a receive ends later calls before others have read them
        owed = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False, return_recv_hook=True)
    if is_async:
        worker_of(buffer).submit(lambda: time.sleep(scaled(0.4)))
    back = buffer.low_latency_combine(
        y,
        ids,
        weights,
        got.handle,
        zero_copy=zero_copy,
        async_finish=is_async,
        return_recv_hook=not is_async,
    )
    if not later:
        buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=2)
    if group.rank() == 1:
        time.sleep(scaled(0.7))
    if is_async:
        buffer.close()
        back.event.current_stream_wait()
    else:
        assert back.hook is not None
        back.hook()
    summed = float(back.combined_x.sum())
    if not drops:
        buffer.close()
    del buffer, got, back, y, owed
    gc.collect()
    return summed


@pytest.mark.parametrize("zero_copy", [False, True], ids=["copied", "zero_copy"])
@pytest.mark.parametrize("drops", [False, True], ids=["closed", "dropped"])
@pytest.mark.parametrize("later", [False, True], ids=["ended", "on its way"])
def test_a_hook_after_the_other_rank_has_left(
    processes: Pools, drops: bool, zero_copy: bool, later: bool
) -> None:
    pair = processes(2)
    assert pair.run(left_before_the_hook, drops, zero_copy, later) == [512.0, 1024.0]


def left_after_a_second_combine(group: Any, forgets: int) -> float:
    """Rank 0 closes its Buffer before rank 1 has mapped memory that an earlier combine named: rank
    1 dropped the hooks of that combine and the next. Or before it has mapped the block beside it.
    """
    buffer = tokenyard.Buffer(group, low_latency_mode=True, timeout=scaled(60))
    ids, weights = torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    x = torch.full((4, 64), group.rank() + 1.0)
    got: Any = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
    y = buffer.get_next_low_latency_combine_buffer(got.handle).copy_(got.recv_x)
    for _ in range(max(1, forgets)):
        back = buffer.low_latency_combine(
            y, ids, weights, got.handle, zero_copy=True, return_recv_hook=True
        )
        assert back.hook is not None
        if group.rank() == 0 and forgets:
            time.sleep(scaled(0.2))  # until rank 1 is done with the call
        if group.rank() == 0 or not forgets:
            back.hook()
        del back
    owed = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False, return_recv_hook=True)
    last = buffer.low_latency_combine(
        y, ids, weights, got.handle, zero_copy=True, return_recv_hook=True
    )
    assert last.hook is not None
    if group.rank() == 1:
        time.sleep(scaled(0.7))
    last.hook()
    buffer.close()
    del owed
    return float(last.combined_x.sum())


@pytest.mark.parametrize("forgets", [0, 2], ids=["all received", "two forgotten"])
def test_memory_that_an_earlier_combine_named(processes: Pools, forgets: int) -> None:
    assert processes(2).run(left_after_a_second_combine, forgets) == [512.0, 1024.0]


def refused_zero_copy(group: Any) -> float:
    """A zero_copy combine that is refused tells of rows that the next combine must not."""
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer:
        idx, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
        got: Any = buffer.low_latency_dispatch(torch.ones(1, 64), idx, 1, 2, use_fp8=False)
        for _ in range(2):  # both places
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle)
        for _ in range(2):
            y = buffer.get_next_low_latency_combine_buffer(got.handle).fill_(7)
            wrong = torch.tensor([[5, 1]])
            with pytest.raises(ValueError, match="want an expert that the token had"):
                buffer.low_latency_combine(y, wrong, weights, got.handle, zero_copy=True)
        sums = [
            buffer.low_latency_combine(got.recv_x, idx, weights, got.handle).combined_x.sum()
            for _ in range(2)
        ]
        return float(sum(sums))


def test_rows_of_a_refused_combine_are_not_read(processes: Pools) -> None:
    assert processes(2).run(refused_zero_copy) == [2 * 128.0] * 2
