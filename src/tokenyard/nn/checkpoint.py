"""Checkpoints that do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tokenyard.nn.moe import Experts
from tokenyard.nn.optimiser_state import optimiser_entries, split
from tokenyard.nn.share import own_parameters, refuse_adapters, shares


def checkpoint_state(module: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """All there is to save, by names that are the same on any number of ranks.

    An expert's tensors have its global id in their names and are found on the rank where it lives;
    all else is found on every rank. The tensors are those of the module and the optimiser, not
    copies, so that torch.distributed.checkpoint saves and loads them as they are:

        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)  # on more ranks, or fewer

    For a parameter that the optimiser has not moved yet, there are zeros of the right shapes to
    load into, and the optimiser is left as it is until a load fills them. The numbers of its
    parameter groups are saved and loaded too. Several optimisers: `checkpoint_state(model, one) |
    checkpoint_state(model, other)`.

    Raises ValueError, on all ranks alike, where an optimiser keeps what belongs to no single
    expert.
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
    if optimizer is not None:
        state |= optimiser_entries(optimizer, names, experts_of)
    return state


def _experts_of(module: nn.Module) -> dict[Tensor, list[int]]:
    """The global ids of the experts that a parameter stacks, of those that are this rank's own.

    A DTensor is not: torch.distributed.checkpoint knows which part of it is here.
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
        if not isinstance(parameter, DTensor)
    }
