"""Training with clipped gradients, as ranks do it; importable by processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tokenyard
from tests.cases.nn.moe import HIDDEN, Model, loss_of, make_model
from tokenyard.nn import (
    average_expert_gradients,
    clip_grad_norm_,
    expert_parameters,
    get_grad_norm,
    named_expert_parameters,
    prepare_for_ddp,
    update_biases,
)

NUM_STEPS, NUM_TOKENS, MAX_NORM = 20, 24, 0.05  # tokens of all ranks


def batch(step: int, rank: int, num_ranks: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_TOKENS, HIDDEN, generator=generator).chunk(num_ranks)[rank]


def wrap(model: Model, kind: str) -> nn.Module:
    if kind == "ddp":
        prepare_for_ddp(model)
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model, ignored_params=expert_parameters(model))
    average_expert_gradients(model)
    return model


def clipped_training(
    group: Any, kind: str, clip: str = "ours", foreach: bool | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The losses, the norms, and the dense parameters at the end."""
    rank, num_ranks = group.rank(), group.size()
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        wrapped = wrap(model, kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses, norms = [], []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = loss_of(wrapped, batch(step, rank, num_ranks))
            loss.backward()
            losses.append(loss.item())
            if clip == "ours":
                norms.append(clip_grad_norm_(wrapped, MAX_NORM, foreach=foreach).item())
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                norms.append(norm.item())
            optimizer.step()
            update_biases(model)
        own = {name for name, _ in named_expert_parameters(model)}
        dense = {}
        for name, one in model.named_parameters():
            if name not in own:
                value = one.detach()
                dense[name] = value.full_tensor() if isinstance(value, DTensor) else value
        del wrapped
        return losses, norms, dense


def clipped_by_torch(group: Any, again: bool) -> tuple[float, str]:
    """The norm that torch finds on this rank, and what the step says; `again`: after ours too."""
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        wrapped = wrap(model, "ddp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(wrapped, batch(0, group.rank(), group.size())).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if again:
            clip_grad_norm_(model, MAX_NORM)
        try:
            optimizer.step()
        except RuntimeError as error:
            return norm.item(), str(error)
        return norm.item(), "nothing"


def step_beside_an_averager(group: Any) -> float:
    """How far experts move in a step whose optimiser lies beside an averager that does not have it,
    as the names of a script do.
    """
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    assert PostLocalSGDOptimizer  # imported, as by whoever averages
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        before = model.moe.experts.down.detach().clone()
        names: dict[str, Any] = {
            "optim": torch.optim.SGD(model.parameters(), lr=1.0),
            "averager": PeriodicModelAverager(period=2),
        }
        loss_of(model, batch(0, group.rank(), 2)).backward()
        names["optim"].step()
        return float((model.moe.experts.down - before).abs().max())


def norms_of_all_kinds(group: Any, kind: str) -> dict[str, Any]:
    """Norms of one backward pass, and what happens where gradients are not finite."""
    rank, num_ranks = group.rank(), group.size()
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        wrapped = wrap(model, kind)
        loss_of(wrapped, batch(0, rank, num_ranks)).backward()
        found: dict[str, Any] = {}
        for order in (1.0, 2.0, 3.0, math.inf):
            for foreach in (None, True, False):
                found[f"{order} {foreach}"] = get_grad_norm(model, order, foreach=foreach).item()
        if rank == num_ranks - 1:  # one expert of one rank
            gradient = model.moe.experts.down.grad
            assert gradient is not None
            gradient[-1, 0, 0] = math.inf
        found["infinite"] = get_grad_norm(model).item()
        try:
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            found["error"] = str(error)
        loss_of(wrapped, batch(0, rank, num_ranks))  # the Buffer still works
        del wrapped
        return found


def norms_of(mesh: DeviceMesh, grad: Any) -> tuple[float, float, float]:
    """Of one gradient: ours, the norm when it is clipped, and that of the whole tensor."""
    want = grad.full_tensor().norm().item()
    layer = nn.Linear(4, 5, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.zeros(5, 4), mesh))
    layer.weight.grad = grad
    norm = clip_grad_norm_(layer, 1.0).item()
    return norm, grad.full_tensor().norm().item(), want


def norms_by_placement(group: Any) -> dict[str, tuple[float, float, float]]:
    """Of a gradient that lies so over a mesh of 2 x 1.

    Each rank has its own part of 5 rows, of a sum that is not made yet, or all of it.
    """
    mesh = init_device_mesh("cpu", (group.size(), 1))
    whole = torch.arange(20.0).view(5, 4) - 9
    found: dict[str, tuple[float, float, float]] = {}
    for placements in (
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Shard(1), Shard(0)],
    ):
        grad = distribute_tensor(whole.clone(), mesh, placements)
        found[str(placements)] = norms_of(mesh, grad)
    for reduce_op, total in ("sum", 3), ("avg", 1.5):  # of (rank + 1)
        for other in Replicate(), Shard(0), Partial(reduce_op):
            share = whole * (group.rank() + 1) / total
            grad = DTensor.from_local(share, mesh, [Partial(reduce_op), other])
            found[str(grad.placements)] = norms_of(mesh, grad)
    return found
