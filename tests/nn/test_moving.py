"""Weights change hands all or none, and a module knows the placement that its weights lie in."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenyard
from tests.cases.nn import moving as jobs
from tokenyard import PeerInputError, Replicas
from tokenyard.errors import SharedMemoryError
from tokenyard.nn import (
    average_expert_gradients,
    checkpoint_state,
    moving,
    rebalance,
    sum_replica_gradients,
)
from tokenyard.testing import Processes, assert_same, run_virtual

BEHIND = "the Buffer was rebalanced, and the experts of this module still lie where they were"


def kept(layer: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all that moves."""
    found = [*layer.parameters(), *(one.grad for one in layer.parameters() if one.grad is not None)]
    found += [
        one for state in optimizer.state.values() for one in state.values() if one is not None
    ]
    return [one.detach().clone() for one in found]


def no_memory_anywhere(rank: int) -> Exception:
    """A Buffer survives it."""
    error = SharedMemoryError("33554432 bytes of shared memory are needed, 1000000 are available")
    error.on_all_ranks = True
    return error


def no_memory_here(rank: int) -> Exception | None:
    return RuntimeError("DefaultCPUAllocator: can't allocate memory") if rank == 1 else None


@pytest.mark.parametrize("fault", [no_memory_anywhere, no_memory_here])
@pytest.mark.parametrize("last", [False, True], ids=["second", "last"])
def test_an_error_in_the_middle_changes_nothing(
    fault: Any, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 parameters, and 2 states of Adam each: 6 stacks."""
    real, calls = moving.move_stack, threading.local()

    def failing(buffer: Any, moves: Any, stack: Tensor) -> Tensor:
        calls.made = getattr(calls, "made", 0) + 1
        error = fault(buffer.rank) if calls.made == (6 if last else 2) else None
        if error is not None:
            raise error
        return real(buffer, moves, stack)

    monkeypatch.setattr(moving, "move_stack", failing)

    def job(group: Any) -> None:
        x = jobs.tokens(group.rank())
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            adam = torch.optim.Adam(layer.parameters())
            layer(x).sum().backward()
            adam.step()
            want, before = layer(x).detach(), kept(layer, adam)
            with pytest.raises((SharedMemoryError, RuntimeError, PeerInputError), match="memory"):
                rebalance(layer, jobs.TO, adam)
            assert_same(kept(layer, adam), before)
            assert_same(layer(x).detach(), want)
            assert buffer.get_local_experts(6) == layer.experts.ids == jobs.FROM[group.rank()]
            rebalance(layer, jobs.TO, adam)
            torch.testing.assert_close(layer(x).detach(), want)  # other orders of sums

    run_virtual(job, 2)


@pytest.mark.parametrize("options", [{}, {"num_worst_tokens": 40}], ids=["plain", "fixed-sizes"])
@pytest.mark.parametrize("kind", ["copy", "layer", "by-hand"])
def test_a_module_that_was_left_behind_raises_until_it_follows(
    kind: str, options: dict[str, int]
) -> None:
    def job(group: Any) -> None:
        x = jobs.tokens(group.rank())
        with tokenyard.Buffer(group) as buffer:
            model = jobs.make(buffer, **options)
            other = {
                "copy": lambda: copy.deepcopy(model),
                "layer": lambda: jobs.make(buffer, 1, **options),
                "by-hand": lambda: model,
            }[kind]()
            want = other(x).detach()
            if kind == "by-hand":
                buffer.rebalance(jobs.TO)
            else:
                rebalance(model, jobs.TO)
            for _ in range(2):
                with pytest.raises(ValueError, match=BEHIND):
                    other(x)
            both = nn.ModuleList([model, other])
            rebalance(both, jobs.TO)
            torch.testing.assert_close(other(x).detach(), want)  # other orders of sums
            back = rebalance(both, jobs.EVEN)
            assert len(back) > 0
            assert_same(other(x).detach(), want)

    run_virtual(job, 2)


def test_a_module_that_is_behind_on_one_rank_raises_on_all() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, old = jobs.make(buffer), jobs.make(buffer)
            rebalance(layer, jobs.TO)
            with pytest.raises(ValueError, match=BEHIND):
                (old if group.rank() else layer)(jobs.tokens(0))
            layer(jobs.tokens(0))
            with pytest.raises(ValueError, match=r"ranks differ in .* where they lie"):
                rebalance(old if group.rank() else layer, jobs.EVEN)

    run_virtual(job, 2)


def test_a_placement_that_came_back_is_the_same() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, other = jobs.make(buffer), jobs.make(buffer, 1)
            want = other(jobs.tokens(0)).detach()
            rebalance(layer, jobs.TO)
            rebalance(layer, Replicas.even(6, 2))
            assert_same(other(jobs.tokens(0)).detach(), want)

    run_virtual(job, 2)


@pytest.mark.processes
def test_compiled_graphs_look_too(two_processes: Processes) -> None:
    two_processes.run(jobs.compiled, BEHIND)


def test_a_state_dict_of_other_experts_is_refused() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            saved = copy.deepcopy(layer.state_dict())
            want = layer(jobs.tokens(0)).detach()
            rebalance(layer, jobs.TO)
            with pytest.raises(
                RuntimeError, match=r"experts holds experts \[.*\], want \[.*\]: the"
            ):
                layer.load_state_dict(saved)
            rebalance(layer, jobs.EVEN)
            layer.load_state_dict(saved)
            layer.load_state_dict(dict(saved))  # without metadata nobody can tell
            assert_same(layer(jobs.tokens(0)).detach(), want)

    run_virtual(job, 2)


@pytest.mark.parametrize(
    ("counts", "placement"),
    [
        ([8], torch.tensor([1, 0, 1, 0, 1, 0])),
        ([8], Replicas([[0, 1, 2, 3], [4, 5, 0, 1]])),
        ([8], torch.tensor([1, 0] * 5)),
        ([8, 4], torch.tensor([1, 0] * 4)),
        ([8, 4], torch.tensor([1, 0] * 2)),
        ([8], torch.tensor([2, 0] * 4)),
        ([8], Replicas([[0, 1, 2, 3], [4, 5], [6, 7]])),
    ],
    ids=["fewer", "fewer-copies", "more", "of-the-first", "of-the-last", "no-rank", "ranks"],
)
@pytest.mark.parametrize("culprits", [(0, 1), (1,)], ids=["all", "one"])
def test_a_placement_that_does_not_fit_changes_nothing(
    counts: list[int], placement: Any, culprits: tuple[int, ...]
) -> None:
    def job(group: Any) -> None:
        x = jobs.tokens(group.rank())
        with tokenyard.Buffer(group) as buffer:
            model = nn.ModuleList(jobs.make(buffer, num_experts=one) for one in counts)
            want = [layer(x).detach() for layer in model]
            given = placement if group.rank() in culprits else torch.tensor([1, 0] * 4)
            with pytest.raises(ValueError, match=r"placement"):
                rebalance(model, given)
            assert_same([layer(x).detach() for layer in model], want)
            rebalance(model[0], torch.tensor([1, 0] * 4))

    run_virtual(job, 2)


def test_ranks_that_differ_in_the_placement() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            with pytest.raises(ValueError, match="ranks differ in the placement"):
                rebalance(layer, jobs.EVEN if group.rank() else jobs.TO)
            layer(jobs.tokens(0))

    run_virtual(job, 2)


def test_layers_that_share_parameters() -> None:
    """A stack moves once, with whichever layer comes first."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            x, one, other = jobs.tokens(group.rank()), jobs.make(buffer), jobs.make(buffer, 1)
            other.experts.down = one.experts.down
            want = one(x).detach(), other(x).detach()
            rebalance(one, jobs.TO)
            with pytest.raises(ValueError, match="the Buffer was rebalanced"):
                other(x)
            rebalance(other, jobs.TO)
            assert_same((one(x).detach(), other(x).detach()), want)
            rebalance(nn.ModuleList([one, other]), jobs.EVEN)
            assert_same((one(x).detach(), other(x).detach()), want)
            one = jobs.make(buffer, 2)
            buffer.rebalance(jobs.TO)
            other = jobs.make(buffer, 3)
            other.experts.down = one.experts.down  # which lies where other's do not
            with pytest.raises(ValueError, match="of which one was rebalanced without the other"):
                rebalance(nn.ModuleList([one, other]), jobs.TO)

    run_virtual(job, 2)


def test_what_moved_in_inference_mode_can_be_trained() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            average_expert_gradients(layer)
            adam = torch.optim.Adam(layer.parameters())
            for placement in (jobs.TO, jobs.EVEN):
                layer(jobs.tokens(0)).sum().backward()
                adam.step()
                with torch.inference_mode():
                    rebalance(layer, placement, adam)
            layer(jobs.tokens(0)).sum().backward()
            adam.step()
            with torch.inference_mode():
                frozen = jobs.make(buffer)
                want = frozen(jobs.tokens(0))
                rebalance(nn.ModuleList([layer, frozen]), jobs.TO, adam)
                torch.testing.assert_close(frozen(jobs.tokens(0)), want)  # other orders of sums

    run_virtual(job, 2)


def test_room_that_was_made_in_inference_mode_can_be_trained() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            average_expert_gradients(layer)
            with torch.inference_mode():
                state = checkpoint_state(layer, torch.optim.Adam(layer.parameters()))
            tensors = [one for one in state.values() if isinstance(one, Tensor)]
            assert not any(one.is_inference() for one in tensors)

    run_virtual(job, 2)


@pytest.mark.parametrize("strided", [False, True])
def test_gradients_of_copies_beside_a_rank_without_slots(strided: bool) -> None:
    def job(group: Any) -> tuple[Tensor, Tensor]:
        replicas = Replicas([[0, 1, 3], [0, 2, 4, 5], []])
        with tokenyard.Buffer(group, placement=replicas) as buffer:
            layer = jobs.make(buffer)
            layer(jobs.tokens(group.rank())).sum().backward()
            down = layer.experts.down
            assert down.grad is not None
            if strided:
                down.grad = down.grad.transpose(1, 2).contiguous().transpose(1, 2)
            before = down.grad.clone()
            sum_replica_gradients(layer)
            return before, down.grad

    (a, after), (b, other), (_, none) = run_virtual(job, 3).results
    assert_same(after[0], a[0] + b[0])
    assert_same(other[0], after[0])
    assert none.shape[0] == 0


def test_moving_leaves_tuples_of_other_threads_alone() -> None:
    """As a loader of data makes them: a tuple that anybody else holds cannot be finished."""
    ended = threading.Event()

    def make_tuples() -> None:
        while not ended.is_set():
            assert len(tuple(one for one in range(300))) == 300

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            for _ in range(20):
                rebalance(layer, torch.zeros(6, dtype=torch.int64))

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(make_tuples)
        try:
            run_virtual(job, 1)
        finally:
            ended.set()
        made.result()
