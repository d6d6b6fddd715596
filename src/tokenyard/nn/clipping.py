"""Clipping gradients where each rank holds other experts.

torch.nn.utils.clip_grad_norm_ sees the experts of its own rank only. So it finds another norm on
each rank, ranks scale equal gradients of dense parameters differently, and those parameters drift
apart. The functions here count the experts of all ranks.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from tokenyard.buffer import Buffer
from tokenyard.nn.functional import gather_over_ranks
from tokenyard.nn.share import (
    experts_among,
    is_dtensor,
    is_fsdp1,
    living,
    named_expert_parameters,
    named_own_parameters,
    refuse_adapters_of_copies,
    shares,
)
from tokenyard.validate import require

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, with the experts of all ranks in the norm. Returns the
    norm, the same bits on every rank.

    It takes the module itself, plain or wrapped by DistributedDataParallel or FSDP2, not its
    parameters. Every rank calls it, after the gradients of dense parameters were averaged.
    """
    total = get_grad_norm(module, norm_type, error_if_nonfinite, foreach)
    given = [one.grad for one in module.parameters() if one.grad is not None]
    # torch multiplies what is in `grad`, and cannot multiply a DTensor by a plain tensor.
    local = [SimpleNamespace(grad=_local(one)) for one in given]
    with own_change(module):
        clip_grads_with_norm_(cast("list[Tensor]", local), max_norm, total, foreach)
    return total


@torch.no_grad()
def get_grad_norm(
    module: nn.Module,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of the gradients of all parameters, the experts of all ranks included. Every rank
    calls it.
    """
    refuse_adapters_of_copies(module)
    order = float(norm_type)
    require(order > 0, f"norm_type is {norm_type!r}, want a number above 0, or inf")
    for name, part in module.named_modules():
        require(
            not is_fsdp1(part),
            f"{name or 'the module'} is FullyShardedDataParallel, whose gradients do not say of "
            "what they are parts: want fully_shard",
        )

    def norm(gradients: Iterable[Tensor]) -> Tensor:
        some = [one for one in gradients if one.numel()]  # an empty one has no maximum
        return get_total_norm(some, order, foreach=foreach).double()

    # By Buffer: the experts' parameters, and which places of their stacks count; None for all.
    own: dict[Buffer, dict[nn.Parameter, list[int] | None]] = {}
    for _, _, share in shares(module):
        own[share.buffer] = {}
    for _, parameter, share in named_own_parameters(module):
        own[share.buffer][parameter] = share.first_copies()
    experts = {parameter for parameters in own.values() for parameter in parameters}
    dense: dict[Any, list[Tensor]] = defaultdict(list)  # by where the rest of each is
    for parameter in module.parameters():
        if parameter not in experts and (grad := parameter.grad) is not None:
            where = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
            dense[where].append(_local(grad))

    norms = []
    for where, gradients in dense.items():
        part_norm = norm(gradients)
        norms.append(part_norm if where is None else _over_mesh(part_norm, order, *where))
    for buffer, parameters in own.items():
        mine = norm(
            one.grad if places is None else one.grad[places]
            for one, places in parameters.items()
            if one.grad is not None
        )
        mine = mine.to(next(iter(parameters)).device)
        gathered = gather_over_ranks(buffer, mine[None])
        norms.append(torch.linalg.vector_norm(gathered, order))
    total = norm(norms)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {order:g} of the gradients is {float(total)}, want a finite one, "
            "or error_if_nonfinite=False to scale by it anyway"
        )
    is_double = any(one.dtype == torch.float64 for one in module.parameters())
    return total if is_double else total.float()


def accept_gradients(module: nn.Module) -> None:
    """Let the optimiser step with gradients of experts that were changed after the backward pass.

    It refuses them otherwise. Call it if what changed them does the same on all ranks, as
    torch.nn.utils.clip_grad_value_ does.
    """
    for _, parameter in named_expert_parameters(module):
        _note_version(parameter)


@contextmanager
def own_change(module: nn.Module) -> Iterator[None]:
    """This library changes gradients here: those that nobody else has changed are as good after."""
    good = [one for _, one in named_expert_parameters(module) if not _is_changed(one)]
    yield
    for parameter in good:
        _note_version(parameter)


def watch_gradients(module: nn.Module) -> None:
    """From now on refuse to step with gradients of experts that were changed after the backward
    pass, as torch.nn.utils.clip_grad_norm_ changes them, or under torch.amp.GradScaler.
    """
    if all(share.buffer.group_size == 1 for _, _, share in shares(module)):
        return
    for _, parameter in named_expert_parameters(module):
        if parameter not in _versions and parameter.requires_grad:
            _versions[parameter] = -1
            parameter.register_post_accumulate_grad_hook(_note_version)
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_check_step))


# By parameter: the version of its gradient after the last backward pass, or after our own clipping.
# torch counts the changes of a tensor's values in it.
_versions = WeakTensorKeyDictionary()
_watching: list[Any] = []


def _note_version(parameter: Tensor) -> None:
    if parameter in _versions and parameter.grad is not None:
        _versions[parameter] = parameter.grad._version


def _is_changed(parameter: Tensor) -> bool:
    """By somebody else, since the backward pass; to zeros is no change."""
    noted, grad = _versions.get(parameter, -1), parameter.grad
    return grad is not None and noted not in (-1, grad._version) and bool(grad.any())


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """torch calls it before every step of every optimiser."""
    if torch.compiler.is_compiling():
        return
    given = [one for group in optimizer.param_groups for one in group["params"]]
    if any(map(_is_changed, given)):
        raise RuntimeError(
            "gradients of experts were changed since the backward pass. If "
            "torch.nn.utils.clip_grad_norm_ did that, it left out the experts of other ranks: want "
            "tokenyard.nn.clip_grad_norm_(model, max_norm). If it was meant, and the same on all "
            "ranks: want tokenyard.nn.accept_gradients(model)"
        )
    if any(one in _versions for one in given):
        _refuse_scaler(sys._getframe())
    known = vars(optimizer)
    if "torch.distributed.optim" not in sys.modules or known.get("_tokenyard") == len(given):
        return
    # ZeroRedundancyOptimizer has a process group. PostLocalSGDOptimizer, which torch does not hook,
    # has one in its averager.
    around = [vars(one) for one in living(Optimizer) if vars(one).get("optim") is optimizer]
    averagers = [one["averager"] for one in around if "averager" in one]
    for one in (optimizer, *averagers):
        for found in experts_among(given, vars(one).get("process_group")):
            raise RuntimeError(
                f"{type(one).__name__} would make {found} the same on all ranks: want it for other "
                "parameters, and another optimiser for expert_parameters(model)"
            )
    known["_tokenyard"] = len(given)


def _refuse_scaler(frame: FrameType | None) -> None:
    """Raise if a GradScaler that asks no other rank makes this step: it leaves no trace in the
    versions of gradients, but is among the callers. Subclasses may ask, as torch's of FSDP1 does.
    """
    while frame := frame and frame.f_back:
        if frame.f_globals.get("__name__") == torch.amp.grad_scaler.__name__:
            scaler, plain = frame.f_locals["self"], torch.amp.GradScaler._unscale_grads_
            require(
                not scaler.is_enabled() or type(scaler)._unscale_grads_ is not plain,
                "torch.amp.GradScaler lets a rank whose experts overflow skip its step alone: want "
                "tokenyard.nn.GradScaler(model)",
            )


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if is_dtensor(grad) else grad


def _over_mesh(
    norm: Tensor, order: float, mesh: DeviceMesh, placements: Sequence[Placement]
) -> Tensor:
    """The norm of sharded gradients, from that of each shard; the same bits on all ranks."""
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        require(placement.is_shard(), f"a gradient is {placement}, want it sharded or replicated")
        norms = [torch.empty_like(norm) for _ in range(mesh.size(dim))]
        dist.all_gather(norms, norm, mesh.get_group(dim))
        norm = torch.linalg.vector_norm(torch.stack(norms), order)
    return norm
