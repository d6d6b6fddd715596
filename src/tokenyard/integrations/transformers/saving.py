"""Saving a model whose experts are spread, as one process that has them all would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenyard.comm.together import together
from tokenyard.integrations.transformers.adapters import unstack
from tokenyard.integrations.transformers.lora import (
    adapter_weights,
    by_expert,
    find_wrappers,
    from_experts,
    is_peft_model,
)
from tokenyard.nn.share import shares
from tokenyard.runtime.whole_file import whole_folder

# Of a whole model or adapter, or of a part of one, and the list of such parts. transformers would
# load a model.safetensors of before.
_WEIGHTS = re.compile(r"(\w+?)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


class Whole(dict[str, Any]):
    """A state_dict with the experts of all ranks."""


def save_pretrained(model: Any, path: Any, **kwargs: Any) -> None:
    """`model.save_pretrained(path, **kwargs)` with the experts of all ranks, written by rank 0.

    Every rank calls it, and returns when the folder is whole; if rank 0 cannot write it, all raise.
    A new folder appears whole. In one that is there, files are replaced when all are written, and
    weights of before are removed. Rank 0 of the group holds the whole model while it writes. Of a
    PeftModel the adapter is written, as PEFT does it.
    """
    state, path = gather_state(model), Path(path)
    with together(model.tokenyard_buffer.group, "save_pretrained"):
        if state is None:
            return
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", path.name)
        with whole_folder(path, _WEIGHTS) as written:
            if (path / "README.md").exists():
                shutil.copy(path / "README.md", written)  # PEFT adds to it
            type(model).save_pretrained(model, written, state_dict=state, **kwargs)


def gather_state(model: Any) -> Whole | None:
    """On rank 0 of the group what `model.state_dict()` of one process has; None elsewhere. Every
    rank calls it. Of a PeftModel the experts that its adapter does not save are left as they are.
    """
    group = model.tokenyard_buffer.group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is a {type(group).__name__}, want a torch.distributed group")
    wholes: dict[nn.Parameter, Tensor | None] = {}  # modules may share one
    stacked, gathered = {}, {}
    for name, part, share in shares(model):
        if is_peft_model(model) and ".modules_to_save." not in name:
            continue
        for key, parameter in part.named_parameters(recurse=False):
            if parameter not in wholes:
                wholes[parameter] = _gather(parameter.detach(), share, group)
            stacked[name, key] = part, wholes[parameter]
    for name, wrapper, experts in find_wrappers(model):
        for key, linear in adapter_weights(wrapper, name):
            own = by_expert(key, linear.weight.detach(), wrapper.num_experts)
            gathered[f"{name}.{key}.weight"] = key, _gather(own, experts.tokenyard, group)
    if dist.get_rank(group) != 0:
        return None
    state = Whole(model.state_dict())
    for (name, key), (part, whole) in stacked.items():
        assert whole is not None
        del state[f"{name}.{key}"]
        saved = unstack(part, key, whole)
        state.update({f"{name}.{one}": tensor for one, tensor in saved.items()})
    for name, (key, whole) in gathered.items():
        assert whole is not None
        state[name] = from_experts(key, whole)
    return state


def refuse_to_save_a_part(model: Any) -> None:
    """The model's own save_pretrained would write this rank's experts as if they were all."""
    name = next(name for name, _, _ in shares(model))

    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("state_dict"), Whole):
            return type(model).save_pretrained(model, *args, **kwargs)
        raise RuntimeError(
            f"save_pretrained: this rank has a part of the experts of {name}, want "
            "tokenyard.integrations.transformers.save_pretrained(model, path), on all ranks"
        )

    model.save_pretrained = save_pretrained


def _gather(own: Tensor, plan: Any, group: dist.ProcessGroup) -> Tensor | None:
    """[E, ...] on rank 0, by global id; None elsewhere."""
    rank, root = dist.get_rank(group), dist.get_global_rank(group, 0)
    if rank != 0:
        dist.send(own.contiguous(), root, group)
        return None
    whole = torch.empty(plan.num_experts, *own.shape[1:], dtype=own.dtype, device="cpu")
    whole[plan.ids] = own
    for other in range(1, dist.get_world_size(group)):
        ids = list(plan.replicas.experts_of_rank[other])
        part = whole.new_empty(len(ids), *own.shape[1:])
        dist.recv(part, dist.get_global_rank(group, other), group)
        whole[ids] = part
    return whole
