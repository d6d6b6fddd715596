"""Which experts of a module belong to this rank.

Gradients, norms and checkpoints must know. A module that holds stacked experts has a Share as its
attribute `tokenyard`: `nn.Experts`, and the experts of transformers that the integration has
spread.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokenyard.buffer import Buffer
from tokenyard.replicas import Replicas

try:  # torch's own record of what fully_shard has wrapped; without it nothing is checked
    from torch.distributed._composable_state import _module_state_mapping
except ImportError:
    _module_state_mapping = {}  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(given: object) -> TypeGuard[DTensor]:
    """Without importing that part of torch, which takes half a second: before somebody has
    imported it there is none.
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
    num_wrapped_seen: int = 0  # modules under fully_shard, when the last look was taken
    place: int = field(init=False)  # the mark of `replicas`, for torch.compile to look at

    def __post_init__(self) -> None:
        self.place = self.replicas.mark

    @property
    def ids(self) -> list[int]:
        """This rank's experts, global, in the order of the stack."""
        return list(self.replicas.experts_of_rank[self.buffer.rank])

    @property
    def num_experts(self) -> int:
        """Of all ranks."""
        return self.replicas.num_experts

    def weights(self, module: nn.Module, name: str) -> Tensor:
        """A stacked parameter of the module, to compute with.

        The gradient is divided here rather than by a hook: a hook belongs to one Parameter object,
        and `load_state_dict(assign=True)` and `to_empty` replace that.
        """
        if not torch.compiler.is_compiling():
            _check_ddp()
            self._check_fsdp(module)
        weights: Tensor = getattr(module, name)
        if self.averages and self.num_losses > 1:
            return _Divided.apply(weights, self.num_losses)
        return weights

    def check_move(self) -> None:
        """Raise ValueError if these experts cannot move."""

    def follow(self, module: nn.Module, replicas: Replicas) -> None:
        """The module's experts have moved, and live there now."""
        self.replicas, self.place = replicas, replicas.mark
        if hasattr(module, "ids"):
            setattr(module, "ids", self.ids)  # noqa: B010 - a Module promises no such list

    def first_copies(self) -> list[int] | None:
        """The places in the stack of experts whose first copy is here; None for all."""
        replicas = self.replicas
        if not replicas.has_copies:
            return None
        firsts = {replicas.slots_of(expert)[0] for expert in set(self.ids)}
        return sorted(slot.local for slot in firsts if slot.rank == self.buffer.rank)

    def _check_fsdp(self, module: nn.Module) -> None:
        """Raise if fully_shard has sharded the module's parameters. During a forward pass they look
        like any others, so FSDP's own records are read.
        """
        num_wrapped = len(_module_state_mapping)
        if num_wrapped == self.num_wrapped_seen:
            return
        for fsdp_param in _sharded_parameters():
            info = fsdp_param._module_info
            if module in (info.module, *info.shared_modules) and self._is_mixed(fsdp_param):
                raise RuntimeError(was_sharded(f"{type(module).__name__}.{info.param_name}"))
        self.num_wrapped_seen = num_wrapped

    def _is_mixed(self, fsdp_param: Any) -> bool:
        """Whether it is sharded over ranks that hold different experts."""
        group = getattr(fsdp_param.mesh_info, "shard_process_group", None)
        if group is None or not isinstance(self.buffer.group, dist.ProcessGroup):
            return False
        sharded = set(dist.get_process_group_ranks(group))
        return len(sharded & set(dist.get_process_group_ranks(self.buffer.group))) > 1


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


def own_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Of a module that holds experts: those that stack them."""
    return [parameter for _, parameter in _stacked(part)]


def refuse_adapters(module: nn.Module) -> None:
    """Raise if an adapter wraps experts: one of its matrices holds several experts' numbers."""
    stacked = {one for _, part, _ in shares(module) for one in own_parameters(part)}
    for name, parameter, _ in named_own_parameters(module):
        if parameter not in stacked:
            raise ValueError(
                f"{name} is an adapter of this rank's experts, which has no name for each: want "
                "the adapter merged, or saved by save_pretrained"
            )


def _share_of(part: nn.Module | None) -> Share | None:
    """Of a module that holds experts, or of an adapter around one."""
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


def was_sharded(name: str) -> str:
    return (
        f"{name} was sharded by fully_shard, which mixes experts of different ranks: want "
        "fully_shard(model, ignored_params=expert_parameters(model))"
    )


def _sharded_parameters() -> Iterator[Any]:
    """What FSDP2 notes of each parameter that it has sharded, of all models."""
    for reference in list(_module_state_mapping.values()):
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            yield from group.fsdp_params


def _check_ddp() -> None:
    """Raise if this runs inside a DistributedDataParallel that also manages the experts."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or getattr(ddp, "_tokenyard_checked", False):
        return
    want = "want tokenyard.nn.prepare_for_ddp(model) before DistributedDataParallel(model)"
    for name, parameter, share in named_own_parameters(ddp.module):
        if name not in ddp.parameters_to_ignore:
            said = f"DistributedDataParallel has copied rank 0's {name} to all ranks: {want}"
            raise RuntimeError(said)
        if parameter.requires_grad and share.num_losses > 1 and not share.averages:
            warnings.warn(
                "DistributedDataParallel averages gradients of dense parameters over ranks, while "
                f"those of {name} are sums over {share.num_losses} ranks: {want}",
                stacklevel=2,
            )
            break
    ddp._tokenyard_checked = True
