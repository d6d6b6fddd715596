"""The layers of a program on one rank, and the Buffers that they share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.nn.programs import data
from tests.nn.programs.program import Program, Slots, has_copies
from tokenyard import Replicas
from tokenyard.nn import MoE, RouterConfig

TIMEOUT = 30.0  # seconds that a rank waits for another


def placement(slots: Slots, num_experts: int) -> Tensor | Replicas:
    """A tensor where that says all."""
    if has_copies(slots) or any(list(one) != sorted(one) for one in slots):
        return Replicas(slots, num_experts)
    ranks = {expert: rank for rank, held in enumerate(slots) for expert in held}
    return torch.tensor([ranks[expert] for expert in range(num_experts)])


def open_buffers(
    stack: ExitStack,
    group: Any,
    program: Program,
    slots: tuple[Slots, ...],
    placed: tuple[bool, ...],
) -> list[tokenyard.Buffer]:
    """One for each layer, often the same."""
    buffers: list[tokenyard.Buffer] = []
    for place, layer in enumerate(program.layers):
        if place and not program.own_buffers:
            buffers.append(buffers[0])
            continue
        buffer = tokenyard.Buffer(
            group,
            transport=program.transport,
            kernels=program.kernels,
            ranks_per_node=program.ranks_per_node,
            placement=placement(slots[place], layer.num_experts) if placed[place] else None,
            timeout=TIMEOUT,
        )
        buffers.append(stack.enter_context(buffer))
    return buffers


class Adapter(nn.Module):
    """Around experts: adds first @ second to gate_up while it is called, as PEFT's LoRA does."""

    def __init__(self, base_layer: Any, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    @property
    def ids(self) -> list[int]:
        return self.base_layer.ids

    @property
    def tokenyard(self) -> Any:
        return self.base_layer.tokenyard

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        parametrize.register_parametrization(self.base_layer, "gate_up", _Plus(self))
        try:
            return self.base_layer(x, offsets)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "gate_up", False)
            held = self.base_layer._parameters  # in their old order, by which averages take them
            held["down"] = held.pop("down")


class _Plus(nn.Module):
    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self._of = [adapter]  # not a part of this one

    def forward(self, weights: Tensor) -> Tensor:
        return weights + self._of[0].first @ self._of[0].second


class Stack(nn.Module):
    """The layers, one after the other."""

    def __init__(
        self, buffers: list[tokenyard.Buffer], program: Program, model: int, *, to_load: bool
    ) -> None:
        super().__init__()
        self.program = program
        dtype = getattr(torch, program.dtype)
        self.layers = nn.ModuleList(
            MoE(
                buffer,
                program.hidden,
                layer.intermediate,
                RouterConfig(**layer.router),
                shared=layer.shared,
                num_worst_tokens=layer.num_worst_tokens,
                dtype=dtype,
            )
            for buffer, layer in zip(buffers, program.layers)
        )
        moe: Any
        for place, moe in enumerate(self.layers):
            values = data.parameters(program, place, model)
            mine = {
                name: whole[moe.experts.ids] if name.startswith("experts") else whole
                for name, whole in values.items()
            }
            for name, one in moe.named_parameters():
                one.data.copy_(torch.full_like(one, torch.nan) if to_load else mine[name])
            for part in program.layers[place].frozen:
                moe.get_submodule(part).requires_grad_(False)
            if program.layers[place].adapter:
                moe.experts = Adapter(moe.experts, mine["experts.first"], mine["experts.second"])

    def forward(self, x: Tensor) -> Tensor:
        *reentrant, of = self.program.checkpoint.split()
        again = of == "model" and torch.is_grad_enabled()
        return checkpoint(self._all, x, use_reentrant=bool(reentrant)) if again else self._all(x)

    def _all(self, x: Tensor) -> Tensor:
        *reentrant, of = self.program.checkpoint.split()
        again = of == "layer" and torch.is_grad_enabled()
        for place in self.program.calls:
            layer = self.layers[place]
            out = checkpoint(layer, x, use_reentrant=bool(reentrant)) if again else layer(x)
            x = x + out if self.program.residual else out
        return x
