"""A small model with MoE layers, and what ranks do with it; importable, so that processes can."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tokenyard
from tokenyard.nn import (
    Experts,
    MoE,
    RouterConfig,
    auxiliary_losses,
    average_expert_gradients,
    checkpoint_state,
    expert_parameters,
    prepare_for_ddp,
    update_biases,
)

HIDDEN, NUM_EXPERTS, NUM_TOKENS = 16, 6, 24  # tokens of all ranks
CONFIG = RouterConfig(
    num_experts=NUM_EXPERTS,
    num_topk=2,
    score="sigmoid",
    num_groups=3,
    num_kept_groups=2,
    auxiliary_loss=0.1,
    bias_rate=0.01,
)

_seeding = threading.Lock()  # virtual ranks share torch's generator


class Model(nn.Module):
    """Two layers, the second with a shared expert, and dense parts around them."""

    def __init__(self, buffer: tokenyard.Buffer, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(buffer, HIDDEN, 24, CONFIG, **options)
        self.second = MoE(buffer, HIDDEN, 8, CONFIG, shared=8, **options)
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.moe(self.first(x))
        return self.last(x + self.second(x))


def make_model(buffer: tokenyard.Buffer, **options: Any) -> Model:
    with _seeding:
        torch.manual_seed(5)
        return Model(buffer, **options)


def tokens(rank: int, num_ranks: int) -> Tensor:
    """This rank's part of the batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(NUM_TOKENS, HIDDEN, generator=generator).chunk(num_ranks)[rank]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + auxiliary_losses(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By names that do not depend on the number of ranks."""
    named = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Experts):
            named.update({f"{name}.{e}": parameter.grad[i] for i, e in enumerate(owner.ids)})
        else:
            grad = parameter.grad
            named[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return named


def one_step(group: Any, kind: str, transport: str = "auto") -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of one backward pass under this kind of data parallelism."""
    rank, num_ranks = group.rank(), group.size()
    with tokenyard.Buffer(group, transport=transport) as buffer:
        model = make_model(buffer)
        wrapped: nn.Module = model
        if kind == "ddp":
            prepare_for_ddp(model)
            wrapped = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp":
            fully_shard(model, ignored_params=expert_parameters(model))
            average_expert_gradients(model)
        else:
            average_expert_gradients(model)
        loss = loss_of(wrapped, tokens(rank, num_ranks))
        loss.backward()
        return loss.item(), gradients(model)


def loads_under_ddp(group: Any) -> tuple[Tensor, Tensor]:
    """Of this rank's choices, after one call and after two."""
    with tokenyard.Buffer(group) as buffer:
        model = make_model(buffer)
        prepare_for_ddp(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        x = tokens(group.rank(), group.size())
        wrapped(x).sum().backward()
        once = model.moe.router.load.clone()
        wrapped(x)
        return once, model.moe.router.load


def train(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any, num_steps: int) -> None:
    """Dense gradients are averaged by hand."""
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, tokens(group.rank(), group.size())).backward()
        own = expert_parameters(model)
        for parameter in model.parameters():
            if parameter not in own:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        update_biases(model)


def _begin(buffer: tokenyard.Buffer, optimiser: str) -> tuple[Model, torch.optim.Optimizer]:
    model = make_model(buffer)
    average_expert_gradients(model)
    options = {"momentum": 0.9} if optimiser == "SGD" else {}
    return model, getattr(torch.optim, optimiser)(model.parameters(), lr=0.01, **options)


def train_and_save(group: Any, path: str, optimiser: str) -> dict[str, Tensor]:
    """What there is after one more step than was saved."""
    with tokenyard.Buffer(group) as buffer:
        model, optimizer = _begin(buffer, optimiser)
        train(model, optimizer, group, 2)
        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, group, 1)
        return _tensors(model, optimizer)


def load_and_train(group: Any, path: str, optimiser: str) -> dict[str, Tensor]:
    with tokenyard.Buffer(group) as buffer:
        model, optimizer = _begin(buffer, optimiser)
        for parameter in model.parameters():
            parameter.data.zero_()
        dcp.load(checkpoint_state(model, optimizer), checkpoint_id=path)
        train(model, optimizer, group, 1)
        return _tensors(model, optimizer)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = checkpoint_state(model, optimizer)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def compiled(group: Any, backend: str, num_worst_tokens: int) -> None:
    """torch.compile of the whole model, in one graph, equals eager; and again, on other tokens."""
    torch._inductor.config.compile_threads = 1
    torch._dynamo.reset()
    with tokenyard.Buffer(group) as buffer:
        eager, model = make_model(buffer), make_model(buffer, num_worst_tokens=num_worst_tokens)
        run: Any = torch.compile(model, backend=backend, fullgraph=True)
        for turn in range(2):
            x = tokens(group.rank(), group.size()) * (1 - 2 * turn)
            got, want = loss_of(run, x), loss_of(eager, x)
            got.backward(), want.backward()
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(gradients(model), gradients(eager))
            torch.testing.assert_close(model.moe.router.load, eager.moe.router.load)


def num_graphs(group: Any, num_worst_tokens: int) -> int:
    """That torch.compile makes of one layer."""
    with tokenyard.Buffer(group) as buffer:
        layer = make_model(buffer, num_worst_tokens=num_worst_tokens).second
        return torch._dynamo.explain(layer)(tokens(group.rank(), group.size())).graph_count
