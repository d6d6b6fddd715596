"""PEFT's LoRA on stacked experts: which of its numbers belong to which expert.

PEFT wraps an experts module once for each parameter that `target_parameters` names. For E experts a
wrapper holds lora_A [E * r, in], whose row e * r + i belongs to expert e, and lora_B [out, r * E],
whose column i * E + e belongs to expert e.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tokenyard.integrations.transformers.experts import Plan

Wrapper = Any  # peft.tuners.lora.layer.ParamWrapper


def is_peft_model(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def with_base_model(model: Any) -> list[Any]:
    """The model, and of a PeftModel the one inside, which `merge_and_unload` gives back."""
    return [model, model.get_base_model()] if is_peft_model(model) else [model]


def find_wrappers(model: nn.Module) -> Iterator[tuple[str, Wrapper, nn.Module]]:
    """The adapters around experts, and the experts; of nested ones each."""
    for name, wrapper in model.named_modules():
        inner = wrapper
        while "base_layer" in inner._modules:
            inner = inner.base_layer
        if inner is not wrapper and hasattr(inner, "_is_expert_parallel"):
            yield name, wrapper, inner


def adapter_weights(wrapper: Wrapper, name: str) -> Iterator[tuple[str, nn.Linear]]:
    """The matrices of all its adapters, by their keys: lora_A.default and so on."""
    if type(wrapper).__name__ != "ParamWrapper":
        raise ValueError(
            f"{name} is a {type(wrapper).__name__} around experts, want PEFT's LoRA with "
            "target_parameters"
        )
    for side in ("lora_A", "lora_B"):
        for adapter, linear in getattr(wrapper, side).items():
            yield f"{side}.{adapter}", linear


def by_expert(key: str, weight: Tensor, num_experts: int) -> Tensor:
    """[L, ...] of one matrix.

    >>> import torch
    >>> by_expert("lora_A.default", torch.arange(4).reshape(4, 1), 2).tolist()
    [[[0], [1]], [[2], [3]]]
    >>> by_expert("lora_B.default", torch.arange(4).reshape(1, 4), 2).tolist()
    [[[0, 2]], [[1, 3]]]
    """
    if key.startswith("lora_A"):
        return weight.reshape(num_experts, -1, weight.shape[-1])
    return weight.reshape(weight.shape[0], -1, num_experts).permute(2, 0, 1)


def from_experts(key: str, stack: Tensor) -> Tensor:
    """What `by_expert` was given."""
    if key.startswith("lora_A"):
        return stack.flatten(0, 1)
    return stack.permute(1, 2, 0).flatten(1)


def cut_adapters(model: nn.Module, plans: dict[nn.Module, Plan]) -> None:
    """Leave what belongs to this rank's experts."""
    for name, wrapper, experts in find_wrappers(model):
        ids = plans[experts].ids
        for key, linear in adapter_weights(wrapper, name):
            stack = by_expert(key, linear.weight.detach(), wrapper.num_experts)
            own = from_experts(key, stack[ids]).contiguous()
            linear.weight = nn.Parameter(own, requires_grad=linear.weight.requires_grad)
            linear.out_features, linear.in_features = own.shape
        wrapper.num_experts = len(ids)


def check_adapters(model: nn.Module, plans: dict[nn.Module, Plan]) -> None:
    """Refuse adapters that cannot be spread, before anything is changed."""
    for name, wrapper, experts in find_wrappers(model):
        list(adapter_weights(wrapper, name))
        if len(plans[experts].ids) == 1 and not wrapper._did_swap_in_out_features:
            raise ValueError(
                f"rank {plans[experts].buffer.rank} has one expert of {name}, whose matrices are "
                "[in, out]: PEFT takes a stack of one for [out, in], want two experts or more"
            )
