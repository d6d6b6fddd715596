"""Models under fully_shard that are gone; importable, so that processes can."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tokenyard
from tests.cases.nn import moving as jobs
from tokenyard.testing import assert_same


def another_died(group: Any) -> None:
    """As many modules are wrapped as at the last look, but others."""
    other: Any = nn.Linear(4, 4)
    fully_shard(other)
    x = jobs.tokens(group.rank())
    with tokenyard.Buffer(group) as buffer:
        layer = jobs.make(buffer)
        layer(x)
        del other
        gc.collect()
        fully_shard(layer)
        with pytest.raises(RuntimeError, match="was sharded by fully_shard"):
            layer(x)


def dead_but_not_collected(group: Any) -> None:
    """On rank 0 alone: a model that was wrapped wrongly, which nobody holds any more."""
    x = jobs.tokens(group.rank())
    with tokenyard.Buffer(group) as buffer:
        wrong, layer = jobs.make(buffer), jobs.make(buffer)
        want = layer(x).detach()
        fully_shard(wrong)
        gc.disable()
        try:
            held = [wrong] if group.rank() == 0 else []
            held.append(held)  # type: ignore[arg-type]
            del wrong, held
            torch._dynamo.reset()
            run = torch.compile(layer, backend="eager")
            with torch.no_grad():
                assert_same(run(x), want)
        finally:
            gc.enable()
