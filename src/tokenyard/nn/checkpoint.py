"""Checkpoints that do not depend on the number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenyard.nn.moe import Experts
from tokenyard.nn.share import refuse_adapters


def checkpoint_state(module: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """All there is to save, by names that are the same on any number of ranks.

    An expert's tensors have its global id in their names and are found on the rank where it lives;
    all else is found on every rank. The tensors are those of the module and the optimiser, not
    copies, so that torch.distributed.checkpoint saves and loads them as they are:

        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)  # on more ranks, or fewer

    Numbers of the optimiser that are no tensors (its parameter groups) are not included.
    """
    refuse_adapters(module)
    own = {
        id(parameter): part.ids
        for part in module.modules()
        if isinstance(part, Experts)
        for parameter in part.parameters()
    }
    if optimizer is not None and not optimizer.state:
        _begin(optimizer)
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        made_for = {} if optimizer is None else optimizer.state.get(tensor, {})
        parts = {f"model.{name}": tensor.detach()}
        parts |= {f"optimizer.{name}.{key}": value for key, value in made_for.items()}
        for key, value in parts.items():
            if not isinstance(value, Tensor):
                continue
            if id(tensor) not in own or value.shape != tensor.shape:
                state[key] = value
                continue
            for local, expert in enumerate(own[id(tensor)]):
                state[f"{key}.{expert}"] = value[local]
    return state


def _begin(optimizer: Optimizer) -> None:
    """Let a fresh optimiser make what it keeps, by a step that moves nothing, and leave it zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = {}
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            gradients[parameter] = parameter.grad
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()
