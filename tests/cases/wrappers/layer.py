"""Twenty steps of a model with nn.MoE under each wrapper, as ranks make them; importable."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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
from tokenyard.nn.share import shares

NUM_STEPS, NUM_TOKENS = 20, 24  # tokens of all ranks, at least
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Outcome = tuple[list[float], dict[str, Tensor]]


def batch(step: int, rank: int, num_ranks: int, grows: bool) -> Tensor:
    """This rank's part of a step's tokens, of which there are more each step if it grows."""
    num_tokens = NUM_TOKENS + 4 * (step % 7) * grows
    generator = torch.Generator().manual_seed(step)
    return torch.randn(num_tokens, HIDDEN, generator=generator).chunk(num_ranks)[rank]


def wrap(model: Model, kind: str) -> nn.Module:
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
        if backend is not None:
            torch._inductor.config.compile_threads = 1
            wrapped = torch.compile(wrapped, backend=backend, dynamic=grows or None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        losses = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            mine = batch(step, rank, num_ranks, grows)
            losses.append(_backward(wrapped, mine, accumulates=kind.endswith("no_sync")))
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            update_biases(model)
        del wrapped
        return losses, parameters(model)


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


def sharded_experts(group: Any, when: str) -> str:
    """What the first forward pass says of experts that fully_shard was not told to leave."""
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        if when == "root":
            fully_shard(model)
        else:
            fully_shard(model.moe.experts)
        try:
            model(batch(0, group.rank(), group.size(), False))
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "nothing"


def train_compiled(group: Any, backend: str, num_worst: int, kind: str) -> Outcome:
    """On sizes that change from step to step."""
    return train(group, kind, backend=backend, num_worst=num_worst, grows=True)


def train_growing(group: Any) -> Outcome:
    """The same sizes, and nothing compiled."""
    return train(group, "none", grows=True)
