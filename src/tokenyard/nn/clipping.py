"""Clipping gradients where each rank holds other experts.

torch.nn.utils.clip_grad_norm_ sees the experts of its own rank only. So it finds another norm on
each rank, ranks scale equal gradients of dense parameters differently, and those parameters drift
apart. The functions here count the experts of all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tokenyard.buffer import Buffer
from tokenyard.nn import watching
from tokenyard.nn.functional import gather_over_ranks
from tokenyard.nn.share import (
    is_dtensor,
    is_fsdp1,
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
    """Clip as torch.nn.utils.clip_grad_norm_ does, with the experts of all ranks in the norm.
    Returns the norm, the same bits on every rank.

    It takes the module itself, plain, wrapped by DistributedDataParallel or FSDP2, or spread by
    transformers' DistributedConfig, not its parameters. Every rank calls it, after the gradients of
    dense parameters were averaged.
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
            grad = _summed(grad)
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
        watching.note_version(parameter)


@contextmanager
def own_change(module: nn.Module) -> Iterator[None]:
    """Around a change of gradients by this library: what counted as right before, does after."""
    good = [one for _, one in named_expert_parameters(module) if not watching.is_changed(one)]
    yield
    for parameter in good:
        watching.note_version(parameter)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if is_dtensor(grad) else grad


def _summed(grad: Tensor) -> Tensor:
    """With each sum made that DTensor has put off: the norm of a part of a sum says nothing."""
    if not is_dtensor(grad) or not any(one.is_partial() for one in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    made = [Replicate() if one.is_partial() else one for one in grad.placements]
    return grad.redistribute(placements=made)


def _over_mesh(
    norm: Tensor, order: float, mesh: DeviceMesh, placements: Sequence[Placement]
) -> Tensor:
    """The norm of sharded gradients, from that of each shard; the same bits on all ranks. However
    an axis was cut, also in turns by two axes of the mesh, each number lies in one shard.
    """
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        norms = [torch.empty_like(norm) for _ in range(mesh.size(dim))]
        dist.all_gather(norms, norm, mesh.get_group(dim))
        norm = torch.linalg.vector_norm(torch.stack(norms), order)
    return norm
