"""Saving a model whose experts are spread, as one process that has them all would."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenyard.integrations.transformers.adapters import unstack
from tokenyard.integrations.transformers.experts import Experts, Plan


def save_pretrained(model: Any, path: Any, **kwargs: Any) -> None:
    """`model.save_pretrained(path, **kwargs)` with the experts of all ranks, written by rank 0.

    Every rank calls it. Rank 0 of the group holds the whole model while it writes, and the others
    may go on before it is done.
    """
    group = model.tokenyard_buffer.group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is a {type(group).__name__}, want a torch.distributed group")
    spread = {name: one for name, one in model.named_modules() if hasattr(one, "tokenyard")}
    wholes: dict[nn.Parameter, Tensor | None] = {}  # modules may share one
    gathered = {}
    for name, module in spread.items():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in wholes:
                wholes[parameter] = _gather(parameter.detach(), module.tokenyard, group)
            gathered[name, key] = wholes[parameter]
    if dist.get_rank(group) != 0:
        return
    state: dict[str, Any] = model.state_dict()
    for (name, key), whole in gathered.items():
        assert whole is not None
        del state[f"{name}.{key}"]
        saved = unstack(spread[name], key, whole)
        state.update({f"{name}.{one}": tensor for one, tensor in saved.items()})
    kind: Any = type(model)
    kind.save_pretrained(model, path, state_dict=state, **kwargs)


def refuse_to_save_a_part(model: Any, spread: dict[str, Experts]) -> None:
    """The model's own save_pretrained would write this rank's experts as if they were all."""

    def save_pretrained(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"save_pretrained: this rank has a part of the experts of {next(iter(spread))}, want "
            "tokenyard.integrations.transformers.save_pretrained(model, path), on all ranks"
        )

    model.save_pretrained = save_pretrained


def _gather(own: Tensor, plan: Plan, group: dist.ProcessGroup) -> Tensor | None:
    """[E, ...] on rank 0, by global id; None elsewhere."""
    rank, root = dist.get_rank(group), dist.get_global_rank(group, 0)
    if rank != 0:
        dist.send(own.contiguous(), root, group)
        return None
    whole = torch.empty(plan.placement.num_experts, *own.shape[1:], dtype=own.dtype)
    whole[plan.ids] = own
    for other in range(1, dist.get_world_size(group)):
        ids = plan.placement.experts_of_rank[other]
        part = whole.new_empty(len(ids), *own.shape[1:])
        dist.recv(part, dist.get_global_rank(group, other), group)
        whole[ids] = part
    return whole
