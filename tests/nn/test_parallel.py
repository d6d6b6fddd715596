"""Experts beside DistributedDataParallel and FSDP, and checkpoints on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.lanes import at_night
from tests.cases.nn import moe as jobs
from tests.cases.nn import sharded
from tests.cases.processes import Pools
from tokenyard.nn import auxiliary_losses, expert_parameters, named_expert_parameters
from tokenyard.testing import Processes, assert_same, run_virtual


@pytest.fixture(scope="module")
def one_rank() -> tuple[float, dict[str, Tensor]]:
    return run_virtual(jobs.one_step, 1, "none").results[0]


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["direct", "collective"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_step_is_that_of_one_rank(
    two_processes: Processes,
    one_rank: tuple[float, dict[str, Tensor]],
    kind: str,
    transport: str,
) -> None:
    results = two_processes.run(jobs.one_step, kind, transport)
    want_loss, want = one_rank
    assert sum(loss for loss, _ in results) / 2 == pytest.approx(want_loss, rel=1e-6)
    for _, grads in results:
        assert any(".experts." in name for name in grads)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, want[name], rtol=1e-4, atol=1e-7)
    assert set().union(*(grads for _, grads in results)) == set(want)


@pytest.mark.processes
def test_ddp_does_not_spread_the_load_of_one_rank(two_processes: Processes) -> None:
    (once, twice), (other_once, other_twice) = two_processes.run(jobs.loads_under_ddp)
    assert once.tolist() != other_once.tolist()
    assert_same([twice, other_twice], [2 * once, 2 * other_once])


@pytest.mark.processes
def test_experts_that_were_sharded_after_another_model_died(two_processes: Processes) -> None:
    two_processes.run(sharded.another_died)


@pytest.mark.processes
def test_a_dead_model_does_not_keep_others_from_being_compiled(two_processes: Processes) -> None:
    two_processes.run(sharded.dead_but_not_collected)


def test_whose_parameters() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = jobs.make_model(buffer)
            names = [name for name, _ in named_expert_parameters(model)]
            assert names == [
                "moe.experts.gate_up",
                "moe.experts.down",
                "second.experts.gate_up",
                "second.experts.down",
            ]
            assert expert_parameters(model) == {model.get_parameter(name) for name in names}
            assert auxiliary_losses(model) == 0.0  # not called yet

    run_virtual(job, 2)


@pytest.mark.processes
@pytest.mark.parametrize("optimiser", at_night(["AdamW", "SGD"], gate=("AdamW",)))
def test_a_checkpoint_goes_on_on_another_number_of_ranks(
    processes: Pools, tmp_path: Path, optimiser: str
) -> None:
    """Two steps, saved, and a third: on 2 ranks, and the third on 1 and 3 as well."""
    want = processes(2).run(jobs.train_and_save, str(tmp_path), optimiser)
    for num_ranks in (1, 3):
        results = processes(num_ranks).run(jobs.load_and_train, str(tmp_path), optimiser)
        due = {name: tensor for state in want for name, tensor in state.items()}
        got = {name: tensor for state in results for name, tensor in state.items()}
        assert got.keys() == due.keys()
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, due[name], rtol=1e-4, atol=1e-6)


def test_a_fresh_optimiser_is_left_as_it_was() -> None:
    """Asking for its state makes that, and changes no later step."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            outcomes = []
            for asked in (False, True):
                model = jobs.make_model(buffer)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                if asked:
                    state = jobs.checkpoint_state(model, optimizer)
                    assert state["optimizer.first.weight.step"] == 0.0
                    assert "optimizer.moe.experts.down.3.exp_avg" not in state
                    assert "optimizer.moe.experts.down.exp_avg.3" in state
                jobs.loss_of(model, jobs.tokens(0, 1)).backward()
                optimizer.step()
                outcomes.append([one.detach() for one in model.parameters()])
            assert_same(outcomes[1], outcomes[0])

    run_virtual(job, 1)
