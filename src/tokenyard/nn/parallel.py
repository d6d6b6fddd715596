"""Experts beside data parallelism: which parameters are a rank's own, and how to scale them.

Dense parameters are the same on all ranks, and data parallelism averages their gradients. Those of
an expert live on one rank, which gets the tokens of all: its gradient is the sum over all ranks'
losses already. It must be divided by the number of ranks, and exchanged with nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenyard.nn.moe import Experts, MoE
from tokenyard.nn.router import Router


def named_expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are this rank's own, with their full names in `module`."""
    for prefix, part in module.named_modules():
        if isinstance(part, Experts):
            yield from part.named_parameters(prefix)


def expert_parameters(module: nn.Module) -> set[nn.Parameter]:
    """As `fully_shard(module, ignored_params=expert_parameters(module))` wants them."""
    return {parameter for _, parameter in named_expert_parameters(module)}


def average_expert_gradients(module: nn.Module) -> None:
    """From now on divide the experts' gradients by the number of ranks, as data parallelism does.

    Call it once, before the first backward pass; it does not matter whether before or after the
    module is wrapped.
    """
    for part in module.modules():
        if isinstance(part, MoE):
            for parameter in part.experts.parameters():
                parameter.register_hook(_divided_by(part.buffer.group_size))


def prepare_for_ddp(module: nn.Module) -> None:
    """Call it before `DistributedDataParallel(module)`, which then leaves the experts alone; their
    gradients are averaged here.
    """
    alone = [name for name, _ in named_expert_parameters(module)]
    alone += [f"{prefix}.load".lstrip(".") for prefix, _ in _routers(module)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, alone)
    average_expert_gradients(module)


def update_biases(module: nn.Module) -> None:
    """`MoE.update_bias` of every layer. Call it on all ranks after the optimiser's step."""
    for part in module.modules():
        if isinstance(part, MoE):
            part.update_bias()


def auxiliary_losses(module: nn.Module) -> Tensor | float:
    """The sum over layers, of their last calls; 0 if none has one. Add it to the loss."""
    losses = [part.auxiliary_loss for part in module.modules() if isinstance(part, MoE)]
    return sum((loss for loss in losses if loss is not None), 0.0)


def _routers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, part in module.named_modules():
        if isinstance(part, Router):
            yield prefix, part


def _divided_by(number: int) -> Callable[[Tensor], Tensor]:
    return lambda grad: grad / number
