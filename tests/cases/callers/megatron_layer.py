"""Twenty steps of megatron-core's whole MoELayer, as ranks make them, and one process alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.cases.callers.megatron import config, groups
from tests.cases.callers.moe import Case

NUM_STEPS, BATCH, LENGTH = 20, 4, 6  # sequences of all ranks

Outcome = tuple[list[float], dict[str, Tensor]]  # losses, and parameters after the last step


def train(group: Any, case: Case, backend: str) -> Outcome:
    """Without a backend: this process has all experts, and all tokens."""
    rank = group.rank() if backend else 0
    layer = _layer(group, case, backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x, wanted = _batch(step, rank, case)
        y, bias = layer(x)
        assert bias is None
        loss = nn.functional.mse_loss(y, wanted)
        loss.backward()
        losses.append(loss.item())
        _average(group, layer, case)
        optimizer.step()
    return losses, _by_name(layer, case, rank)


def _layer(group: Any, case: Case, backend: str) -> Any:
    """Shared experts, and a loss for balance; weights by their names and their experts' ids."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    layer = build_module(
        get_moe_module_spec(use_te=False, num_experts=case.num_experts),
        config=config(
            case,
            backend,
            ffn_hidden_size=24,
            moe_ffn_hidden_size=24,
            moe_shared_expert_intermediate_size=20,
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=1e-2,
        ),
        layer_number=1,
        pg_collection=groups(group if backend else None),
    )
    with torch.no_grad():
        for name, value in _by_name(layer, case, group.rank() if backend else 0).items():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return layer.train()


def _batch(step: int, rank: int, case: Case) -> tuple[Tensor, Tensor]:
    """This rank's sequences [length, sequences, hidden], and what shall become of them."""
    generator = torch.Generator().manual_seed(step % 4)
    x = torch.randn(LENGTH, BATCH, case.hidden, generator=generator)
    mine = x.chunk(case.num_ranks, 1)[rank].contiguous()
    return mine, mine.roll(1, -1).tanh()


def _average(group: Any, layer: nn.Module, case: Case) -> None:
    """Each rank's loss is a mean over its own tokens; experts have got gradients of all ranks."""
    for name, one in layer.named_parameters():
        if not name.startswith("experts.") and case.num_ranks > 1:
            dist.all_reduce(one.grad, group=group)
        one.grad /= case.num_ranks


def _by_name(layer: nn.Module, case: Case, rank: int) -> dict[str, Tensor]:
    """Experts by their global ids: experts.local_experts.0.linear_fc1.weight is another's there."""
    first = int(case.experts_of(rank)[0])
    named = {}
    for name, one in layer.named_parameters():
        parts = name.split(".")
        if name.startswith("experts."):
            parts[2] = str(first + int(parts[2]))
        named[".".join(parts)] = one.data
    return named
