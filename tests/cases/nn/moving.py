"""A layer whose experts move between two ranks; importable, so that processes can."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tokenyard.nn import MoE, RouterConfig, rebalance

EVEN = torch.tensor([0, 0, 0, 1, 1, 1])
TO = torch.tensor([1, 0, 1, 0, 1, 0])  # as many on each rank, but others
FROM = ([0, 1, 2], [3, 4, 5])
HIDDEN = 16

_seeding = threading.Lock()  # virtual ranks share torch's generator


def make(buffer: tokenyard.Buffer, seed: int = 0, num_experts: int = 6, **options: Any) -> MoE:
    with _seeding:
        torch.manual_seed(seed)
        config = RouterConfig(num_experts=num_experts, num_topk=2)
        return MoE(buffer, HIDDEN, 12, config, **options)


def tokens(seed: int) -> Tensor:
    return torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(seed))


def compiled(group: Any, behind: str) -> None:
    """A compiled layer raises where it was left behind, and is right where it followed, though no
    shape has changed.
    """
    torch._dynamo.reset()
    x = tokens(group.rank())
    with tokenyard.Buffer(group) as buffer:
        layer = make(buffer, num_worst_tokens=40)
        other = copy.deepcopy(layer)
        runs: list[Any] = [
            torch.compile(one, backend="aot_eager", fullgraph=True) for one in (layer, other)
        ]
        want = layer(x).detach()
        for run in runs:
            torch.testing.assert_close(run(x).detach(), want)
        for placement in (TO, EVEN, TO):
            rebalance(layer, placement)
            torch.testing.assert_close(runs[0](x).detach(), want)
            with pytest.raises(ValueError, match=behind):
                runs[1](x)
            rebalance(other, placement)
            torch.testing.assert_close(runs[1](x).detach(), want)
