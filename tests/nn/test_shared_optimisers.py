"""Optimisers of experts that ranks share, whose parameters lie in one memory with other ranks'."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokenyard
from tests.cases.clock import scaled
from tests.cases.nn import optimisers as jobs
from tests.cases.processes import Pools
from tokenyard.nn import MoE, RouterConfig
from tokenyard.testing import assert_same

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory"),
]

# No expert is a part of a page, so parts of ranks meet inside one; of the second shape no expert is
# a whole number of cache lines either.
SHAPES = {"lines": (32, 24), "odd": (7, 5)}
FUSED = {f"torch.optim.{name}" for name in ("Adagrad", "Adam", "AdamW", "SGD")}


def opened(group: Any, **options: Any) -> tokenyard.Buffer:
    return tokenyard.Buffer(group, timeout=scaled(60), **options)


def layer(buffer: tokenyard.Buffer, shape: str, **options: Any) -> MoE:
    """The same on every rank; of five experts, so that two ranks have different numbers."""
    torch.manual_seed(3)
    return MoE(buffer, *SHAPES[shape], RouterConfig(num_experts=5, num_topk=2), **options)


def ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every optimiser that takes experts, in each of its implementations."""
    for name in [*jobs.torch_optimisers(), *jobs.OTHERS]:
        if importlib.util.find_spec(name.partition(".")[0]) is None or name == jobs.LBFGS:
            continue
        if jobs.takes_experts(name) is None:
            known = inspect.signature(jobs.find(name)).parameters
            yield name, {}
            if "foreach" in known:
                yield name, {"foreach": True}
            if name in FUSED:
                yield name, {"fused": True}


def step(group: Any, shape: str) -> list[tuple[str, dict[str, Any]]]:
    with opened(group) as buffer, opened(group, balance="exact") as balanced:
        models = layer(buffer, shape), layer(buffer, shape, share_experts=True)
        each = [list(one.experts.parameters()) for one in (*models, layer(balanced, shape))]
        start, done = [one.detach().clone() for one in each[0]], list(ways())
        for name, options in done:
            for parameters in each:
                take_steps(parameters, start, name, options)
            want, *others = each
            for got in others:
                assert_same(got, want, f"{name}, {options}")
    return done


def take_steps(
    parameters: list[nn.Parameter], start: list[Tensor], name: str, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one, begun in zip(parameters, start):
            one.copy_(begun)
    optimizer = jobs.make(name, parameters, **options)
    for _ in range(3):
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", SHAPES)
def test_each_optimiser_moves_them_as_others(processes: Pools, shape: str) -> None:
    for done in processes(2).run(step, shape):
        assert {name for name, options in done if options == {"fused": True}} == FUSED
        assert len(done) > 20


def train(group: Any, shape: str) -> None:
    """With torch's fused AdamW, which transformers' Trainer takes: every parameter to the bit."""
    x = torch.randn(20, SHAPES[shape][0], generator=torch.Generator().manual_seed(group.rank()))
    trained = []
    with opened(group) as buffer, opened(group, balance="exact") as balanced:
        models = layer(buffer, shape), layer(buffer, shape, share_experts=True)
        for model in (*models, layer(balanced, shape)):
            optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            trained.append([one.detach() for one in model.parameters()])
    want, *others = trained
    for got in others:
        assert_same(got, want)


@pytest.mark.parametrize("shape", SHAPES)
def test_training_is_as_without_sharing(processes: Pools, shape: str) -> None:
    processes(2).run(train, shape)


def look(group: Any) -> None:
    import safetensors.torch

    with opened(group, balance="exact") as buffer:
        model = layer(buffer, "odd")
        for one in model.parameters():
            assert one.is_contiguous()
            assert_same(one.view(-1), one.flatten())
        state = model.state_dict()
        loaded = safetensors.torch.load(safetensors.torch.save(state))
        for name, tensor in state.items():
            assert_same(loaded[name], tensor)


def test_their_memory_has_no_gaps(processes: Pools) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    processes(2).run(look)
