"""Hugging Face accelerate with a model whose experts live on all ranks.

    accelerator = Accelerator()
    prepare_accelerator(accelerator, model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

All ranks must make equally many forward passes, which `even_batches`, the default, ensures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tokenyard.nn import clip_grad_norm_, expert_parameters, prepare_for_ddp
from tokenyard.nn.share import shares
from tokenyard.validate import require


def prepare_accelerator(accelerator: Any, model: nn.Module) -> None:
    """Call it before `accelerator.prepare(model, ...)`, on all ranks.

    DistributedDataParallel then neither copies nor averages experts; if only experts are trained,
    the model is not wrapped at all. `accelerator.clip_grad_norm_` counts the experts of all ranks.
    `accelerator.save_state` and `save_model` raise from now on: they would write the experts of
    rank 0 only.
    """
    _check(accelerator, model)
    prepare_for_ddp(model)
    theirs, wrap = accelerator.clip_grad_norm_, accelerator.prepare_model

    def prepare_model(
        one: nn.Module, *args: Any, evaluation_mode: bool = False, **more: Any
    ) -> Any:
        own = expert_parameters(one)
        dense = any(each.requires_grad and each not in own for each in one.parameters())
        return wrap(one, *args, evaluation_mode=evaluation_mode or not dense, **more)

    def clip(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Any:
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        if not given & expert_parameters(model):
            return theirs(list(given), max_norm, norm_type)
        left_out = [
            name
            for name, one in model.named_parameters()
            if one.grad is not None and one not in given
        ]
        require(
            not left_out,
            f"clip_grad_norm_ was given experts, and not {', '.join(left_out[:1])}: want "
            "accelerator.clip_grad_norm_(model.parameters(), max_norm)",
        )
        accelerator.unscale_gradients()
        return clip_grad_norm_(model, max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip
    accelerator.prepare_model = prepare_model
    accelerator.save_state = _refuse("save_state")
    accelerator.save_model = _refuse("save_model")


def _check(accelerator: Any, model: nn.Module) -> None:
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    require(
        kind == "NO" or kind.startswith("MULTI_"),
        f"accelerate wraps models by {kind}, which takes experts for parameters that all ranks "
        "share: want DistributedDataParallel, accelerate's default, or fully_shard by hand",
    )
    for name, _, share in shares(model):
        num_ranks, num_processes = share.buffer.group_size, accelerator.num_processes
        require(
            num_ranks == num_processes,
            f"{name} is spread over {num_ranks} ranks, and accelerate trains on {num_processes}: "
            "want the same ranks, and the environment that torchrun or accelerate launch makes",
        )
        require(
            num_ranks == 1 or share.num_losses > 1,
            f"{name} wants the same tokens on all ranks, and accelerate gives each rank its own: "
            "want expert_parallel(tokens='own')",
        )
    require(
        accelerator.scaler is None,
        f"mixed_precision is {accelerator.mixed_precision!r}, for which accelerate takes "
        "torch.amp.GradScaler, which lets one rank skip a step alone: want mixed_precision='bf16'",
    )
    require(
        accelerator.even_batches,
        "even_batches is False: want True, since every rank must make as many forward passes as "
        "the others",
    )


def _refuse(name: str) -> Any:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"accelerator.{name} would write this rank's experts as if they were all: want "
            "tokenyard.nn.checkpoint_state with torch.distributed.checkpoint, or "
            "tokenyard.integrations.transformers.save_pretrained, on all ranks"
        )

    return refused
