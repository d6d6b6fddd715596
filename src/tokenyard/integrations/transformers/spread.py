"""Experts of a loaded model over the ranks of a group."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal, TypeVar, get_args

from torch import Tensor, nn

from tokenyard import validate
from tokenyard.compat.buffer import Buffer
from tokenyard.errors import PeerLeft, PeerTimeout
from tokenyard.integrations.transformers import adapters, lora
from tokenyard.integrations.transformers.everyone import Everyone
from tokenyard.integrations.transformers.experts import FLOATS, NAME, Experts, Plan
from tokenyard.integrations.transformers.saving import refuse_to_save_a_part
from tokenyard.nn import stacks
from tokenyard.nn.parallel import hide_from_ddp
from tokenyard.nn.share import watch_gradients
from tokenyard.replicas import Replicas, as_replicas

Tokens = Literal["own", "same"]
Model = TypeVar("Model", bound=nn.Module)
OwnPart = Callable[[Tensor, list[int]], Tensor]


def expert_parallel(
    model: Model,
    group: Any,
    *,
    tokens: Tokens = "own",
    share_experts: bool | None = None,
    **buffer_options: Any,
) -> Model:
    """The model itself, with its experts spread over the group's ranks.

        tokens          "own": each rank has a batch of its own. "same": all have the same batch,
                        and get the same results, gradients too, as one process with all experts
        share_experts   that of `nn.MoE`: with a balance ranks read each other's experts
        buffer_options  of `tokenyard.Buffer`: transport, timeout, placement and so on

    Every rank calls it, with the same model. Expert parameters become slices, in the order of
    global ids; what was cut off is freed. DistributedDataParallel leaves them alone.

    With tokens="own" a rank's experts get the sum of the gradients of all ranks' losses. Ranks must
    then make as many forward passes as each other: `generate(synced_gpus=True)` sees to that.
    """
    return spread_experts(model, group, tokens, buffer_options, _own_rows, share_experts)


def spread_experts(
    model: Model,
    group: Any,
    tokens: Tokens,
    buffer_options: dict[str, Any],
    own_part: OwnPart,
    share_experts: bool | None = None,
) -> Model:
    """own_part cuts this rank's experts out of a parameter."""
    found = find_experts(model)
    buffer = open_buffer(group, tokens, buffer_options)
    spread = _Spread(buffer, tokens, buffer_options.get("placement"))
    plans = {module: spread.plan(name, module) for name, module in found.items()}
    shares_memory = stacks.wants_stacks(buffer, share_experts)
    lora.check_adapters(model, plans)
    adapters.stack(model)
    cut = _Cutter(plans, own_part)
    for module, plan in plans.items():
        for key, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, key, cut(parameter, plan.ids))
        _attach(module, plan)
    adapters.replace_forward(model)
    lora.cut_adapters(model, plans)
    hide_from_ddp(model)
    watch_gradients(model)
    if shares_memory:
        stacks.share_experts(model)
    for one in lora.with_base_model(model):
        refuse_to_save_a_part(one)
        one.tokenyard_buffer = buffer
    if tokens == "own" and buffer.group_size > 1:
        inner: Any = lora.with_base_model(model)[-1]  # whose forward `generate` calls
        inner.register_forward_hook(_explain, with_kwargs=True, always_call=True)
    return model


def _explain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Say what helps when a rank makes no more forward passes. transformers' attention fails on a
    batch without tokens: tell the other ranks, which wait for this one in their first experts.
    """
    error = sys.exc_info()[1]
    if isinstance(error, (PeerLeft, PeerTimeout)):
        hint = "All ranks must make as many forward passes: generate(synced_gpus=True) does so"
        error.args = (f"{error}. {hint}",)
    given = [*args, *kwargs.values()]
    if error is None or not any(isinstance(one, Tensor) and not one.numel() for one in given):
        return
    buffer: Any = model.tokenyard_buffer
    cause = ValueError(
        f"the batch has no tokens, want some on every rank, on rank {buffer.rank} "
        f"({type(error).__name__}: {error})"
    )
    with suppress(Exception):  # torch goes on with the error itself
        buffer.refuse(cause)


class _Cutter:
    """A parameter of this rank's experts in the place of all. Modules that share one go on to."""

    def __init__(self, modules: Iterable[Experts], own_part: OwnPart) -> None:
        every = [id(one) for module in modules for one in module.parameters(recurse=False)]
        self.shared = {one for one, times in Counter(every).items() if times > 1}
        self.own_part = own_part
        self.known: dict[int, nn.Parameter] = {}

    def __call__(self, whole: nn.Parameter, owned: list[int]) -> nn.Parameter:
        if id(whole) in self.known:
            return self.known[id(whole)]
        own = nn.Parameter(self.own_part(whole, owned), requires_grad=whole.requires_grad)
        if id(whole) in self.shared:
            self.known[id(whole)] = own
        return own


def _own_rows(parameter: Tensor, owned: list[int]) -> Tensor:
    return parameter.detach()[owned]  # a list of ids makes a copy, so that the whole is freed


def find_experts(model: nn.Module) -> dict[str, Experts]:
    """The modules that hold stacked experts, by name."""
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }
    found.update(adapters.find_holders(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that transformers runs through "
            "ALL_EXPERTS_FUNCTIONS, and none that there is an adapter for, want an MoE model"
        )
    for name, module in found.items():
        if module._is_expert_parallel:
            raise ValueError(f"{name} is expert parallel already, want a model that is not")
        kinds = {key: one.dtype for key, one in module.named_parameters()}
        if not kinds:
            raise ValueError(f"{name} has no parameters, want a model that nothing has sharded yet")
        for key, dtype in kinds.items():
            if dtype not in FLOATS:
                raise ValueError(
                    f"{name}.{key} is {dtype}, want float32, bfloat16, float16 or float64: the "
                    "experts as they were before they were quantised, by dequantize=True of a "
                    "quantization_config that has it"
                )
    return found


def open_buffer(group: Any, tokens: Tokens, options: dict[str, Any]) -> Buffer:
    validate.require(
        tokens in get_args(Tokens), f"tokens is {tokens!r}, want one of {get_args(Tokens)}"
    )
    validate.require(
        tokens == "own" or options.get("balance") is None,
        'balance is given, and with tokens="same" no rows move: want tokens="own"',
    )
    if tokens == "same":  # experts are found locally, and the exchange knows ranks alone
        options = {key: value for key, value in options.items() if key != "placement"}
    return Buffer(group, **options)


class _Spread:
    """Which rank owns which experts, for every module of a model."""

    def __init__(self, buffer: Buffer, tokens: Tokens, placement: Tensor | Replicas | None) -> None:
        self.buffer = buffer
        self.everyone = Everyone(buffer) if tokens == "same" and buffer.group_size > 1 else None
        self.placement: Replicas | None = None
        if placement is not None:
            self.placement = as_replicas(validate.placement(placement, buffer.group_size))
            validate.require(
                tokens == "own" or not isinstance(placement, Replicas),
                'placement is Replicas, want the rank of each expert with tokens="same"',
            )

    def plan(self, name: str, module: Experts) -> Plan:
        """Check a module and make its Plan, before anything of the module is changed."""
        num_experts, num_ranks = module.num_experts, self.buffer.group_size
        for key, parameter in module.named_parameters(recurse=False):
            if not adapters.is_stacked(module):
                break
            shape = list(parameter.shape)
            if shape[:1] != [num_experts]:
                raise ValueError(f"{name}.{key} is {shape}, want {num_experts} experts first")
        placement = self.placement or Replicas.even(num_experts, num_ranks)
        if placement.num_experts != num_experts:
            given = placement.num_experts
            raise ValueError(f"placement has {given} experts, want {num_experts}, {name}'s")
        idle = [rank for rank, owned in enumerate(placement.experts_of_rank) if not owned]
        if idle:
            raise ValueError(
                f"rank {idle[0]} has none of the {num_experts} experts of {name}, "
                f"want at least one on each of {num_ranks} ranks"
            )
        num_losses = num_ranks if self.everyone is None else 1
        return Plan(
            buffer=self.buffer, replicas=placement, num_losses=num_losses, everyone=self.everyone
        )


def _attach(module: Experts, plan: Plan) -> None:
    """Route the module's calls through its plan."""
    module.tokenyard = plan
    module.num_experts = len(plan.ids)
    module._is_expert_parallel = True
    if hasattr(module, "config"):
        # It may be shared with other models, whose experts are whole.
        module.config = copy.copy(module.config)
        module.config._experts_implementation = NAME
