"""Optimisers in checkpoints: what they keep for an expert goes with it, and nothing is lost."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import tokenyard
from tests.cases.nn import checkpoint as jobs
from tokenyard import Replicas
from tokenyard.nn import Share, checkpoint_state
from tokenyard.testing import Processes, assert_same, run_virtual


def same_by_name(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_same(tensor, want[name], name)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "num_saved"), [("AdamW", 2), ("SGD", 0), ("SGD", 2), ("Adafactor", 2)]
)
def test_training_goes_on_as_if_nothing_had_happened(
    two_processes: Processes, tmp_path: Path, name: str, num_saved: int
) -> None:
    """With a frozen and an unused parameter, and before the first step too."""
    for want, got in two_processes.run(jobs.round_trip, str(tmp_path), name, num_saved):
        same_by_name(got, want)


@pytest.mark.processes
def test_dense_states_of_fsdp(two_processes: Processes, tmp_path: Path) -> None:
    for want, got in two_processes.run(jobs.round_trip, str(tmp_path), "AdamW", 2, True):
        same_by_name(got, want)


@pytest.mark.processes
def test_a_used_optimiser_is_what_was_saved(two_processes: Processes, tmp_path: Path) -> None:
    for want, got in two_processes.run(jobs.load_into_a_used_optimiser, str(tmp_path)):
        assert_same(got, want)


@pytest.mark.processes
def test_numbers_that_are_no_tensors(two_processes: Processes, tmp_path: Path) -> None:
    two_processes.run(jobs.numbers, str(tmp_path))


@pytest.mark.processes
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "slots",
    [[[0, 1, 2, 3, 4, 5], []], [[0, 0, 1, 2, 0], [3, 3, 0, 4, 5]]],
    ids=["rank-without-experts", "copies-on-one-rank"],
)
def test_wherever_experts_lay_when_they_were_saved_and_loaded(
    two_processes: Processes, tmp_path: Path, slots: list[list[int]], steps: int
) -> None:
    """A rank without experts has their step counts and options, and every copy of an expert is
    loaded. The experts move as soon as they are there.
    """
    assert two_processes.run(jobs.placed, str(tmp_path), slots, steps) == [{}, {}]


def test_every_copy_on_a_rank_is_loaded(tmp_path: Path) -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group, placement=Replicas([[0, 1, 0, 2, 3, 4, 5, 2]])) as buffer:
            saved, loaded = jobs.make_model(buffer), jobs.make_model(buffer)
            for parameter in loaded.parameters():
                parameter.data.zero_()
            dcp.save(checkpoint_state(saved), checkpoint_id=tmp_path, no_dist=True)
            dcp.load(checkpoint_state(loaded), checkpoint_id=tmp_path, no_dist=True)
            assert_same(list(loaded.parameters()), list(saved.parameters()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is one process
        run_virtual(job, 1)


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Rprop", "SGD"])
def test_a_look_at_a_fresh_optimiser_changes_nothing(name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return jobs.make_optimizer(model, name)

    want, got = (run_virtual(jobs.outcome, 1, make, look).results[0] for look in (False, True))
    assert_same(got, want)


@pytest.mark.parametrize("num_ranks", [1, 3, 6])
def test_refused_with_words(num_ranks: int) -> None:
    """What belongs to no single expert, also where a rank has one; and what is of no parameter."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = jobs.make_model(buffer)
            cases = {
                r"LBFGS keeps .* all parameters together": torch.optim.LBFGS(model.parameters()),
                r"Mixing keeps left, .* moe\.experts\.gate_up": jobs.Mixing(model.parameters()),
                r"\[3\].* not in the module": torch.optim.SGD([nn.Parameter(torch.ones(3))]),
            }
            for words, optimizer in cases.items():
                with pytest.raises(ValueError, match=words):
                    checkpoint_state(model, optimizer)

    run_virtual(job, num_ranks)


def test_any_module_that_has_a_share() -> None:
    """As the experts of transformers have it; those of 3 ranks are all experts."""

    class Spread(nn.Module):
        def __init__(self, buffer: tokenyard.Buffer) -> None:
            super().__init__()
            ids = buffer.get_local_experts(6)
            self.up_proj = nn.Parameter(torch.tensor(ids).view(-1, 1, 1).expand(-1, 4, 2).float())
            self.bias = nn.Parameter(torch.tensor(ids).view(-1, 1).expand(-1, 4).float())
            self.tokenyard = Share(buffer=buffer, replicas=buffer.get_placement(6), num_losses=3)

    def job(group: Any) -> dict[str, Tensor]:
        with tokenyard.Buffer(group) as buffer:
            model = nn.ModuleDict({"experts": Spread(buffer)})
            optimizer = torch.optim.Adam(model.parameters())
            with pytest.raises(ValueError, match=r"Adafactor keeps col_var, .* experts\.bias"):
                checkpoint_state(model, torch.optim.Adafactor(model.parameters()))
            state = checkpoint_state(model, optimizer)
            return {name: one for name, one in state.items() if isinstance(one, Tensor)}

    found: dict[str, Tensor] = {}
    for state in run_virtual(job, 3).results:
        assert not found.keys() & state.keys()
        found |= state
    for expert in range(6):
        assert_same(found[f"model.experts.up_proj.{expert}"], torch.full((4, 2), float(expert)))
        assert found[f"optimizer.experts.bias.exp_avg.{expert}"].shape == (4,)


def test_a_look_steps_nothing_that_a_schedule_has_wrapped() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = jobs.make_model(buffer)
            optimizer = torch.optim.AdamW(model.parameters())
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            optimizer.register_step_pre_hook(lambda *_: pytest.fail("the optimiser stepped"))
            before = [one.detach().clone() for one in model.parameters()]
            checkpoint_state(model, optimizer)
            assert_same([one.detach() for one in model.parameters()], before)
            assert schedule.last_epoch == 0
            assert not optimizer.state

    run_virtual(job, 8)  # of which two have no experts


def test_a_state_that_finds_no_place_is_named() -> None:
    """The parameter was frozen since: its state would be lost."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = jobs.make_model(buffer)
            optimizer = torch.optim.AdamW(model.parameters())
            jobs.train(model, optimizer, group, 0, 1)
            saved = checkpoint_state(model, optimizer)["optimizer.first.weight"].state_dict()
            model.first.weight.requires_grad_(False)
            fresh = checkpoint_state(model, torch.optim.AdamW(model.parameters()))
            with pytest.raises(ValueError, match=r"optimizer\.first\.weight\.step is in the check"):
                fresh["optimizer.first.weight"].load_state_dict(saved)
            with pytest.raises(TypeError, match="want the entries of checkpoint_state at the top"):
                pickle.dumps(fresh)

    run_virtual(job, 1)
