"""Which experts of a module belong to this rank.

Gradients, norms and checkpoints must know. A module that holds stacked experts has a Share as its
attribute `tokenyard`: `nn.Experts`, and the experts of transformers that the integration has
spread.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from tokenyard.buffer import Buffer
from tokenyard.nn.watching import watch, watched_shares
from tokenyard.replicas import Replicas
from tokenyard.validate import require

try:  # torch's own record of what fully_shard has wrapped; without it nothing is checked
    from torch.distributed._composable_state import _module_state_mapping
except ImportError:
    _module_state_mapping = WeakKeyDictionary()

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from tokenyard.nn.stacks import Stacks


def is_dtensor(given: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor, without the half second that importing that part of torch takes:
    before it is imported, no DTensor exists.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(given, module.DTensor)


@dataclass(kw_only=True, eq=False)
class Share:
    """This rank's experts of one module.

    It knows the placement that their weights lie in. A dispatch compares that with its Buffer's, by
    `place`, and raises on all ranks if it is another: see `nn.functional.dispatch`.
    """

    buffer: Buffer
    replicas: Replicas  # where the experts of all ranks lie, wherever the Buffer sends rows by now
    num_losses: int  # whose gradients add up in an expert: those of all ranks, or one
    averages: bool = False  # whether gradients are divided by that number
    looked: object = None  # what was around when no wrapper was wrong
    mark: int = field(init=False)  # that of `replicas`, for torch.compile to look at
    stacks: Stacks | None = field(default=None, init=False)  # once `share_experts` has made them

    def __post_init__(self) -> None:
        self.mark = self.replicas.mark
        if not _hooks:
            _hooks.append(register_module_module_registration_hook(_check_wrapper))

    @property
    def ids(self) -> list[int]:
        """This rank's experts, global, in the order of the stack."""
        return list(self.replicas.experts_of_rank[self.buffer.rank])

    @property
    def num_experts(self) -> int:
        """How many experts all ranks have together."""
        return self.replicas.num_experts

    @property
    def place(self) -> int:
        """What a dispatch is given, to see that experts are still where this Share knows them."""
        return self.mark if self.stacks is None else self.stacks.place

    def may_borrow(self, module: nn.Module) -> bool:
        """Whether rows may go to ranks that only read the module's weights: nobody trains them. In
        training mode reentrant checkpointing makes a call without a graph, and again with one.
        """
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in own_parameters(module))
        return not (module.training or trained)

    def weights(self, module: nn.Module, name: str, num_experts: int | None = None) -> Tensor:
        """A stacked parameter of the module, to compute with rows for so many experts: this rank's,
        or, if those of its node came, all of these, which get no gradients.

        The gradient is divided here rather than by a hook: a hook belongs to one Parameter object,
        and `load_state_dict(assign=True)` and `to_empty` replace that.
        """
        weights: Tensor = getattr(module, name)
        if torch.compiler.is_compiling():
            _check_traced()
        else:
            self._check_wrappers(module, weights)
            if isinstance(weights, nn.Parameter):  # perhaps of a copy, or made by to_empty
                watch(weights, self)
        if num_experts not in (None, weights.shape[0]):
            return self._of_node(weights, name)
        if self.averages and self.num_losses > 1:
            return _Divided.apply(weights, self.num_losses)
        return weights

    def _of_node(self, weights: Tensor, name: str) -> Tensor:
        stack = None if self.stacks is None else self.stacks.of_node(name, weights)
        wrong = "lie where other ranks cannot read them: want tokenyard.nn.share_experts(model)"
        if stack is not None:
            if not (weights.requires_grad and torch.is_grad_enabled()):
                return stack
            wrong = "want gradients, and rows went to other ranks than theirs: want torch.no_grad()"
        what = f"the experts' parameters {name} {wrong}, on rank {self.buffer.rank}"
        self.buffer.refuse(ValueError(what))
        raise AssertionError("to refuse raises")

    def check_move(self) -> None:
        """Raise ValueError if these experts cannot move."""
        require(
            self.stacks is None,
            "the experts lie in memory that ranks share, and stay there: want a Buffer without "
            "balance, and share_experts=False",
        )

    def follow(self, module: nn.Module, replicas: Replicas) -> None:
        """The module's experts have moved, and live there now."""
        self.replicas, self.mark = replicas, replicas.mark
        if hasattr(module, "ids"):
            setattr(module, "ids", self.ids)  # noqa: B010 - a Module promises no such list

    def first_copies(self) -> list[int] | None:
        """The places in the stack of experts whose first copy is here; None for all."""
        replicas = self.replicas
        if not replicas.has_copies:
            return None
        firsts = {replicas.slots_of(expert)[0] for expert in set(self.ids)}
        return sorted(slot.local for slot in firsts if slot.rank == self.buffer.rank)

    def mixes(self, *groups: Any) -> bool:
        """Whether one of these process groups joins ranks that hold different experts."""
        if not isinstance(self.buffer.group, dist.ProcessGroup):
            return False
        own = set(dist.get_process_group_ranks(self.buffer.group))
        joined = (dist.get_process_group_ranks(one) for one in groups if one is not None)
        return any(len(own & set(ranks)) > 1 for ranks in joined)

    def sums(self, weights: Tensor) -> bool:
        """Whether what is trained gets the sum of all ranks' gradients, not their average."""
        may = self.num_losses > 1 and not self.averages
        return may and weights.requires_grad and torch.is_grad_enabled()

    def _check_wrappers(self, module: nn.Module, weights: Tensor) -> None:
        """Raise if the wrappers around the module are wrong for experts. During a forward pass
        sharded parameters look like any others, so FSDP's own records are read.
        """
        ddp = DistributedDataParallel._get_active_ddp_module()
        newest, around = _module_state_mapping.keyrefs()[-1:], ddp and weakref.ref(ddp)
        looked = newest, around, self.sums(weights)
        if looked == self.looked:
            return
        for part, words in _wrong():
            if part is module:
                raise RuntimeError(words)
        self.looked = looked


class _Divided(torch.autograd.Function):
    """The tensor itself; its gradient is divided by a number."""

    @staticmethod
    def forward(x: Tensor, number: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.number = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.number, None


def shares(module: nn.Module) -> Iterator[tuple[str, nn.Module, Share]]:
    """The modules that hold experts, with their names; a module that two layers use comes once."""
    for name, part in module.named_modules():
        share = part.__dict__.get("tokenyard")
        if isinstance(share, Share):
            yield name, part, share


def named_own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Share]]:
    """The parameters that only this rank has, with their full names in `module`: the stacked
    experts, and what an adapter around them adds, as PEFT's LoRA does.
    """
    for name, part in module.named_modules():
        share = _share_of(part)
        if share is None:
            continue
        prefix = f"{name}." if name else ""
        if "tokenyard" in part.__dict__:
            for key, parameter in _stacked(part):
                yield prefix + key, parameter, share
        else:
            for key, parameter in part.named_parameters():
                if not key.startswith("base_layer."):
                    yield prefix + key, parameter, share


def named_expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`named_own_parameters` without the Shares: names and parameters."""
    for name, parameter, _ in named_own_parameters(module):
        yield name, parameter


def watch_gradients(module: nn.Module) -> None:
    """`watch` all experts of a module now: a compiled forward pass watches none."""
    for _, parameter, share in named_own_parameters(module):
        watch(parameter, share)


def own_parameters(part: nn.Module) -> list[nn.Parameter]:
    """The parameters in which a module stacks its experts."""
    return [parameter for _, parameter in _stacked(part)]


def refuse_adapters(
    module: nn.Module,
    why: str = "has no name for each: want the adapter merged, or saved by save_pretrained",
) -> None:
    """Raise if an adapter wraps experts: one of its matrices holds several experts' numbers."""
    for name, *_ in _adapters(module):
        raise ValueError(f"{name} is an adapter of this rank's experts, which {why}")


def refuse_adapters_of_copies(module: nn.Module) -> None:
    """Raise if an adapter that is trained wraps experts with copies: those would drift apart."""
    for name, parameter, share in _adapters(module):
        if parameter.requires_grad and share.first_copies() is not None:
            raise ValueError(
                f"{name} is an adapter of experts that have copies, whose gradients nobody sums: "
                "want a placement without copies, or the adapter merged"
            )


def _adapters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Share]]:
    stacked = {one for _, part, _ in shares(module) for one in own_parameters(part)}
    for one in named_own_parameters(module):
        if one[1] not in stacked:
            yield one


def _share_of(part: nn.Module | None) -> Share | None:
    """The Share of a module that holds experts, or of the one inside an adapter; else None."""
    while part is not None:
        share = part.__dict__.get("tokenyard")
        if isinstance(share, Share):
            return share
        part = part._modules.get("base_layer")
    return None


def _stacked(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters, also of those that are parametrised during a forward pass."""
    yield from part.named_parameters(recurse=False)
    for key, parametrised in getattr(part, "parametrizations", {}).items():
        yield key, parametrised.original


def was_sharded(name: str, by: str = "fully_shard") -> str:
    return (
        f"{name} was sharded by {by}, which mixes experts of different ranks: want "
        "fully_shard(model, ignored_params=expert_parameters(model))"
    )


_hooks: list[Any] = []  # torch's, when a module gets another: one for the process


def _check_wrapper(wrapper: nn.Module, key: str, module: nn.Module | None) -> None:
    """torch calls it whenever a module gets another inside: before DistributedDataParallel copies
    anything, and while FullyShardedDataParallel is made. No compiled code gets around that.
    """
    if module is None:
        return
    if isinstance(wrapper, DistributedDataParallel):
        around = watched_shares() if isinstance(module, nn.ParameterList) else set()
        require(
            not any(share.mixes(wrapper.process_group) for share in around),
            "torch's replicate does not say which modules it wraps, so experts may be among them: "
            "want tokenyard.nn.prepare_for_ddp(model) before DistributedDataParallel(model)",
        )
        ignored = wrapper.parameters_to_ignore
        taken = {one for name, one in module.named_parameters() if name not in ignored}
        for name, one, share in named_own_parameters(module):
            if one in taken and share.mixes(wrapper.process_group):
                raise RuntimeError(
                    f"DistributedDataParallel copies rank 0's {name} to all ranks: want "
                    "tokenyard.nn.prepare_for_ddp(model) before DistributedDataParallel(model)"
                )
    elif is_fsdp1(wrapper):
        groups = [vars(wrapper).get(key) for key in ("process_group", "_inter_node_pg")]
        for name, _, share in shares(module):
            if share.mixes(*groups):  # whose parameters are flat by now
                raise RuntimeError(was_sharded(name, "FullyShardedDataParallel"))


def is_fsdp1(module: nn.Module) -> bool:
    """Whether FSDP1 wraps it, by the class's name: importing the class takes a while."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def _check_traced() -> None:
    """The checks of a forward pass, when torch.compile traces one. They look at all modules: with
    this one as an argument, torch.compile would compile each layer anew.
    """
    if any(True for _ in _wrong()):
        gc.collect()  # nobody may hold that model any more, on this rank, and others would wait
    for _, words in _wrong():
        raise RuntimeError(words)


# As `tickets.number_of`: torch.compile calls it, and keeps what it returns.
_check_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _wrong() -> Iterator[tuple[nn.Module, str]]:
    """The modules of this process whose experts are wrapped wrongly, and what to say."""
    ddp, around = DistributedDataParallel._get_active_ddp_module(), list(_under_fully_shard())
    if ddp is not None:
        held = shares(ddp.module)
        around += [(part, "") for _, part, share in held if share.mixes(ddp.process_group)]
    for part, taken in around:
        share = _share_of(part)
        assert share is not None
        if taken or any(map(share.sums, own_parameters(part))):
            yield part, taken or _ARE_SUMS.format(type(part).__name__)


_ARE_SUMS = (
    "gradients of dense parameters are averaged over ranks, and those of {} are sums: want "
    "tokenyard.nn.average_expert_gradients(model), or prepare_for_ddp(model), before"
)


def _under_fully_shard() -> Iterator[tuple[nn.Module, str]]:
    """The modules with experts, of all models, around which FSDP2 averages over ranks that hold
    different ones; and what to say where it takes the experts themselves.
    """
    for wrapped, reference in list(_module_state_mapping.items()):
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            kinds = "shard_process_group", "replicate_process_group"
            groups = [getattr(group.mesh_info, kind, None) for kind in kinds]
            taken: dict[nn.Module, str] = {}
            for one in group.fsdp_params:
                info = one._module_info
                name = f"{type(info.module).__name__}.{info.param_name}"
                taken |= dict.fromkeys((info.module, *info.shared_modules), was_sharded(name))
            for part in (*taken, *wrapped.modules()):
                share = _share_of(part)
                if share is not None and share.mixes(*groups):
                    yield part, taken.get(part, "")
