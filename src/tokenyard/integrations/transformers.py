"""Expert parallelism for the MoE models of Hugging Face transformers, in one call.

    model = expert_parallel(MixtralForCausalLM.from_pretrained(path), dist.group.WORLD)

Each rank keeps its own slice of every stacked expert parameter; everything else of the model stays
whole on every rank. It is for models whose experts transformers runs through its registry of expert
functions (`use_experts_implementation`), Mixtral, Qwen3-MoE and DeepSeek-V3 among them. On CPU.

Ranks either have tokens of their own (data parallel training, one prompt a rank), or all have the
same tokens (one prompt for all). In the second case nothing needs to be sent to the experts: a rank
runs its experts on the tokens that chose them, and the partial sums are added up over ranks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tokenyard import validate
from tokenyard.buffer import Buffer
from tokenyard.nn import functional
from tokenyard.topology import even_split
from tokenyard.types import Handle

NAME = "tokenyard"  # in transformers' registry of expert functions
Tokens = Literal["own", "same"]
Model = TypeVar("Model", bound=nn.Module)
Experts = Any  # a module of transformers that holds stacked experts


def expert_parallel(
    model: Model, group: Any, *, tokens: Tokens = "own", **buffer_options: Any
) -> Model:
    """The model itself, with its experts spread over the group's ranks.

        tokens          "own": each rank has a batch of its own. "same": all have the same batch,
                        and get the same results, gradients too, as one process with all experts
        buffer_options  of `tokenyard.Buffer`: transport, timeout, placement and so on

    Every rank calls it, with the same model. Expert parameters become slices, in the order of
    global ids; what was cut off is freed. DistributedDataParallel leaves them alone.

    With tokens="own" a rank's experts get the sum of the gradients of all ranks' losses. Ranks must
    then make as many forward passes as each other: `generate(synced_gpus=True)` sees to that.
    """
    found = find_experts(model)
    buffer = open_buffer(group, tokens, buffer_options)
    spread = _Spread(buffer, tokens, buffer_options.get("placement"))
    plans = [spread.plan(name, module) for name, module in found.items()]
    for (name, module), plan in zip(found.items(), plans):
        _keep_own(name, module, plan)
        attach(module, plan)
    _hide_from_ddp(model, found)
    model.tokenyard_buffer = buffer  # type: ignore[assignment]
    return model


def find_experts(model: nn.Module) -> dict[str, Experts]:
    """The modules that hold stacked experts, by name."""
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that transformers runs through "
            "ALL_EXPERTS_FUNCTIONS, want an MoE model"
        )
    for name, module in found.items():
        if module._is_expert_parallel:
            raise ValueError(f"{name} is expert parallel already, want a model that is not")
    return found


def open_buffer(group: Any, tokens: Tokens, options: dict[str, Any]) -> Buffer:
    validate.require(
        tokens in get_args(Tokens), f"tokens is {tokens!r}, want one of {get_args(Tokens)}"
    )
    if tokens == "same":  # experts are found locally, and the exchange knows ranks alone
        options = {key: value for key, value in options.items() if key != "placement"}
    return Buffer(group, **options)


def experts_forward(
    self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls in the place of an experts module's own forward."""
    plan = getattr(self, "tokenyard", None)
    if plan is None:
        raise ValueError(
            f"{type(self).__name__} has no Buffer, want a model that was given to "
            "tokenyard.integrations.transformers.expert_parallel"
        )
    x, weights = hidden_states.contiguous(), top_k_weights.float()
    if plan.everyone is None:
        rows = functional.dispatch(plan.buffer, x, top_k_index, weights, plan.num_experts)
        y = _run(self, *rows[:3])
        return functional.combine(plan.buffer, y, rows.ticket, len(x))
    x, weights = _Replicated.apply(plan.everyone, x, weights)
    y = _run(self, x, plan.local_of[top_k_index], weights)
    return _Summed.apply(plan.everyone, y)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How one experts module takes part."""

    buffer: Buffer
    num_experts: int  # of all ranks
    owned: list[int]  # this rank's, global ids
    local_of: Tensor  # [E] int64, the local id, -1 where the expert is elsewhere
    everyone: Everyone | None  # where all ranks have the same tokens


class Everyone:
    """Sums over ranks of what all of them have: combine, then dispatch, along one route.

    Each rank looks after an equal share of the rows, and sends it to all. Back along that route
    every rank gets the sum of its share, and there again everybody the whole.
    """

    KEPT = 16  # routes; generation asks for the same again with every token

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._handles: OrderedDict[tuple[Any, ...], Handle] = OrderedDict()

    def sum(self, x: Tensor) -> Tensor:
        handle = self._handle(x)
        share = self.buffer.combine(x, handle).x
        whole = self.buffer.dispatch(share, handle=handle).recv_x
        assert isinstance(whole, Tensor)
        return whole

    def _handle(self, x: Tensor) -> Handle:
        key = (*x.shape, x.dtype)
        if key not in self._handles:
            self._handles[key] = self._route(x)
        self._handles.move_to_end(key)
        while len(self._handles) > self.KEPT:
            self._handles.popitem(last=False)
        return self._handles[key]

    def _route(self, x: Tensor) -> Handle:
        rank, size = self.buffer.rank, self.buffer.group_size
        begin, end = len(x) * rank // size, len(x) * (rank + 1) // size
        to_all = torch.arange(size).repeat(end - begin, 1)
        got = self.buffer.dispatch(
            x[begin:end],
            topk_idx=to_all,
            topk_weights=torch.ones(to_all.shape),
            num_experts=size,
        )
        assert got.handle is not None
        if len(got.recv_x) != len(x):
            raise ValueError(
                f"rank {rank} has {len(x)} tokens and others have not: want tokens='own', "
                "or the same tokens on all ranks"
            )
        return got.handle


class _Replicated(torch.autograd.Function):
    """The same on all ranks, of which each uses a part: gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, everyone: Everyone, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.everyone = everyone
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> Any:
        _, need_x, need_weights = ctx.needs_input_grad
        return (
            None,
            ctx.everyone.sum(grad_x.contiguous()) if need_x else None,
            ctx.everyone.sum(grad_weights.contiguous()) if need_weights else None,
        )


class _Summed(torch.autograd.Function):
    """The sum over ranks, on all of them: each one's part gets the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, everyone: Everyone, y: Tensor) -> Tensor:
        return everyone.sum(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class _Spread:
    """Which rank owns which experts, for every module of a model."""

    def __init__(self, buffer: Buffer, tokens: Tokens, placement: Tensor | None) -> None:
        self.buffer = buffer
        self.everyone = Everyone(buffer) if tokens == "same" and buffer.group_size > 1 else None
        self.placement = (
            None if placement is None else validate.placement(placement, buffer.group_size).tolist()
        )

    def plan(self, name: str, module: Experts) -> Plan:
        num_experts, num_ranks = module.num_experts, self.buffer.group_size
        rank_of = self.placement or even_split(num_experts, num_ranks)
        if len(rank_of) != num_experts:
            raise ValueError(f"placement has {len(rank_of)} experts, want {num_experts}, {name}'s")
        idle = sorted(set(range(num_ranks)) - set(rank_of))
        if idle:
            raise ValueError(
                f"rank {idle[0]} has none of the {num_experts} experts of {name}, "
                f"want at least one on each of {num_ranks} ranks"
            )
        owned = [expert for expert, rank in enumerate(rank_of) if rank == self.buffer.rank]
        local_of = torch.full((num_experts,), -1)
        local_of[owned] = torch.arange(len(owned))
        return Plan(
            buffer=self.buffer,
            num_experts=num_experts,
            owned=owned,
            local_of=local_of,
            everyone=self.everyone,
        )


def attach(module: Experts, plan: Plan) -> None:
    """Route the module's calls through its plan."""
    module.tokenyard = plan
    module.num_experts = len(plan.owned)
    module._is_expert_parallel = True
    # A config may be shared with other models, whose experts are whole.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = NAME


def _keep_own(name: str, module: Experts, plan: Plan) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        if parameter.ndim == 0 or parameter.shape[0] != plan.num_experts:
            raise ValueError(
                f"{name}.{key} is {list(parameter.shape)}, want {plan.num_experts} experts first"
            )
        own = parameter.detach()[plan.owned]  # a list of ids: a copy, so that the whole is freed
        setattr(module, key, nn.Parameter(own, requires_grad=parameter.requires_grad))


def _hide_from_ddp(model: nn.Module, found: dict[str, Experts]) -> None:
    """DistributedDataParallel would copy rank 0's experts to all."""
    names = [f"{name}.{key}" for name, one in found.items() for key in one._parameters]
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*before, *names]  # type: ignore[assignment]


def _run(module: Experts, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    """This rank's experts: [N, D], the weighted sum of what a row's own experts say."""
    grouped = functional.permute(x, topk_idx, module.num_experts)
    if module.has_gate:
        y = module._apply_gate(_linear(module, "gate_up_proj", grouped.x, grouped.offsets))
    else:
        y = module.act_fn(_linear(module, "up_proj", grouped.x, grouped.offsets))
    y = _linear(module, "down_proj", y, grouped.offsets)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    return functional.unpermute(y.to(x.dtype), grouped.row_of, topk_weights)


def _linear(module: Experts, key: str, x: Tensor, offsets: Tensor) -> Tensor:
    weights: Tensor = getattr(module, key)
    matrices = weights if module.is_transposed else weights.transpose(1, 2)
    y = functional.grouped_mm(x.to(weights.dtype), matrices, offsets)
    if module.has_bias:
        counts = offsets.diff(prepend=offsets.new_zeros(1))
        y = y + getattr(module, f"{key}_bias").repeat_interleave(counts, 0, output_size=len(x))
    return y
