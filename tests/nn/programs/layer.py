"""A program on the ranks: the layer itself, and all that the oracle gives too. Importable, so that
processes can.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.nn.programs import data
from tests.nn.programs.draw import Program, Step
from tokenyard.nn import (
    MoE,
    RouterConfig,
    auxiliary_losses,
    average_expert_gradients,
    functional,
    update_biases,
)
from tokenyard.testing import poisoned

TIMEOUT = 30.0  # seconds that a rank waits for another


class Stack(nn.Module):
    """The layers, one after the other."""

    def __init__(self, buffers: list[tokenyard.Buffer], program: Program) -> None:
        super().__init__()
        self.residual, self.again = program.residual, program.checkpoint == "layer"
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
            for name, whole in data.parameters(program, place).items():
                mine = whole[moe.experts.ids] if name.startswith("experts") else whole
                moe.get_parameter(name).data.copy_(mine)
            for part in program.layers[place].frozen:
                moe.get_submodule(part).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            again = self.again and torch.is_grad_enabled()
            out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            x = x + out if self.residual else out
        return x


def on_virtual_rank(group: Any, program: Program) -> dict[str, Tensor]:
    """What the oracle gives for this rank."""
    with ExitStack() as stack:
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
                placement=torch.tensor(layer.rank_of_expert) if layer.placed else None,
                timeout=TIMEOUT,
            )
            buffers.append(stack.enter_context(buffer))
        model = Stack(buffers, program)
        if program.average:
            average_expert_gradients(model)
        record: dict[str, Tensor] = {}
        for number, step in enumerate(program.steps):
            _step(model, program, number, step, group.rank(), record)
        moe: Any
        for place, moe in enumerate(model.layers):
            for name, one in _named(moe, dict(moe.named_parameters())).items():
                record[f"layer {place}, {name} at the end"] = one.detach().clone()
        return record


def on_process(group: Any, program: Program) -> dict[str, Tensor]:
    with poisoned():
        return on_virtual_rank(group, program)


def _step(
    model: Stack, program: Program, number: int, step: Step, rank: int, record: dict[str, Tensor]
) -> None:
    moe: Any
    model.train(step.training)
    model.zero_grad()
    for call in range(len(step.shapes)):
        _call(model, program, number, call, rank, record)
    if step.mode == "backward":
        for place, moe in enumerate(model.layers):
            parameters = dict(moe.named_parameters())
            frozen = [name for name, one in parameters.items() if not one.requires_grad]
            assert all(parameters[name].grad is None for name in frozen), f"a grad of {frozen}"
            grads = {
                name: torch.zeros_like(one) if one.grad is None else one.grad
                for name, one in parameters.items()
                if one.requires_grad
            }
            for name, grad in _named(moe, grads).items():
                record[f"step {number}, layer {place}, {name}.grad"] = grad.clone()
    if step.learning_rate:
        _learn(model, step.learning_rate / program.hidden, program.average)
    routers: list[Any] = [moe.router for moe in model.layers]
    loads = [None if one.load is None else one.load.clone() for one in routers]
    if step.update_biases:
        update_biases(model)
    for place, (moe, load) in enumerate(zip(model.layers, loads)):
        if load is not None:
            record[f"step {number}, layer {place}, load"] = load
            record[f"step {number}, layer {place}, bias"] = moe.router.bias.clone()


def _call(
    model: Stack, program: Program, number: int, call: int, rank: int, record: dict[str, Tensor]
) -> None:
    step, at = program.steps[number], f"step {number}, call {call}"
    x = data.tokens(program, number, call, rank)
    x.requires_grad_(program.x_requires_grad[rank])
    backward = step.mode == "backward"
    without = torch.inference_mode if step.mode == "inference" else torch.no_grad
    with nullcontext() if backward else without():
        if program.checkpoint == "model" and backward:
            out = checkpoint(model, x, use_reentrant=False)
        else:
            out = model(x)
    record[f"{at}, out"] = out.detach().clone()
    if step.training:
        for place, moe in enumerate(model.layers):
            auxiliary = auxiliary_losses(moe)
            if isinstance(auxiliary, Tensor):
                record[f"{at}, layer {place}, auxiliary loss"] = auxiliary.detach().clone()
    if not backward:
        return
    if program.loss == "sum":
        loss = out.sum()
    else:
        loss = (out * data.loss_weights(program, number, call, rank) + out * out / 4).sum()
    loss = loss / program.hidden
    if step.training and step.with_auxiliary:
        loss = loss + auxiliary_losses(model)
    if loss.requires_grad:
        loss.backward()
    if x.requires_grad:
        record[f"{at}, x.grad"] = torch.zeros_like(x) if x.grad is None else x.grad


def _learn(model: Stack, rate: float, average: bool) -> None:
    """Dense gradients are summed over ranks by hand; an expert's is a sum already. Steps are small,
    since rounding would grow with the numbers.
    """
    moe: Any
    for moe in model.layers:
        for name, parameter in moe.named_parameters():
            grad = parameter.grad
            if not parameter.requires_grad:
                continue
            grad = torch.zeros_like(parameter) if grad is None else grad
            if not name.startswith("experts"):
                total = functional.sum_over_ranks(moe.buffer, grad.flatten())
                grad = total.view(grad.shape) / (moe.buffer.group_size if average else 1)
            parameter.data -= rate * grad.clamp(-1, 1)


def _named(moe: MoE, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts by their global ids."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("experts"):
            named |= {f"{name}[{e}]": tensor[local] for local, e in enumerate(moe.experts.ids)}
        else:
            named[name] = tensor
    return named
