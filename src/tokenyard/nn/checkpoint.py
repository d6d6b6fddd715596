"""Checkpoints that do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tokenyard.nn.moe import Experts
from tokenyard.nn.optimiser_state import fill_copies, optimiser_entries, split
from tokenyard.nn.share import is_dtensor, own_parameters, refuse_adapters, shares


@torch.inference_mode(False)  # what is made in that mode cannot be trained
@torch.no_grad()
def checkpoint_state(module: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Everything to save, under names that are the same on any number of ranks.

    An expert's tensors have its global id in their names, and only the ranks that own it return
    them; every rank returns all others. The tensors are those of the module and the optimiser, not
    copies, so torch.distributed.checkpoint saves and loads them in place:

        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)  # on more ranks, or fewer

    A parameter that the optimiser has not moved yet gets zeros of the right shapes to load into;
    the optimiser itself changes only when a load fills them. The numbers of its parameter groups
    are saved and loaded too. With several optimisers: `checkpoint_state(model, one) |
    checkpoint_state(model, other)`.

    Raises ValueError on all ranks if an optimiser keeps something that belongs to no single expert.
    """
    refuse_adapters(module)
    state: dict[str, Any] = {}
    experts_of = _experts_of(module)
    names: dict[Tensor, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
        experts = experts_of.get(tensor)
        if experts is None:
            state[f"model.{name}"] = tensor.detach()
        else:
            state |= split(f"model.{name}", tensor.detach(), experts)
            if len(set(experts)) < len(experts):
                state[f"model.{name}"] = _Copies(tensor.detach(), experts)
    if optimizer is not None:
        state |= optimiser_entries(optimizer, names, experts_of)
    return state


class _Copies:
    """A stack with several copies of an expert: a Stateful of torch.distributed.checkpoint, which
    saves nothing, and after a load lets all copies have what the first has got.
    """

    def __init__(self, stack: Tensor, experts: list[int]) -> None:
        self._stack, self._experts = stack, experts

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        fill_copies(self._stack, self._experts)


def _experts_of(module: nn.Module) -> dict[Tensor, list[int]]:
    """For each parameter that stacks experts of this rank: their global ids.

    DTensors are left out: torch.distributed.checkpoint knows which part of them is here.
    """
    own = [(part, share.ids) for _, part, share in shares(module)]
    own += [  # of no layer
        (part, part.ids)
        for part in module.modules()
        if isinstance(part, Experts) and part.tokenyard is None
    ]
    return {
        parameter: ids
        for part, ids in own
        for parameter in own_parameters(part)
        if not is_dtensor(parameter)
    }
