"""Optimisers that programs draw: the oracle's and the layer's are made here alike, by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.nn.programs.program import BY_HAND

# A large eps keeps what rounding changes in a small gradient from growing.
_EPS = 0.05
OPTIMISERS: dict[str, tuple[Any, dict[str, Any]]] = {
    BY_HAND: (None, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "dampened": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "adam": (torch.optim.Adam, {"eps": _EPS, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"eps": _EPS, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"eps": _EPS}),
    "adagrad": (torch.optim.Adagrad, {"eps": _EPS}),
    "rmsprop": (torch.optim.RMSprop, {"eps": _EPS, "momentum": 0.5}),
    "adamax": (torch.optim.Adamax, {"eps": _EPS}),
}
ALWAYS_CLIPPED = ("sgd", "dampened")  # their steps are as large as gradients


def make(name: str, dense: list[Tensor], experts: list[Tensor], split: bool) -> list[Optimizer]:
    """One for all parameters, in two groups, or one for those of experts alone. An optimiser has
    something to train.
    """
    kind, options = OPTIMISERS[name]
    parts = [dense, experts]
    if split:
        parts = [[one for one in part if one.requires_grad] for part in parts]
    groups = [{"params": part, "lr": 0.1} for part in parts if part]
    if kind is None or not any(one.requires_grad for part in parts for one in part):
        return []
    if split:
        return [kind([group], **options) for group in groups]
    return [kind(groups, **options)]


def set_rate(optimisers: list[Optimizer], rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate / 10
