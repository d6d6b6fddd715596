"""What ranks do with checkpoints of a small layer and its optimiser; importable, so that processes
can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import tokenyard
from tokenyard.nn import (
    MoE,
    RouterConfig,
    average_expert_gradients,
    checkpoint_state,
    expert_parameters,
    rebalance,
    sum_replica_gradients,
)

HIDDEN, NUM_EXPERTS, NUM_TOKENS = 16, 6, 30  # tokens of all ranks
_seeding = threading.Lock()  # virtual ranks share torch's generator


class Model(nn.Module):
    """A layer with dense parameters before it, of which nothing uses one and one is frozen."""

    def __init__(self, buffer: tokenyard.Buffer) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.frozen = nn.Parameter(torch.ones(2, 3), requires_grad=False)
        self.moe = MoE(buffer, HIDDEN, 8, RouterConfig(num_experts=NUM_EXPERTS, num_topk=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.first(x))


class Counting(Optimizer):
    """Keeps a Python number for each parameter, and one for each group, and uses both."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.5, 0.9), "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    rate = group["lr"] / state["step"] / group["num_steps"]
                    parameter.sub_(parameter.grad, alpha=rate)


class Mixing(Optimizer):
    """Keeps a matrix over the first dimension, as Shampoo does: [L, L] of a stack of L experts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                flat = parameter.grad.reshape(len(parameter), -1)
                self.state[parameter]["left"] = flat @ flat.T


def make_model(buffer: tokenyard.Buffer) -> Model:
    with _seeding:
        torch.manual_seed(3)
        model = Model(buffer)
    average_expert_gradients(model)
    return model


def tokens(step: int, group: Any) -> Tensor:
    """This rank's part of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    return x.chunk(group.size())[group.rank()]


def train(model: Model, optimizer: Optimizer, group: Any, first: int, last: int) -> None:
    """Steps first to last. Dense gradients are averaged by hand, unless FSDP2 has done it."""
    own = expert_parameters(model)
    for step in range(first, last):
        optimizer.zero_grad()
        x = tokens(step, group)
        (model(x).square().sum() * group.size() / NUM_TOKENS).backward()
        sum_replica_gradients(model)
        for parameter in model.parameters() if group.size() > 1 else ():
            grad = parameter.grad
            if grad is not None and parameter not in own and not isinstance(grad, DTensor):
                dist.all_reduce(grad, dist.ReduceOp.AVG)
        optimizer.step()


def tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Of checkpoint_state, those that there are: not what a load would need."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in checkpoint_state(model, optimizer).items()
        if isinstance(tensor, Tensor)
    }


def make_optimizer(model: nn.Module, name: str) -> Optimizer:
    parameters = list(model.parameters())
    options: dict[str, Any] = {"lr": 0.01}
    if name == "SGD":
        options |= {"momentum": 0.9, "dampening": 0.5}
    return getattr(torch.optim, name)(parameters, **options)


def outcome(group: Any, make: Callable[[nn.Module], Optimizer], look: bool) -> list[Tensor]:
    """Parameters after 3 steps, with a look at the checkpoint before the first one or without."""
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        optimizer = make(model)
        if look:
            checkpoint_state(model, optimizer)
        train(model, optimizer, group, 0, 3)
        return [one.detach() for one in model.parameters()]


def begin(buffer: tokenyard.Buffer, name: str, wrap: bool = False) -> tuple[Model, Optimizer]:
    model = make_model(buffer)
    if wrap:
        fully_shard(model, ignored_params=expert_parameters(model))
    return model, make_optimizer(model, name)


def round_trip(
    group: Any, path: str, name: str, num_saved: int, wrap: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What there is after num_saved steps and two more, without and with a checkpoint between."""
    with tokenyard.Buffer(group) as buffer:
        model, optimizer = begin(buffer, name, wrap)
        train(model, optimizer, group, 0, num_saved)
        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, group, num_saved, num_saved + 2)
        want = tensors(model, optimizer)
        model, optimizer = begin(buffer, name, wrap)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, group, num_saved, num_saved + 2)
        return want, tensors(model, optimizer)


def load_into_a_used_optimiser(group: Any, path: str) -> tuple[list[Tensor], list[Tensor]]:
    """Of a checkpoint before the first step: parameters after two, without and with a load."""
    with tokenyard.Buffer(group) as buffer:
        model, optimizer = begin(buffer, "SGD")
        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, group, 0, 2)
        want = [one.detach().clone() for one in model.parameters()]
        optimizer.param_groups[0]["lr"] = 1.0  # as a schedule would have it
        dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, group, 0, 2)
        return want, [one.detach() for one in model.parameters()]


def numbers(group: Any, path: str) -> None:
    """Of an optimiser that are no tensors; and one whose states are not on every rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        optimizer = Counting(model.parameters())
        train(model, optimizer, group, 0, 2)
        optimizer.param_groups[0]["lr"] = 0.02
        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        again = make_model(buffer)
        loaded = Counting(again.parameters())
        dcp.load(checkpoint_state(again, loaded), checkpoint_id=path)
        keys = ("lr", "betas", "num_steps")
        assert [loaded.param_groups[0][key] for key in keys] == [0.02, (0.5, 0.9), 2]
        assert loaded.state[again.moe.experts.down] == {"step": 2}
        assert again.unused not in loaded.state
        zero = ZeroRedundancyOptimizer(again.parameters(), torch.optim.AdamW)
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer keeps each state on one"):
            checkpoint_state(again, zero)


def placed(group: Any, path: str, slots: Any, steps: int) -> dict[str, Tensor]:
    """Two steps with experts in these slots, a checkpoint, and `steps` more with one copy of each
    on both ranks: as they were, and from the checkpoint. All that differs is returned.
    """
    even = tokenyard.Replicas.even(NUM_EXPERTS, group.size())
    found = []
    for loads in (False, True):
        with tokenyard.Buffer(group, placement=tokenyard.Replicas(slots, NUM_EXPERTS)) as buffer:
            model = make_model(buffer)
            experts = list(model.moe.experts.parameters())
            dense = [one for one in model.parameters() if all(one is not two for two in experts)]
            groups: list[dict[str, Any]] = [{"params": dense}, {"params": experts}]
            groups[1]["lr"] = 1.0 if loads else 0.01
            optimizer = torch.optim.Adam(groups)
            if loads:
                for parameter in model.parameters():
                    parameter.data.zero_()
                dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)
            else:
                train(model, optimizer, group, 0, 2)
                dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
            assert [one["lr"] for one in optimizer.param_groups] == [0.001, 0.01]
            rebalance(model, even, optimizer)
            train(model, optimizer, group, 2, 2 + steps)
            found.append(tensors(model, optimizer))
    before, after = found
    assert before.keys() == after.keys()
    return {name: one for name, one in after.items() if not torch.equal(one, before[name])}
