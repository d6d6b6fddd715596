"""Loss scaling: all ranks skip a step, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenyard
from tests.cases.nn import moving as jobs
from tests.cases.nn import scaling as cases
from tokenyard.nn import GradScaler, average_expert_gradients, clip_grad_norm_
from tokenyard.testing import Processes, assert_same, run_virtual


def overflow(layer: nn.Module, here: bool) -> None:
    """In one expert of this rank."""
    grad = layer.get_parameter("experts.down").grad
    assert grad is not None
    with torch.no_grad():
        grad[1, 0, 0] = torch.inf if here else grad[1, 0, 0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_all_ranks_skip_the_step_of_one(fused: bool, clips: bool) -> None:
    def job(group: Any) -> list[float]:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            adam = torch.optim.Adam(layer.parameters(), fused=fused)
            scaler = GradScaler(layer, init_scale=2.0**10, growth_interval=1)
            scales = []
            for step in range(4):
                adam.zero_grad()
                scaler.scale(layer(jobs.tokens(group.rank())).square().mean()).backward()
                overflow(layer, group.rank() == 1 and step in (0, 2))
                before = [one.detach().clone() for one in layer.parameters()]
                if clips:
                    scaler.unscale_(adam)
                    clip_grad_norm_(layer, 1.0)
                scaler.step(adam)
                scaler.update()
                scales.append(scaler.get_scale())
                if step in (0, 2):
                    assert_same([one.detach() for one in layer.parameters()], before)
                else:
                    moved = [not torch.equal(a, b) for a, b in zip(layer.parameters(), before)]
                    assert all(moved)
            return scales

    assert run_virtual(job, 2).results == [[512.0, 1024.0, 512.0, 1024.0]] * 2


@pytest.mark.processes
def test_with_fsdp2() -> None:
    """torch unscales shards and plain tensors, which one optimiser has here, by themselves only."""
    with Processes(2) as ranks:
        assert ranks.run(cases.with_fsdp) == [[512.0, 512.0]] * 2


def test_no_warning_where_ranks_agree() -> None:
    """Warnings are errors in tests."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            average_expert_gradients(layer)
            sgd = torch.optim.SGD(layer.parameters())
            scaler = GradScaler(layer)
            scaler.scale(layer(jobs.tokens(0)).sum()).backward()
            scaler.step(sgd)
            scaler.update()

    run_virtual(job, 2)


@pytest.mark.parametrize("clips", [False, True])
def test_torch_s_own_is_warned_of(clips: bool) -> None:
    """By the clipping, where the experts of one rank have overflowed; by the step, always."""

    def job(group: Any) -> Tensor | None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            average_expert_gradients(layer)
            sgd = torch.optim.SGD(layer.parameters())
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(layer(jobs.tokens(0)).sum()).backward()
            scaler.unscale_(sgd)
            overflow(layer, clips and group.rank() == 1)
            if clips:
                return clip_grad_norm_(layer, 1.0)
            scaler.step(sgd)
            return None

    with pytest.warns(UserWarning, match=r"want tokenyard\.nn\.GradScaler|and tokenyard\.nn\.Grad"):
        run_virtual(job, 2)


def test_a_module_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no experts of a Buffer"):
        GradScaler(nn.Linear(2, 2))
