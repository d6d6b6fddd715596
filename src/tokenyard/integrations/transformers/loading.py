"""Loading a checkpoint so that each rank reads its own experts only.

transformers' loader reads only this rank's slice of a parameter that is a DTensor, through all its
renaming and stacking. So experts are DTensors while it loads, and plain slices afterwards.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from tokenyard.integrations.transformers.adapters import is_stacked
from tokenyard.integrations.transformers.spread import Tokens, find_experts, spread_experts


def from_pretrained(
    model_class: Any,
    path: Any,
    group: dist.ProcessGroup,
    *,
    tokens: Tokens = "own",
    buffer_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """`model_class.from_pretrained(path, **kwargs)` and then `expert_parallel`, in less memory.

    model_class is a model's class, or one of the Auto classes. Experts are spread in consecutive
    blocks of equal size, so the ranks must divide them. With output_loading_info a pair comes back,
    as from transformers.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group is a {type(group).__name__}, want a torch.distributed group")
    options = dict(buffer_options or {})
    for name, given in (("placement", options), ("distributed_config", kwargs)):
        if name in given:
            raise ValueError(f"{name} is given, want none: experts go to ranks in equal blocks")
    concrete = _concrete(model_class, path, kwargs)
    mesh = DeviceMesh.from_group(group, "cpu")

    def shard(cls: Any, model: Any, *_: Any) -> Any:
        _make_placeholders(model, mesh)
        return model

    # from_pretrained calls this method once the model is there and its weights are not, if it is
    # given a distributed_config, which asks for nothing here.
    loader: Any = type(
        concrete.__name__,
        (concrete,),
        {"maybe_distribute_model": classmethod(shard), "__module__": concrete.__module__},
    )
    loaded = loader.from_pretrained(path, distributed_config=DistributedConfig(), **kwargs)
    model, *info = loaded if kwargs.get("output_loading_info") else (loaded,)
    model.__class__ = concrete
    del model.config.distributed_config
    spread_experts(model, group, tokens, options, _own_part)
    return (model, *info) if info else model


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
        if module.num_experts % num_ranks:
            raise ValueError(
                f"{name} has {module.num_experts} experts, want a multiple of {num_ranks} ranks"
            )
        for key, parameter in list(module.named_parameters(recurse=False)):
            sliced = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, key, nn.Parameter(sliced, requires_grad=parameter.requires_grad))


def _own_part(parameter: Any, owned: list[int]) -> Tensor:
    assert isinstance(parameter, DTensor), "transformers did not call maybe_distribute_model"
    return parameter.to_local().detach()
