"""The experts function: what transformers calls in the place of an experts module's own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenyard.integrations.transformers.everyone import Everyone, Replicated, Summed
from tokenyard.nn import functional
from tokenyard.nn.plain import require_plain
from tokenyard.nn.share import Share
from tokenyard.replicas import Replicas
from tokenyard.validate import require

NAME = "tokenyard"  # in transformers' registry of expert functions
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that it computes with
Experts = Any  # a module of transformers that holds stacked experts
Run = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]
Through = Callable[[Experts, Tensor, Tensor], Tensor]


@dataclass(kw_only=True, eq=False)
class Plan(Share):
    """How one experts module takes part."""

    everyone: Everyone | None = None  # where all ranks have the same tokens

    @cached_property
    def local_of_expert(self) -> Tensor:
        """[E]: an expert's place in this rank's stack, -1 where it lives elsewhere."""
        table = torch.full((self.num_experts,), -1, device="cpu")
        table[self.ids] = torch.arange(len(self.ids), device="cpu")
        return table

    def check_move(self) -> None:
        super().check_move()
        require(
            self.everyone is None,
            'the model has tokens="same", whose experts stay where they are, want tokens="own"',
        )

    def follow(self, module: Experts, replicas: Replicas) -> None:
        """The module's experts have moved, and live there now."""
        super().follow(module, replicas)
        module.num_experts = len(self.ids)


def experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """[T, D]: the weighted sum of what each token's experts say, wherever they are."""
    return run_by_expert(self, hidden_states, top_k_index, top_k_weights, through_experts)


def run_by_expert(
    module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, through: Through
) -> Tensor:
    """Do what `experts_forward` does, with a function that takes rows x [M, D] and their offsets
    through this rank's experts.
    """
    plan = _plan_of(module)
    if plan.everyone is None:

        def experts(x: Tensor, offsets: Tensor) -> Tensor:
            return through(module, x, offsets).to(x.dtype)

        x, weights = x.contiguous(), topk_weights.float()
        given = plan.buffer, x, topk_idx, weights, plan.num_experts
        balanced = plan.may_borrow(module)
        return functional.through_experts(*given, experts, place=plan.place, balanced=balanced)

    def run(module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        grouped = functional.permute(x, topk_idx, module.num_experts)
        y = through(module, grouped.x, grouped.offsets)
        return functional.unpermute(y.to(x.dtype), grouped.row_of, topk_weights)

    return run_spread(module, x, topk_idx, topk_weights, run)


def run_spread(
    module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, run: Run
) -> Tensor:
    """Do what `experts_forward` does, with a function that runs this rank's experts: [N, D], the
    sum of what a row's own experts say.
    """
    plan = _plan_of(module)
    x, weights = x.contiguous(), topk_weights.float()
    if plan.everyone is None:
        rows = functional.dispatch(
            plan.buffer, x, topk_idx, weights, plan.num_experts, place=plan.place
        )
        y = run(module, *rows[:3])
        return functional.combine(plan.buffer, y, rows)
    require_plain("the experts' exchange", x=x, topk_idx=topk_idx, topk_weights=weights)
    x, weights = (Replicated.apply(plan.everyone, one) for one in (x, weights))
    local = plan.local_of_expert[topk_idx].masked_fill(topk_idx < 0, -1)
    return Summed.apply(plan.everyone, run(module, x, local, weights))


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _plan_of(module: Experts) -> Plan:
    plan = getattr(module, "tokenyard", None)
    if plan is None:
        raise ValueError(
            f"{type(module).__name__} has no Buffer, want a model that was given to "
            "tokenyard.integrations.transformers.expert_parallel"
        )
    return plan


def through_experts(module: Experts, x: Tensor, offsets: Tensor) -> Tensor:
    """x [M, D] by expert; expert l's rows end before offsets[l]."""
    if module.has_gate:
        y = module._apply_gate(linear(module, "gate_up_proj", x, offsets))
    else:
        y = module.act_fn(linear(module, "up_proj", x, offsets))
    y = linear(module, "down_proj", y, offsets)
    return _norm(module, y) if module.has_post_expert_norm else y


def linear(module: Experts, key: str, x: Tensor, offsets: Tensor) -> Tensor:
    num_experts = offsets.shape[0]
    weights = _weights(module, key, num_experts)
    matrices = weights if module.is_transposed else weights.transpose(1, 2)
    y = functional.grouped_mm(x.to(weights.dtype), matrices, offsets)
    if module.has_bias:
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        bias = _weights(module, f"{key}_bias", num_experts)
        y = y + bias.repeat_interleave(counts, 0, output_size=len(x))
    return y


def _weights(module: Experts, key: str, num_experts: int) -> Tensor:
    """Without a Plan the module is transformers' own, which cares for gradients itself."""
    plan = getattr(module, "tokenyard", None)
    return getattr(module, key) if plan is None else plan.weights(module, key, num_experts)


def _norm(module: Experts, y: Tensor) -> Tensor:
    """Its parameters are whole on all ranks. Where ranks have the same tokens, each makes a part of
    their gradients, which are summed; elsewhere each rank has those of its own rows.
    """
    norm, plan = module.post_expert_norm, getattr(module, "tokenyard", None)
    if plan is None or plan.everyone is None:
        return norm(y)
    shared = {
        name: Replicated.apply(plan.everyone, one[None])[0] for name, one in norm.named_parameters()
    }
    return functional_call(norm, shared, y)
