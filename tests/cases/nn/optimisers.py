"""Every optimiser that we know, and what ranks do with its checkpoints; importable, so that
processes can.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

import tokenyard
from tests.cases.nn.checkpoint import HIDDEN, NUM_TOKENS, make_model
from tokenyard.nn import average_expert_gradients, checkpoint_state, expert_parameters

LBFGS = "torch.optim.LBFGS"
SAVED, DONE = 3, 5  # steps
OPTIONS: dict[str, dict[str, Any]] = {
    "torch.optim.Adam": {"amsgrad": True},
    # centered divides by the root of a difference: a larger eps makes less of its rounding.
    "torch.optim.RMSprop": {"momentum": 0.9, "centered": True, "eps": 1e-4},
    "torch.optim.SGD": {"momentum": 0.9, "dampening": 0.5},
    "transformers.optimization.Adafactor": {"lr": None, "beta1": 0.9},
}
OTHERS = [
    "transformers.optimization.Adafactor",
    "lion_pytorch.Lion",
    "pytorch_optimizer.Lamb",
    "pytorch_optimizer.Lion",
    "pytorch_optimizer.Prodigy",
    "pytorch_optimizer.SOAP",
    "pytorch_optimizer.ScalableShampoo",
    "pytorch_optimizer.Shampoo",
]


def torch_optimisers() -> list[str]:
    """All that torch.optim has."""
    found = [
        f"torch.optim.{name}"
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    ]
    return sorted(found)


def find(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), kind)


def make(name: str, parameters: Any, **more: Any) -> Optimizer:
    options = {"lr": 0.01, **OPTIONS.get(name, {}), **more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find(name)(parameters, **options)


class Refusal(NamedTuple):
    """An optimiser's own, of a parameter."""

    words: str


def takes(name: str, shape: list[int], sparse: bool = False) -> Refusal | None:
    """Whether it makes a step for such a parameter."""
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape).to_sparse(1) if sparse else torch.ones(shape)
    try:
        make(name, [parameter]).step(*([lambda: 0.0] if name == LBFGS else []))
    except Exception as error:
        return Refusal(str(error).strip().splitlines()[0])
    return None


def takes_experts(name: str) -> Refusal | None:
    return takes(name, [2, HIDDEN, 8])


def looks_at_all_experts(name: str) -> bool:
    """Whether a stack of two experts moves otherwise than the two of them do, one by one."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, HIDDEN, 8, generator=generator) * torch.tensor([1.0, 9.0]).view(2, 1, 1)
    stacks = [nn.Parameter(start.clone())], [nn.Parameter(one.clone()) for one in start.split(1)]
    optimizers = [make(name, parameters) for parameters in stacks]
    for _ in range(3):
        grads = torch.randn(start.shape, generator=generator)
        grads = grads * torch.tensor([1.0, 50.0]).view(2, 1, 1)
        for parameters, optimizer in zip(stacks, optimizers):
            for parameter, grad in zip(parameters, grads.chunk(len(parameters))):
                parameter.grad = grad.clone()
            optimizer.step()
    together, alone = (torch.cat(list(one)).detach() for one in stacks)
    return not torch.allclose(together, alone, rtol=1e-5, atol=1e-7)


class Training:
    """A small model, and the optimiser for all the parameters that it takes; AdamW for others."""

    def __init__(self, buffer: tokenyard.Buffer, name: str) -> None:
        self.buffer = buffer
        sparse = name == "torch.optim.SparseAdam"
        self.model = nn.ModuleDict({"rest": make_model(buffer)})
        generator = torch.Generator().manual_seed(7)
        table = torch.randn(12, HIDDEN, generator=generator)
        self.model["table"] = nn.Embedding.from_pretrained(table, freeze=False, sparse=sparse)
        average_expert_gradients(self.model)
        everything = list(self.model.parameters())
        taken = {
            parameter
            for parameter in everything
            if takes(name, [2, *parameter.shape[1:]], sparse) is None
            and (not sparse or parameter is self.model["table"].weight)
        }
        self.optimizers = [make(name, [one for one in everything if one in taken])]
        others = [one for one in everything if one not in taken]
        if others:
            self.optimizers.append(torch.optim.AdamW(others, lr=0.01))

    def run(self, first: int, last: int) -> None:
        own, size = expert_parameters(self.model), self.buffer.group_size
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(12, (NUM_TOKENS,), generator=generator)
            x = self.model["table"](ids.chunk(size)[self.buffer.rank])
            self.model.zero_grad()
            (self.model["rest"](x).square().sum() * size / NUM_TOKENS).backward()
            for parameter in self.model.parameters():
                if parameter.grad is not None and parameter not in own:
                    grad = parameter.grad.to_dense()
                    dist.all_reduce(grad, dist.ReduceOp.AVG)
                    parameter.grad = grad.to_sparse(1) if parameter.grad.is_sparse else grad
            for optimizer in self.optimizers:
                optimizer.step()

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for optimizer in self.optimizers:
            state |= checkpoint_state(self.model, optimizer)
        return state

    def snapshot(self) -> dict[str, Any]:
        """By names that do not depend on the number of ranks; numbers too."""
        found: dict[str, Any] = {}
        for name, one in self.state().items():
            if isinstance(one, Tensor):
                found[name] = one.clone()
            else:
                found |= {f"{name}.{key}": value for key, value in one.state_dict().items()}
        return found


Snapshots = tuple[dict[str, Any], dict[str, Any]]


def save(group: Any, path: str, name: str) -> Snapshots | Refusal:
    """What there is when it is saved, and after more steps."""
    with tokenyard.Buffer(group) as buffer:
        training = Training(buffer, name)
        try:
            training.state()
        except ValueError as error:
            return Refusal(str(error))
        training.run(0, SAVED)
        saved = training.snapshot()
        dcp.save(training.state(), checkpoint_id=path)
        training.run(SAVED, DONE)
        return saved, training.snapshot()


def load(group: Any, path: str, name: str) -> Snapshots | Refusal:
    """What there is when it is loaded, and after more steps."""
    with tokenyard.Buffer(group) as buffer:
        training = Training(buffer, name)
        refusals: list[Any] = [None] * group.size()
        try:
            dcp.load(training.state(), checkpoint_id=path)
            mine = None
        except ValueError as error:
            mine = Refusal(str(error))
        dist.all_gather_object(refusals, mine)
        for refusal in refusals:
            if refusal is not None:
                return refusal
        loaded = training.snapshot()
        training.run(SAVED, DONE)
        return loaded, training.snapshot()
