"""The numbers of a program: parameters, tokens, and what the loss weighs them with."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.nn.programs.program import Program


def noise(program: Program, name: str, *shape: int) -> Tensor:
    """[...] of the program's dtype; it depends on the program's seed and the name alone."""
    seed = random.Random(f"{program.seed}, {program.attempt}: {name}").getrandbits(48)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return drawn.to(getattr(torch, program.dtype))


def parameters(program: Program, place: int, model: int = 0) -> dict[str, Tensor]:
    """What the layer in this place begins with; experts have one tensor for all of them."""
    layer = program.layers[place]
    hidden, inner, shared = program.hidden, layer.intermediate, layer.shared
    shapes = {
        "router.weight": (layer.num_experts, hidden),
        "experts.gate_up": (layer.num_experts, hidden, 2 * inner),
        "experts.down": (layer.num_experts, inner, hidden),
    }
    if shared:
        shapes["shared.gate_up.weight"] = (2 * shared, hidden)
        shapes["shared.down.weight"] = (hidden, shared)
    if layer.adapter:
        shapes["experts.first"] = (layer.num_experts, hidden, layer.adapter)
        shapes["experts.second"] = (layer.num_experts, layer.adapter, 2 * inner)
    of, made = f"{model} " if model else "", {}
    for name, shape in shapes.items():
        width = shape[1] if name.startswith("experts") else shape[-1]
        made[name] = noise(program, f"{of}{place} {name}", *shape) * 0.7 * width**-0.5
    return made


def tokens(program: Program, step: int, call: int, rank: int) -> Tensor:
    """[..., D], a leaf, with the program's strides."""
    shape = (*program.steps[step].shapes[call][rank], program.hidden)
    x = noise(program, f"x {step} {call} {rank}", *shape)
    if program.strides == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if program.strides == "gapped":
        wide = torch.full((*shape[:-1], 2 * program.hidden), torch.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def loss_weights(program: Program, step: int, call: int, rank: int) -> Tensor:
    shape = (*program.steps[step].shapes[call][rank], program.hidden)
    return noise(program, f"loss {step} {call} {rank}", *shape)
