"""The experts function: what transformers calls in the place of an experts module's own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.func import functional_call
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenyard.buffer import Buffer
from tokenyard.integrations.transformers.everyone import Everyone, Replicated, Summed
from tokenyard.nn import functional
from tokenyard.nn.share import Share
from tokenyard.topology import Placement

NAME = "tokenyard"  # in transformers' registry of expert functions
Experts = Any  # a module of transformers that holds stacked experts


@dataclass(kw_only=True, eq=False)
class Plan(Share):
    """How one experts module takes part."""

    placement: Placement
    everyone: Everyone | None = None  # where all ranks have the same tokens

    @classmethod
    def make(cls, buffer: Buffer, placement: Placement, everyone: Everyone | None = None) -> Plan:
        return cls(
            buffer=buffer,
            placement=placement,
            everyone=everyone,
            ids=placement.experts_of_rank[buffer.rank],
            num_experts=placement.num_experts,
            num_losses=buffer.group_size if everyone is None else 1,
        )


def experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """[T, D]: the weighted sum of what each token's experts say, wherever they are."""
    plan = getattr(self, "tokenyard", None)
    if plan is None:
        raise ValueError(
            f"{type(self).__name__} has no Buffer, want a model that was given to "
            "tokenyard.integrations.transformers.expert_parallel"
        )
    x, weights = hidden_states.contiguous(), top_k_weights.float()
    if plan.everyone is None:
        rows = functional.dispatch(plan.buffer, x, top_k_index, weights, plan.placement.num_experts)
        y = _run(self, *rows[:3])
        return functional.combine(plan.buffer, y, rows.ticket, len(x))
    x, weights = (Replicated.apply(plan.everyone, one) for one in (x, weights))
    local_of = plan.placement.local_table(plan.buffer.rank)
    y = _run(self, x, local_of[top_k_index], weights)
    return Summed.apply(plan.everyone, y)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def _run(module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """This rank's experts: [N, D], the weighted sum of what a row's own experts say."""
    grouped = functional.permute(x, topk_idx, module.num_experts)
    if module.has_gate:
        y = module._apply_gate(_linear(module, "gate_up_proj", grouped.x, grouped.offsets))
    else:
        y = module.act_fn(_linear(module, "up_proj", grouped.x, grouped.offsets))
    y = _linear(module, "down_proj", y, grouped.offsets)
    if module.has_post_expert_norm:
        y = _norm(module, y)
    return functional.unpermute(y.to(x.dtype), grouped.row_of, topk_weights)


def _linear(module: Experts, key: str, x: Tensor, offsets: Tensor) -> Tensor:
    weights = module.tokenyard.weights(module, key)
    matrices = weights if module.is_transposed else weights.transpose(1, 2)
    y = functional.grouped_mm(x.to(weights.dtype), matrices, offsets)
    if module.has_bias:
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        bias = module.tokenyard.weights(module, f"{key}_bias")
        y = y + bias.repeat_interleave(counts, 0, output_size=len(x))
    return y


def _norm(module: Experts, y: Tensor) -> Tensor:
    """Its parameters are whole on all ranks. Where ranks have the same tokens, each makes a part of
    their gradients, which are summed; elsewhere each rank has those of its own rows.
    """
    norm, everyone = module.post_expert_norm, module.tokenyard.everyone
    if everyone is None:
        return norm(y)
    shared = {
        name: Replicated.apply(everyone, one[None])[0] for name, one in norm.named_parameters()
    }
    return functional_call(norm, shared, y)
