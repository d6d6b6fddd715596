"""Which experts of a module are this rank's: what gradients, norms and checkpoints must know.

A module that holds stacked experts carries a Share as its attribute `tokenyard`: `Experts` does,
and so do the experts of transformers that the integration has spread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenyard.buffer import Buffer


@dataclass(kw_only=True, eq=False)
class Share:
    """This rank's experts of one module."""

    buffer: Buffer
    ids: list[int]  # global, in the order of the stack
    num_experts: int  # of all ranks
    num_losses: int  # whose gradients add up in an expert: those of all ranks, or one
    averages: bool = False  # whether gradients are divided by that number

    def weights(self, module: nn.Module, name: str) -> Tensor:
        """A stacked parameter of the module, to compute with.

        The gradient is divided here, and not by a hook: a hook belongs to one Parameter, which
        `load_state_dict(assign=True)` or `to_empty` replaces.
        """
        if not torch.compiler.is_compiling():
            _check_ddp()
        weights: Tensor = getattr(module, name)
        if self.averages and self.num_losses > 1:
            return _Divided.apply(weights, self.num_losses)
        return weights


class _Divided(torch.autograd.Function):
    """The tensor itself; its gradient is divided by a number."""

    @staticmethod
    def forward(x: Tensor, number: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.number = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.number, None


def shares(module: nn.Module) -> Iterator[tuple[str, nn.Module, Share]]:
    """The modules that hold experts, with their names; a module that two layers use comes once."""
    for name, part in module.named_modules():
        share = part.__dict__.get("tokenyard")
        if isinstance(share, Share):
            yield name, part, share


def named_expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are this rank's own, with their full names in `module`."""
    for name, part, _ in shares(module):
        yield from part.named_parameters(name, recurse=False)


def own_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Of a module that holds experts: those that are this rank's own."""
    return list(part.parameters(recurse=False))


def _check_ddp() -> None:
    """Raise if DistributedDataParallel, in whose forward pass this is, has taken the experts."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or getattr(ddp, "_tokenyard_checked", False):
        return
    own = [name for name, _ in named_expert_parameters(ddp.module)]
    taken = [name for name in own if name not in ddp.parameters_to_ignore]
    if taken:
        raise RuntimeError(
            f"DistributedDataParallel has copied rank 0's {taken[0]} to all ranks: want "
            "tokenyard.nn.prepare_for_ddp(model) before DistributedDataParallel(model)"
        )
    ddp._tokenyard_checked = True
