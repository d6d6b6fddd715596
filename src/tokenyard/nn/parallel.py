"""Experts beside data parallelism: which parameters are a rank's own, and how to scale them.

Dense parameters are the same on all ranks, and data parallelism averages their gradients. An
expert's parameters live on one rank, which gets the tokens of all ranks: their gradient is already
the sum over the losses of all ranks. It must be divided by the number of ranks, and not exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenyard.nn.moe import MoE
from tokenyard.nn.router import Router
from tokenyard.nn.share import (
    is_dtensor,
    named_expert_parameters,
    refuse_adapters_of_copies,
    shares,
    was_sharded,
    watch_gradients,
)

_COMPILED = "_orig_mod."  # before the names of a module that torch.compile has wrapped


def expert_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The experts' parameters: `fully_shard(module, ignored_params=expert_parameters(module))`."""
    return {parameter for _, parameter in named_expert_parameters(module)}


def average_expert_gradients(module: nn.Module) -> None:
    """From now on divide the experts' gradients by the number of ranks, as data parallelism does.

    Call it before the first backward pass, before or after the module is wrapped. Calling it again
    changes nothing.
    """
    for name, parameter in named_expert_parameters(module):
        if is_dtensor(parameter):
            raise ValueError(was_sharded(name))
    refuse_adapters_of_copies(module)
    for _, _, share in shares(module):
        share.averages = True
    watch_gradients(module)


def prepare_for_ddp(module: nn.Module) -> None:
    """Call it before `DistributedDataParallel(module)`, which then neither copies nor averages the
    experts. Their gradients are divided by the number of ranks instead.
    """
    hide_from_ddp(module)
    average_expert_gradients(module)


def hide_from_ddp(module: nn.Module) -> None:
    """Add what is each rank's own to the names that DistributedDataParallel leaves alone."""
    alone = [name for name, _ in named_expert_parameters(module)]
    alone += [
        f"{prefix}.load".lstrip(".")
        for prefix, part in module.named_modules()
        if isinstance(part, Router)
    ]
    plain = [name.removeprefix(_COMPILED) for name in alone]  # it may be compiled later, or before
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    names = dict.fromkeys([*before, *plain, *(_COMPILED + name for name in plain)])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def update_biases(module: nn.Module) -> None:
    """`MoE.update_bias` of every layer. Call it on all ranks after the optimiser's step."""
    for part in module.modules():
        if isinstance(part, MoE):
            part.update_bias()


def auxiliary_losses(module: nn.Module) -> Tensor | float:
    """The sum of all layers' auxiliary losses, of their last calls; 0 if none has one. Add it to
    the loss.
    """
    losses: list[Tensor] = []
    for name, part in module.named_modules():
        if not isinstance(part, MoE) or part.auxiliary_loss is None:
            continue
        if torch.is_grad_enabled() and part.has_lost_gradient():
            raise RuntimeError(
                f"the auxiliary loss of {name or 'the layer'} has no gradient, since its call made "
                "no graph, as in reentrant activation checkpointing: want use_reentrant=False, or "
                "auxiliary_losses under torch.no_grad() to look at its value alone"
            )
        losses.append(part.auxiliary_loss)
    return sum(losses, 0.0)
