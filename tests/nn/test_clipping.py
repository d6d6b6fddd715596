"""Clipping: one norm for all ranks, whatever wraps the model, and the wrong way is noticed."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch

import tokenyard
from tests.cases.lanes import at_night
from tests.cases.nn import clipping as jobs
from tests.cases.nn.moe import loss_of, make_model
from tests.cases.processes import Pools
from tokenyard.nn import clip_grad_norm_, get_grad_norm
from tokenyard.testing import Processes, assert_same, run_virtual

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def one_rank() -> tuple[list[float], list[float]]:
    losses, norms, _ = run_virtual(jobs.clipped_training, 1, "none").results[0]
    assert min(norms) > jobs.MAX_NORM, "nothing is clipped, which proves nothing"
    return losses, norms


@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(2,)))
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_clipped_training_is_that_of_one_rank(
    processes: Pools, one_rank: Any, kind: str, num_ranks: int
) -> None:
    results = processes(num_ranks).run(jobs.clipped_training, kind)
    want_losses, want_norms = one_rank
    for step, losses in enumerate(zip(*(losses for losses, *_ in results))):
        assert sum(losses) / num_ranks == pytest.approx(want_losses[step], rel=1e-5), step
    _, norms, dense = results[0]
    assert norms == pytest.approx(want_norms, rel=1e-5)
    for _, other_norms, other_dense in results[1:]:
        assert other_norms == norms
        assert other_dense.keys() == dense.keys()
        assert_same(list(other_dense.values()), list(dense.values()))


@pytest.mark.parametrize("kind", ["none", "ddp", "fsdp"])
def test_norms(two_processes: Processes, kind: str) -> None:
    """Of all orders, with foreach or not; one that is not finite raises on all ranks."""
    if kind == "none":  # dense gradients are those of one rank, which has all the tokens
        results = run_virtual(jobs.norms_of_all_kinds, 1, kind).results
    else:
        results = two_processes.run(jobs.norms_of_all_kinds, kind)
    (want,) = run_virtual(jobs.norms_of_all_kinds, 1, "none").results
    assert all(got == results[0] for got in results)
    for got in results:
        assert got.pop("infinite") == math.inf
        assert "want a finite one" in got.pop("error")
        assert len(got) >= 8
        for name, value in got.items():
            assert value == pytest.approx(want[name], rel=1e-5), name


def test_norms_by_placement(two_processes: Processes) -> None:
    """However a gradient lies over a mesh of devices."""
    results = two_processes.run(jobs.norms_by_placement)
    assert results[0] == results[1]
    for placements, (norm, clipped, want) in results[0].items():
        assert norm == pytest.approx(want, rel=1e-6), placements
        assert clipped == pytest.approx(1.0, rel=1e-5), placements


@pytest.mark.parametrize("again", [False, True], ids=["alone", "then ours"])
def test_torchs_own_clipping_is_refused(two_processes: Processes, again: bool) -> None:
    """By the first step, on all ranks. It found another norm on each."""
    norms = []
    for norm, said in two_processes.run(jobs.clipped_by_torch, again):
        assert "want tokenyard.nn.clip_grad_norm_(model, max_norm)" in said
        norms.append(norm)
    assert norms[0] != norms[1], "torch has learnt it: the error can go"


@pytest.mark.parametrize("change", ["copied", "remade"])
def test_new_parameters_are_watched_from_their_first_use(change: str) -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = make_model(buffer)
            if change == "copied":
                model = copy.deepcopy(model)
            else:
                state = {name: one.clone() for name, one in model.state_dict().items()}
                model.to("meta")
                model.to_empty(device="cpu")
                model.load_state_dict(state)
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            loss_of(model, jobs.batch(0, group.rank(), 2)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            with pytest.raises(RuntimeError, match="gradients of experts were changed"):
                sgd.step()

    run_virtual(job, 2)


def test_an_optimiser_keeps_no_buffer() -> None:
    def job(group: Any) -> None:
        buffer = tokenyard.Buffer(group)
        model = make_model(buffer)
        held, alive = torch.optim.SGD(model.parameters()), weakref.ref(buffer)
        loss_of(model, jobs.batch(0, group.rank(), 2)).backward()
        held.step()
        buffer.close()
        del model, buffer
        gc.collect()
        assert alive() is None
        held.step()

    run_virtual(job, 2)


def test_an_averager_beside_an_optimiser_is_none_around_it(two_processes: Processes) -> None:
    assert min(two_processes.run(jobs.step_beside_an_averager)) > 0


def test_one_rank_may_clip_as_it_likes() -> None:
    (_, norms, _) = run_virtual(jobs.clipped_training, 1, "none", "torch's").results[0]
    (_, want, _) = run_virtual(jobs.clipped_training, 1, "none").results[0]
    assert norms == pytest.approx(want, rel=1e-5)


def test_what_has_no_gradient_and_no_norm() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = make_model(buffer)
            assert get_grad_norm(model) == 0
            with pytest.raises(ValueError, match=r"norm_type is -1, want a number above 0"):
                clip_grad_norm_(model, 1.0, norm_type=-1)
            model.first.weight.grad = torch.full_like(model.first.weight, 3.0)
            if group.rank() == 1:  # experts of one rank alone have gradients
                model.moe.experts.down.grad = torch.full_like(model.moe.experts.down, 2.0)
            size = 256 * 9 + model.moe.experts.down[0].numel() * 3 * 4
            assert clip_grad_norm_(model, 1.0).item() == pytest.approx(size**0.5)
            assert get_grad_norm(model).item() == pytest.approx(1.0, rel=1e-5)
            assert get_grad_norm(torch.nn.Linear(2, 2)) == 0

    run_virtual(job, 2)
