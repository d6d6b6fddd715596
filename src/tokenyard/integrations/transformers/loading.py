"""Loading a checkpoint so that each rank reads its own experts only.

transformers' loader reads only this rank's slice of a parameter that is a DTensor, through all its
renaming and stacking. So experts are DTensors while it loads, and plain slices afterwards.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from tokenyard.comm.together import together
from tokenyard.integrations.transformers.adapters import is_stacked
from tokenyard.integrations.transformers.spread import Tokens, find_experts, spread_experts
from tokenyard.topology import equal_blocks, even_split


def from_pretrained(
    model_class: Any,
    path: Any,
    group: dist.ProcessGroup,
    *,
    tokens: Tokens = "own",
    buffer_options: dict[str, Any] | None = None,
    share_experts: bool | None = None,
    **kwargs: Any,
) -> Any:
    """`model_class.from_pretrained(path, **kwargs)` and then `expert_parallel`, in less memory.

    model_class is a model's class, or one of the Auto classes. Experts are spread in consecutive
    blocks of equal size, of which the last may be smaller. With output_loading_info a pair comes
    back, as from transformers. If one rank cannot load, all raise.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is a {type(group).__name__}, want a torch.distributed group")
    options = dict(buffer_options or {})
    for name, given in (("placement", options), ("distributed_config", kwargs)):
        if name in given:
            raise ValueError(f"{name} is given, want none: experts go to ranks in equal blocks")
    with together(group, "from_pretrained"):
        _check_folder(path)
        concrete = _concrete(model_class, path, kwargs)
        mesh = DeviceMesh.from_group(group, "cpu")

        def shard(cls: Any, model: Any, *_: Any) -> Any:
            _make_placeholders(model, mesh)
            return model

        # from_pretrained calls this method once the model is there and its weights are not, if it
        # is given a distributed_config, which asks for nothing here.
        loader: Any = type(
            concrete.__name__,
            (concrete,),
            {"maybe_distribute_model": classmethod(shard), "__module__": concrete.__module__},
        )
        loaded = loader.from_pretrained(path, distributed_config=DistributedConfig(), **kwargs)
        model, *info = loaded if kwargs.get("output_loading_info") else (loaded,)
        model.__class__ = concrete
        del model.config.distributed_config
        options |= _placement(model, group.size())
    spread_experts(model, group, tokens, options, _own_part, share_experts)
    return (model, *info) if info else model


def _check_folder(path: Any) -> None:
    """transformers takes a folder that is not there for the name of a repository."""
    name = os.fspath(path)
    is_local = not isinstance(path, str) or os.path.isabs(name) or name.startswith(".")
    if (is_local or name.count("/") > 1) and not os.path.exists(name):
        raise ValueError(f"path is {name!r}, which is not there, want a folder with a checkpoint")


def _concrete(model_class: Any, path: Any, kwargs: dict[str, Any]) -> Any:
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    config = kwargs.get("config") or AutoConfig.from_pretrained(path)
    if type(config) not in mapping:
        raise ValueError(f"{model_class.__name__} has no model for {type(config).__name__}")
    found = mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def _make_placeholders(model: nn.Module, mesh: DeviceMesh) -> None:
    num_ranks = mesh.size()
    for name, module in find_experts(model).items():
        if not is_stacked(module):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which does not keep its experts stacked: "
                "want expert_parallel(model_class.from_pretrained(path), group)"
            )
        if max(equal_blocks(module.num_experts, num_ranks)) < num_ranks - 1:
            raise ValueError(
                f"{name} has {module.num_experts} experts, of which blocks of equal size leave "
                f"none for the last of {num_ranks} ranks: "
                "want expert_parallel(model_class.from_pretrained(path), group)"
            )
        for key, parameter in list(module.named_parameters(recurse=False)):
            sliced = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, key, nn.Parameter(sliced, requires_grad=parameter.requires_grad))


def _placement(model: nn.Module, num_ranks: int) -> dict[str, Tensor]:
    """The option for a Buffer, if that would place experts otherwise. Layers with other numbers of
    experts are refused with it.
    """
    blocks = [equal_blocks(one.num_experts, num_ranks) for one in find_experts(model).values()]
    uneven = [one for one in blocks if one != even_split(len(one), num_ranks)]
    return {"placement": torch.tensor(uneven[0], device="cpu")} if uneven else {}


def _own_part(parameter: Any, owned: list[int]) -> Tensor:
    assert isinstance(parameter, DTensor), "transformers did not call maybe_distribute_model"
    return parameter.to_local().detach()
