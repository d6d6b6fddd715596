"""Twenty steps of a model with nn.MoE under each wrapper, as ranks make them; importable."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tokenyard
from tests.cases.nn.moe import HIDDEN, Model, loss_of, make_model
from tokenyard.nn import (
    average_expert_gradients,
    clip_grad_norm_,
    expert_parameters,
    prepare_for_ddp,
    update_biases,
)
from tokenyard.nn.parallel import hide_from_ddp
from tokenyard.nn.share import shares

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

NUM_STEPS, NUM_TOKENS = 20, 24  # tokens of all ranks, at least
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Outcome = tuple[list[float], dict[str, Tensor]]


def batch(step: int, rank: int, num_ranks: int, grows: bool) -> Tensor:
    """This rank's part of a step's tokens, of which there are more each step if it grows."""
    num_tokens = NUM_TOKENS + 4 * (step % 7) * grows
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num_tokens, HIDDEN, generator=generator).chunk(num_ranks)[rank]


def wrap(model: Model, kind: str) -> nn.Module:
    if kind == "compiled_ddp":
        prepare_for_ddp(model)
        return DistributedDataParallel(torch.compile(model, backend="aot_eager", dynamic=True))
    if kind.startswith("ddp"):
        prepare_for_ddp(model)
        return DistributedDataParallel(model, find_unused_parameters=kind == "ddp_unused")
    own = expert_parameters(model)
    if kind == "fsdp_layers":
        for part in (model.first, model.moe, model.second):
            fully_shard(part, ignored_params=own)
    if kind.startswith("fsdp"):
        options: dict[str, dict[str, Any]] = {
            "fsdp_bfloat16": {"mp_policy": BFLOAT16},
            "fsdp_offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        }
        fully_shard(model, ignored_params=own, **options.get(kind, {}))
    average_expert_gradients(model)
    return model


def train(
    group: Any, kind: str, *, backend: str | None = None, num_worst: int = 0, grows: bool = False
) -> Outcome:
    """The losses of this rank, and the parameters at the end."""
    torch._dynamo.reset()
    rank, num_ranks = group.rank(), group.size()
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer, num_worst_tokens=num_worst)
        wrapped: Any = wrap(model, kind)
        if backend is not None and kind != "compiled_ddp":
            torch._inductor.config.compile_threads = 1
            wrapped = torch.compile(wrapped, backend=backend, dynamic=grows or None)
        optimizers = make_optimisers(model, kind)
        losses = []
        for step in range(NUM_STEPS):
            model.zero_grad()
            mine = batch(step, rank, num_ranks, grows)
            losses.append(_backward(wrapped, mine, accumulates=kind.endswith("no_sync")))
            clip_grad_norm_(model, 1.0)
            for optimizer in optimizers:
                optimizer.step()
            update_biases(model)
        del wrapped
        return losses, parameters(model)


def make_optimisers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    options: Any = {"lr": 0.2, "momentum": 0.9}
    if kind != "ddp_zero":
        return [torch.optim.SGD(model.parameters(), **options)]
    own = expert_parameters(model)
    dense = [one for one in model.parameters() if one not in own]
    return [
        ZeroRedundancyOptimizer(dense, torch.optim.SGD, **options),
        torch.optim.SGD(own, **options),
    ]


def _backward(wrapped: Any, x: Tensor, accumulates: bool) -> float:
    """In two pieces, of which the last alone exchanges gradients, if it accumulates."""
    pieces = [x[0::2], x[1::2]] if accumulates else [x]  # the same on any number of ranks
    total = 0.0
    for piece in pieces:
        quiet = piece is not pieces[-1] and isinstance(wrapped, DistributedDataParallel)
        with wrapped.no_sync() if quiet else nullcontext():
            loss = loss_of(wrapped, piece) / len(pieces)
            loss.backward()
            total += loss.item()
    return total


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """By names that do not depend on the number of ranks."""
    ids = {name: share.ids for name, _, share in shares(model)}
    named = {}
    for name, one in model.named_parameters():
        value = one.detach()
        owner, _, key = name.rpartition(".")
        if owner in ids:
            named.update({f"{owner}.{key}.{e}": value[i] for i, e in enumerate(ids[owner])})
        else:
            named[name] = value.full_tensor() if isinstance(value, DTensor) else value
    return named


def refused(group: Any, kind: str) -> tuple[str, float]:
    """What is said of a wrapper that takes experts for parameters that all ranks share, up to the
    first step; and how far the experts are then from what they were, if nobody has sharded them.
    """
    torch._dynamo.reset()
    gc.collect()  # models that were refused before: what torch.compile traces looks at all
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer, num_worst_tokens=NUM_TOKENS)
        before, x = model.moe.experts.down.detach().clone(), batch(0, group.rank(), 2, False)
        try:
            REFUSED[kind](model, x)
        except (RuntimeError, ValueError) as error:
            if kind.startswith("fsdp"):
                return str(error), 0.0
            return str(error), float((model.moe.experts.down - before).abs().max())
    return "nothing", 0.0


def _compile(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def _called(run: Any, x: Tensor) -> Any:
    run(x)
    return run


def _shard(model: nn.Module) -> Any:
    return fully_shard(model)


def _wrap_outside(model: Model, x: Tensor) -> None:
    prepare_for_ddp(model)
    DistributedDataParallel(nn.Sequential(model))


def _shard_later(model: nn.Module, x: Tensor) -> None:
    run = _called(_compile(model), x)
    fully_shard(model)
    run(x)


def _hybrid(model: nn.Module) -> Any:
    """Gradients are averaged over ranks, and nothing is sharded."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "fsdp")))


def _step_zero(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).step()


def _replicate(model: nn.Module) -> Any:
    return replicate_by_fsdp(model)


def _step_local_sgd(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    PostLocalSGDOptimizer(sgd, PeriodicModelAverager(period=1, warmup_steps=0)).step()


def _sum_under_ddp(model: nn.Module, compiles: bool) -> Any:
    """Experts are hidden, as those of transformers always are, and nobody divides."""
    hide_from_ddp(model)
    ddp = DistributedDataParallel(model)
    return _compile(ddp) if compiles else ddp


def _sum_under_fsdp(model: nn.Module) -> Any:
    return fully_shard(model, ignored_params=expert_parameters(model))


def _fsdp1(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _clip_fsdp1(model: Model, x: Tensor) -> None:
    """Around a part without experts it works, but for the norm."""
    model.first = _fsdp1(model.first)
    model(x).sum().backward()
    clip_grad_norm_(model, 1.0)


REFUSED: dict[str, Callable[[Model, Tensor], Any]] = {
    "ddp": lambda model, x: DistributedDataParallel(model),
    "ddp_compiled": lambda model, x: DistributedDataParallel(_called(_compile(model), x)),
    "ddp_outside": _wrap_outside,
    "fsdp_all": lambda model, x: _shard(model)(x),
    "fsdp_experts": lambda model, x: (_shard(model.moe.experts), model(x)),
    "fsdp_compiled": lambda model, x: _compile(_shard(model))(x),
    "fsdp_compiled_later": _shard_later,
    "fsdp_hybrid": lambda model, x: _hybrid(model)(x),
    "fsdp1": lambda model, x: _fsdp1(model),
    "fsdp1_clipped": _clip_fsdp1,
    "replicate": lambda model, x: replicate(model)(x),
    "replicate_sums": lambda model, x: replicate(model, [part for _, part, _ in shares(model)])(x),
    "replicate_by_fsdp": lambda model, x: _replicate(model)(x),
    "ddp_sums": lambda model, x: _sum_under_ddp(model, False)(x),
    "ddp_sums_compiled": lambda model, x: _sum_under_ddp(model, True)(x),
    "fsdp_sums": lambda model, x: _sum_under_fsdp(model)(x),
    "fsdp_sums_compiled": lambda model, x: _compile(_sum_under_fsdp(model))(x),
    "zero": _step_zero,
    "local_sgd": _step_local_sgd,
}


def train_compiled(group: Any, backend: str, num_worst: int, kind: str) -> Outcome:
    """On sizes that change from step to step."""
    return train(group, kind, backend=backend, num_worst=num_worst, grows=True)


def train_growing(group: Any) -> Outcome:
    """The same sizes, and nothing compiled."""
    return train(group, "none", grows=True)
