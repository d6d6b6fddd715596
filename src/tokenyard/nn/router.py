"""Which experts a token goes to, with what weights, and how their load is kept even."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenyard.nn.plain import autocast_device
from tokenyard.validate import integer, require

_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose.

    >>> deepseek_v3 = RouterConfig(num_experts=256, num_topk=8, score="sigmoid", scale=2.5,
    ...                            num_groups=8, num_kept_groups=4, bias_rate=0.001)
    >>> deepseek_v3.num_choices
    128
    """

    num_experts: int
    num_topk: int
    score: str = "softmax"  # of all experts, or "sigmoid" of each
    normalise: bool = True  # a token's weights add up to `scale`
    scale: float = 1.0
    num_groups: int = 1  # groups of consecutive experts
    num_kept_groups: int = 1  # groups a token chooses from: those with the largest best two scores
    auxiliary_loss: float = 0.0  # coefficient of a loss that is least when experts are chosen alike
    bias_rate: float = 0.0  # how far one step moves the bias, which only the choice sees

    def __post_init__(self) -> None:
        integer("num_experts", self.num_experts, at_least=1)
        integer("num_groups", self.num_groups, at_least=1)
        integer("num_kept_groups", self.num_kept_groups, at_least=1, at_most=self.num_groups)
        require(self.score in _SCORES, f"score is {self.score!r}, want one of {', '.join(_SCORES)}")
        require(
            self.num_experts % self.num_groups == 0,
            f"num_groups is {self.num_groups}, want a divisor of num_experts ({self.num_experts})",
        )
        integer("num_topk", self.num_topk, at_least=1, at_most=self.num_choices)

    @property
    def num_choices(self) -> int:
        """The experts that are left when groups were chosen."""
        return self.num_experts // self.num_groups * self.num_kept_groups


class Chosen(NamedTuple):
    topk_idx: Tensor  # [T, K] int64
    topk_weights: Tensor  # [T, K] float32
    scores: Tensor  # [T, E], before the bias


class Router(nn.Module):
    """A linear layer whose outputs are scores of experts, in float32 at least."""

    def __init__(
        self,
        hidden: int,
        config: RouterConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, hidden, device=device, dtype=dtype)
        )
        # The bias moves by its own rule, not by gradients, and is the same on all ranks. `load`
        # counts this rank's choices since the bias moved last. Activation checkpointing counts them
        # twice, which changes no comparison with the mean.
        self.bias: Tensor | None
        self.load: Tensor | None
        self.register_buffer("bias", _zeros(config, device))
        self.register_buffer("load", _zeros(config, device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as torch.nn.Linear does. The bias and the load begin at zero again."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        for kept in (self.bias, self.load):
            if kept is not None:
                kept.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep bias and load, in float32, whatever `model.to(bfloat16)`, `to_empty` and the like do
        to them: both are sums of many small steps, which bfloat16 would lose, and no checkpoint has
        the load. Those of a meta device begin at zero.
        """
        before = {
            name: one for name in ("bias", "load") if (one := getattr(self, name)) is not None
        }
        super()._apply(fn, recurse)
        for name, old in before.items():
            device = getattr(self, name).device
            kept = torch.zeros_like(old, device=device) if old.is_meta else old.to(device)
            setattr(self, name, kept)
        return self

    def forward(self, x: Tensor) -> Chosen:
        """x [T, D]."""
        config, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(autocast_device(x), enabled=False):
            logits = nn.functional.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        topk_idx = choose(scores.detach(), config, self.bias)
        weights = scores.gather(1, topk_idx)
        if config.normalise:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        if self.load is not None and self.training:
            self.load += count(topk_idx, config.num_experts)
        return Chosen(topk_idx, (weights * config.scale).float(), scores)

    @torch.no_grad()
    def move_bias(self, load: Tensor) -> None:
        """Raise the bias of an expert that was chosen less often than the mean, and lower that of
        one that was chosen more often, by bias_rate. `load` counts the choices of all ranks.
        """
        assert self.bias is not None
        assert self.load is not None
        if self.bias.dtype != torch.float32:  # it was assigned from a checkpoint
            self.bias = self.bias.float()
        self.bias += self.config.bias_rate * (load.mean() - load).sign()
        self.load.zero_()


def choose(scores: Tensor, config: RouterConfig, bias: Tensor | None) -> Tensor:
    """[T, K]: the experts with the highest score + bias, in the groups that are kept.

    >>> config = RouterConfig(num_experts=4, num_topk=2, num_groups=2, num_kept_groups=1)
    >>> choose(torch.tensor([[0.9, 0.0, 0.5, 0.6]]), config, None).tolist()  # 0.5 + 0.6 > 0.9 + 0
    [[3, 2]]
    """
    if bias is not None:
        scores = scores + bias
    if config.num_kept_groups < config.num_groups:
        groups = scores.unflatten(1, (config.num_groups, -1))
        best = groups.topk(min(2, groups.shape[2])).values.sum(2)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(config.num_kept_groups).indices, True)
        scores = groups.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    return scores.topk(config.num_topk).indices


def count(topk_idx: Tensor, num_experts: int) -> Tensor:
    """[E] float32: how often each was chosen.

    >>> count(torch.tensor([[0, 2], [2, 1]]), 4).tolist()
    [1.0, 1.0, 2.0, 0.0]
    """
    chosen = topk_idx.flatten()
    none = torch.zeros(num_experts, dtype=torch.float32, device=topk_idx.device)
    return none.scatter_add(0, chosen, torch.ones_like(chosen, dtype=torch.float32))


def auxiliary_loss(scores: Tensor, load: Tensor) -> Tensor:
    """E times the sum over experts of (its part of the choices) * (its mean share of the scores).

    `load` [E] counts the choices of all ranks. Only scores get a gradient. The loss is 1 if all
    experts are chosen alike:

    >>> auxiliary_loss(torch.full((3, 4), 0.25), torch.tensor([6.0, 6.0, 6.0, 6.0])).item()
    1.0
    >>> auxiliary_loss(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([6.0, 6.0, 0, 0])).item()
    2.0
    """
    part = load / load.sum().clamp(min=1)
    share = (scores / scores.sum(1, keepdim=True)).sum(0) / max(1, scores.shape[0])
    return len(load) * (part * share).sum()


def _zeros(config: RouterConfig, device: torch.device | str | None) -> Tensor | None:
    return torch.zeros(config.num_experts, device=device) if config.bias_rate else None
