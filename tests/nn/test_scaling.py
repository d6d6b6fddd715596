"""Loss scaling: all ranks skip a step, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tokenyard
from tests.cases.nn import moving as jobs
from tests.cases.nn import scaling as cases
from tokenyard import PeerLeft
from tokenyard.nn import GradScaler, accept_gradients, average_expert_gradients, clip_grad_norm_
from tokenyard.testing import Processes, assert_same, run_virtual


def overflow(layer: nn.Module, here: bool) -> None:
    """In one expert of this rank."""
    grad = layer.get_parameter("experts.down").grad
    assert grad is not None
    with torch.no_grad():
        grad[1, 0, 0] = torch.inf if here else grad[1, 0, 0]
    accept_gradients(layer)


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


def test_ours_is_not_refused() -> None:
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


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_torch_s_own_is_refused(fused: bool, clips: bool, overflows: bool) -> None:
    """By the first step, on each rank that makes it, before it changes anything. A rank that skips
    it meets ranks that have left.
    """

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer, x = jobs.make(buffer), jobs.tokens(0)
            sgd = torch.optim.SGD(layer.parameters(), fused=fused)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(layer(x).sum()).backward()
            overflow(layer, overflows and group.rank() == 1)
            before = [one.detach().clone() for one in layer.parameters()]
            if clips:
                scaler.unscale_(sgd)
                clip_grad_norm_(layer, 1.0)
            if overflows and not fused and group.rank() == 1:
                scaler.step(sgd)
                with pytest.raises(PeerLeft):
                    layer(x)
            else:
                with pytest.raises(ValueError, match=r"want tokenyard\.nn\.GradScaler\(model\)"):
                    scaler.step(sgd)
            assert_same([one.detach() for one in layer.parameters()], before)

    run_virtual(job, 2)


def test_who_asks_all_ranks_or_does_nothing_is_not_refused() -> None:
    class Asking(torch.amp.GradScaler):
        def _unscale_grads_(self, *args: Any) -> Any:
            return super()._unscale_grads_(*args)

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            for scaler in (torch.amp.GradScaler("cpu", enabled=False), Asking("cpu")):
                layer = jobs.make(buffer)
                sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
                before = layer.experts.down.detach().clone()
                scaler.scale(layer(jobs.tokens(0)).sum()).backward()
                scaler.step(sgd)
                assert not torch.equal(layer.experts.down, before)

    run_virtual(job, 2)


def test_what_was_meant_is_accepted() -> None:
    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
            layer(jobs.tokens(0)).sum().backward()
            torch.nn.utils.clip_grad_value_(layer.parameters(), 1e-3)
            before = layer.experts.down.detach().clone()
            with pytest.raises(RuntimeError, match=r"want tokenyard\.nn\.accept_gradients"):
                sgd.step()
            accept_gradients(layer)
            sgd.step()
            assert layer.experts.down.grad is not None
            assert_same(layer.experts.down.detach(), before - layer.experts.down.grad)

    run_virtual(job, 2)


def test_zeros_are_no_change() -> None:
    """Of a layer that was not used since `zero_grad`."""

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            layer = jobs.make(buffer)
            sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
            layer(jobs.tokens(0)).sum().backward()
            sgd.zero_grad(set_to_none=False)
            before = layer.experts.down.detach().clone()
            sgd.step()
            assert_same(layer.experts.down.detach(), before)

    run_virtual(job, 2)


def test_a_module_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no experts of a Buffer"):
        GradScaler(nn.Linear(2, 2))
