"""Models whose experts transformers does not run through its registry: one adapter for each kind.

A *block* is a module whose forward is replaced. Its *holders*, itself or modules inside it, hold
the experts' parameters. Parameters that are not stacked by expert are stacked here, and saved under
their own names again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tokenyard.integrations.transformers.experts import (
    Experts,
    experts_forward,
    linear,
    run_by_expert,
    run_spread,
    through_experts,
)
from tokenyard.nn import functional

Saved = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    forward: Callable[..., Any]  # of the block
    holders: tuple[str, ...] = ("",)  # where in the block
    # Makes stacked parameters of what the holder has, and says how `linear` takes them.
    stack: Callable[[Experts], None]
    is_stacked: bool = True  # before that
    # The names and tensors in a checkpoint of one stacked parameter of all experts.
    unstack: Callable[[Experts, str, Tensor], Saved] = lambda holder, key, whole: {key: whole}
    num_experts: str = "num_experts"  # the holder's attribute


def find_blocks(model: nn.Module) -> Iterator[tuple[str, Experts, Adapter]]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in REFUSED:
            raise ValueError(f"{name} is a {kind}, want other experts: {REFUSED[kind]}")
        if kind in ADAPTERS:
            yield name, module, ADAPTERS[kind]


def find_holders(model: nn.Module) -> dict[str, Experts]:
    """The modules that hold experts, by name. Each is told the number of its experts."""
    found = {}
    for name, block, adapter in find_blocks(model):
        for path in adapter.holders:
            holder: Any = block.get_submodule(path)
            if not getattr(holder, "_is_expert_parallel", False):
                holder._is_expert_parallel = False
                holder.num_experts = getattr(holder, adapter.num_experts)
            found[".".join(filter(None, (name, path)))] = holder
    return found


def is_stacked(holder: Experts) -> bool:
    """Whether the holder has its experts stacked from the start."""
    adapter = ADAPTERS.get(type(holder).__name__)
    return adapter is None or adapter.is_stacked


def stack(model: nn.Module) -> None:
    """Stack the experts of all blocks, before ranks keep their own only."""
    for _, block, adapter in find_blocks(model):
        for path in adapter.holders:
            adapter.stack(block.get_submodule(path))


def replace_forward(model: nn.Module) -> None:
    """Replace the forward of all blocks, once each holder has its plan."""
    for _, block, adapter in find_blocks(model):
        block.forward = MethodType(adapter.forward, block)  # of a copy, it is the copy's


def unstack(holder: Experts, key: str, whole: Tensor) -> Saved:
    adapter = ADAPTERS.get(type(holder).__name__)
    return adapter.unstack(holder, key, whole) if adapter else {key: whole}


def _describe(holder: Experts, *, has_gate: bool = True, is_transposed: bool = False) -> None:
    """Set the attributes that transformers' decorator sets."""
    holder.has_gate, holder.is_transposed = has_gate, is_transposed
    holder.has_bias = holder.has_post_expert_norm = False


def _gate(self: Experts, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def _stack_plain(holder: Experts) -> None:
    _describe(holder)


def _stack_llama4(holder: Experts) -> None:
    _describe(holder, is_transposed=True)
    holder._apply_gate = MethodType(_gate, holder)


def _llama4(self: Experts, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    topk_idx = logits.topk(self.top_k, dim=1).indices
    routed = run_spread(self.experts, x, topk_idx, scores.gather(1, topk_idx), _run_weighed)
    return self.shared_expert(x) + routed, logits


def _run_weighed(module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """Run `through_experts` with weights on what goes into the experts, not on what comes out."""
    grouped = functional.permute(x, topk_idx, module.num_experts)
    chosen = grouped.row_of >= 0
    weights = x.new_zeros(len(grouped.x), dtype=topk_weights.dtype)
    weights = weights.index_put((grouped.row_of[chosen],), topk_weights[chosen])
    rows = grouped.x * weights[:, None].to(x.dtype)
    y = through_experts(module, rows, grouped.offsets)
    return functional.unpermute(y.to(x.dtype), grouped.row_of)


def _stack_longcat(holder: Experts) -> None:
    """gate_up_proj also has rows for the experts that do nothing, which are never used. All ranks
    keep them for the checkpoint.
    """
    _describe(holder)
    holder._apply_gate = MethodType(_gate, holder)
    whole = holder.gate_up_proj
    holder.unused = whole.detach()[holder.num_experts :].clone()
    used = whole.detach()[: holder.num_experts]
    holder.gate_up_proj = nn.Parameter(used, requires_grad=whole.requires_grad)


def _unstack_longcat(holder: Experts, key: str, whole: Tensor) -> Saved:
    return {key: torch.cat([whole, holder.unused]) if key == "gate_up_proj" else whole}


def _longcat(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts that do nothing are on every rank."""
    idle = top_k_index >= self.tokenyard.num_experts
    y = experts_forward(self, hidden_states, top_k_index.masked_fill(idle, -1), top_k_weights)
    weights = top_k_weights.masked_fill(~idle, 0.0).sum(1, keepdim=True)
    return y + (hidden_states * weights).to(y.dtype)


def _stack_switch(holder: Experts) -> None:
    _describe(holder, has_gate=False)
    experts = list(holder.values())
    holder.clear()
    for key, name in (("up_proj", "wi"), ("down_proj", "wo")):
        matrices = [getattr(one, name).weight for one in experts]
        stacked = torch.stack([one.detach() for one in matrices])
        setattr(holder, key, nn.Parameter(stacked, requires_grad=matrices[0].requires_grad))
    holder.act_fn = nn.Sequential(experts[0].act, experts[0].dropout)


def _unstack_switch(holder: Experts, key: str, whole: Tensor) -> Saved:
    name = {"up_proj": "wi", "down_proj": "wo"}[key]
    return {f"expert_{expert}.{name}.weight": one for expert, one in enumerate(whole.unbind())}


def _switch(
    self: Experts, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor
) -> Tensor:
    """selected_experts [T, 1, E] is one-hot, or all zeros if the expert's capacity was used up."""
    topk_idx = selected_experts.argmax(-1).masked_fill(selected_experts.sum(-1) == 0, -1)
    return experts_forward(self, hidden_states, topk_idx, routing_weights)


def _stack_dbrx(holder: Experts) -> None:
    _describe(holder)
    holder._apply_gate, holder.act_fn = MethodType(_gate, holder), holder.mlp.activation_fn
    gate, up, down = (getattr(holder.mlp, name) for name in ("w1", "v1", "w2"))
    shape = (holder.num_experts, holder.ffn_hidden_size, holder.hidden_size)
    stacked = torch.cat([one.detach().view(shape) for one in (gate, up)], 1)
    holder.gate_up_proj = nn.Parameter(stacked, requires_grad=gate.requires_grad)
    turned = down.detach().view(shape).transpose(1, 2).contiguous()
    holder.down_proj = nn.Parameter(turned, requires_grad=down.requires_grad)
    del holder.mlp.w1, holder.mlp.v1, holder.mlp.w2


def _unstack_dbrx(holder: Experts, key: str, whole: Tensor) -> Saved:
    if key == "down_proj":
        return {"mlp.w2": whole.transpose(1, 2).flatten(0, 1)}
    gate, up = whole.chunk(2, 1)
    return {"mlp.w1": gate.flatten(0, 1), "mlp.v1": up.flatten(0, 1)}


def _dbrx(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    x = hidden_states.reshape(-1, self.hidden_size)
    return experts_forward(self, x, top_k_index, top_k_weights).view(hidden_states.shape)


def _jetmoe(self: Experts, layer_input: Tensor) -> Tensor:
    def through(module: Experts, x: Tensor, offsets: Tensor) -> Tensor:
        gate, up = linear(self.input_linear, "weight", x, offsets).chunk(2, -1)
        return linear(self.output_linear, "weight", self.activation(gate) * up, offsets)

    x = layer_input.reshape(-1, layer_input.shape[-1])
    logits = self.router(x)[-1]
    chosen, topk_idx = logits.topk(self.router.top_k, dim=1)
    y = run_by_expert(self.input_linear, x, topk_idx, chosen.softmax(1), through)
    return y.view(layer_input.shape) + self.bias


def _doge(self: Experts, hidden_states: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """An expert is one column and one row: a token's own are gathered, not grouped."""

    def run(module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        here, elsewhere = topk_idx.clamp(min=0), topk_idx < 0
        down, up = (
            one.tokenyard.weights(one, "weight")[here] for one in (self.down_embed, self.up_embed)
        )
        inner = self.act_fn((down @ x[:, :, None]).squeeze(2))
        inner = inner * topk_weights.masked_fill(elsewhere, 0.0).to(x.dtype)
        return (inner[:, None] @ up).squeeze(1)

    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = self.router_gate(hidden_states).view(2, len(x), -1)
    (scores_x, scores_y), (idx_x, idx_y) = logits.topk(self.num_keys, dim=-1)
    scores = (scores_x[:, :, None] + scores_y[:, None]).flatten(1)
    ids = (idx_x[:, :, None] * self.num_keys + idx_y[:, None]).flatten(1)
    chosen, position = scores.topk(self.top_k, dim=-1)
    weights = chosen.softmax(-1)
    if self.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    routed = run_spread(self.down_embed, x, ids.gather(1, position), weights, run)
    shared = self.down_proj(
        self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
    )
    return shared + routed.view(hidden_states.shape), logits


ADAPTERS = {
    "DbrxExperts": Adapter(
        forward=_dbrx, stack=_stack_dbrx, is_stacked=False, unstack=_unstack_dbrx
    ),
    "DogeCDMoE": Adapter(
        forward=_doge,
        holders=("down_embed", "up_embed"),
        stack=_stack_plain,
        num_experts="num_embeddings",
    ),
    "JetMoeMoE": Adapter(
        forward=_jetmoe, holders=("input_linear", "output_linear"), stack=_stack_plain
    ),
    "Llama4TextMoe": Adapter(forward=_llama4, holders=("experts",), stack=_stack_llama4),
    "LongcatFlashExperts": Adapter(
        forward=_longcat,
        stack=_stack_longcat,
        is_stacked=False,
        unstack=_unstack_longcat,
        num_experts="num_routed_experts",
    ),
    "Step3p7Experts": Adapter(forward=experts_forward, stack=_stack_plain),
    "SwitchTransformersExperts": Adapter(
        forward=_switch, stack=_stack_switch, is_stacked=False, unstack=_unstack_switch
    ),
}
REFUSED = {
    "NllbMoeExperts": "transformers 5.23 reads the router's mask as ids of experts, so that "
    "experts 0 and 1 do all the work",
    "VitPoseNaiveMoe": "the caller chooses them, one for a whole image, and no router does",
}
