"""A GradScaler beside FSDP2; importable, so that processes can."""

from __future__ import annotations

from typing import Any

import torch

import tokenyard
from tests.cases.nn import moving as jobs
from tokenyard.nn import GradScaler, average_expert_gradients, expert_parameters
from tokenyard.testing import assert_same


def with_fsdp(group: Any) -> list[float]:
    """One optimiser has shards of dense parameters, and experts; rank 1 overflows in step 0."""
    from torch.distributed.fsdp import fully_shard

    with tokenyard.Buffer(group) as buffer:
        layer: Any = jobs.make(buffer)
        average_expert_gradients(layer)
        fully_shard(layer, ignored_params=expert_parameters(layer))
        adam = torch.optim.Adam(layer.parameters())
        scaler = GradScaler(layer, init_scale=2.0**10)
        scales = []
        for step in range(2):
            adam.zero_grad()
            scaler.scale(layer(jobs.tokens(group.rank())).square().mean()).backward()
            if step == 0 and group.rank() == 1:
                layer.experts.down.grad[1, 0, 0] = torch.inf
            before = [one.detach().clone() for one in (layer.experts.down, layer.router.weight)]
            scaler.step(adam)
            scaler.update()
            scales.append(scaler.get_scale())
            after = [layer.experts.down.detach(), layer.router.weight.detach()]
            if step == 0:
                assert_same(after[0], before[0])
                assert_same(after[1].full_tensor(), before[1].full_tensor())
            else:
                assert not torch.equal(after[0], before[0])
                assert not torch.equal(after[1].full_tensor(), before[1].full_tensor())
        return scales
