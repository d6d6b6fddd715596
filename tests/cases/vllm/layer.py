"""A layer of experts as vLLM builds it and packs its weights, on ranks that are processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from tests.cases.clock import scaled
from tokenyard.integrations.vllm import hooks, settings
from tokenyard.integrations.vllm.exchange import Exchange
from tokenyard.testing.routing import routing

EXPERTS, TOPK = 10, 3  # uneven on four ranks
TOKENS = (140, 5, 0, 61)  # more than few, few, none


@dataclass(frozen=True, kw_only=True)
class Case:
    ep_ranks: tuple[int, ...] = (0, 1)  # of so many:
    ep_size: int = 2
    dtype: torch.dtype = torch.float32
    hidden: int = 128
    inner: int = 64
    has_bias: bool = False


class Layer(torch.nn.Module):
    """What vLLM's method for unquantised experts sees of a layer of vLLM."""

    activation = MoEActivation.SILU
    apply_router_weight_on_input = False
    global_num_experts = EXPERTS

    def __init__(self, case: Case, exchange: Exchange) -> None:
        super().__init__()
        experts, rank = exchange.expert_map(EXPERTS), case.ep_ranks[exchange.buffer.rank]
        self.expert_map = torch.tensor(experts, dtype=torch.int32)
        mine = [e for e, local in enumerate(experts) if local >= 0]
        alone = FusedMoEParallelConfig.make_no_parallel()
        places = {"dp_size": case.ep_size, "dp_rank": rank, "ep_size": case.ep_size}
        self.moe_config = FusedMoEConfig(
            num_experts=EXPERTS,
            experts_per_token=TOPK,
            hidden_dim=case.hidden,
            intermediate_size=case.inner,
            num_local_experts=len(mine),
            num_logical_experts=EXPERTS,
            activation=self.activation,
            device="cpu",
            routing_method=RoutingMethodType.Default,
            moe_parallel_config=replace(alone, **places, ep_rank=rank, use_ep=True),
            in_dtype=case.dtype,
            has_bias=case.has_bias,
        )
        self.method = UnquantizedFusedMoEMethod(self.moe_config)
        self.method.create_weights(self, len(mine), case.hidden, case.inner, case.dtype)
        self.mine, self.raw = mine, {name: one.shape for name, one in self.named_parameters()}
        self.draw(99)
        self.method.process_weights_after_loading(self)

    def draw(self, seed: int) -> None:
        """Fill biases where they are, and weights as they are before they are packed."""
        random = torch.Generator().manual_seed(seed)
        for name, shape in self.raw.items():
            whole = torch.randn(EXPERTS, *shape[1:], generator=random)
            drawn = (whole[self.mine] / shape[-1] ** 0.5).to(self.moe_config.in_dtype)
            one = getattr(self, name)
            if name.endswith("bias") and one.shape == shape:
                one.data.copy_(drawn)
            else:
                one.data = drawn

    def pack(self) -> None:
        self.method.moe_kernel.fused_experts.process_weights_after_loading(self)

    def _expert_routing_tables(self) -> None:
        return None

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.method.apply(self, x, weights, ids, None, None)


@torch.inference_mode()
def through_layer(group: Any, balance: str, case: Case) -> dict[str, Any]:
    """What comes out of the layer for skewed tokens, twice, with weights that were loaded later,
    and with weights that were changed in place; how many rows its kernel had, and of how many
    experts; what was logged, and the shapes of weights.
    """
    current_platform.import_kernels()
    hooks.install()
    with patch.dict(os.environ, TOKENYARD_VLLM_BALANCE=balance), _lines() as lines:
        asked = replace(settings.read(), timeout=scaled(60))
        exchange = Exchange(group, case.ep_ranks, case.ep_size, asked)
        with exchange.buffer as buffer, _manager_of(exchange):
            exchange.warm_up(case.dtype)
            with set_current_vllm_config(VllmConfig()), torch.inference_mode(False):
                layer = Layer(case, exchange)
            num_tokens = TOKENS[buffer.rank]
            ids, weights = routing("skewed", num_tokens, TOPK, EXPERTS, seed=buffer.rank)
            random = torch.Generator().manual_seed(buffer.rank)
            x = torch.randn(num_tokens, case.hidden, generator=random).to(case.dtype)
            seen, compute = [], cpu_moe.cpu_fused_moe

            def kernel(out: Tensor, rows: Tensor, w13: Tensor, w2: Tensor, *more: Any) -> None:
                seen.append((len(rows), len(w13), len(w2)))
                compute(out, rows, w13, w2, *more)

            with patch.object(cpu_moe, "cpu_fused_moe", kernel):
                out = [layer(x, weights, ids) for _ in range(2)]
                with torch.inference_mode(False):
                    layer.draw(98)
                    layer.pack()
                out.append(layer(x, weights, ids))
                buffer.all_gather(torch.zeros(1))  # nobody reads
                for one in layer.parameters():
                    one.data.mul_(2)
                buffer.all_gather(torch.zeros(1))  # nobody writes
                out.append(layer(x, weights, ids))
            shapes = {name: list(one.shape) for name, one in layer.named_parameters()}
    return {"out": out, "seen": seen, "lines": lines, "shapes": shapes}


@contextmanager
def _manager_of(exchange: Exchange) -> Iterator[None]:
    """vLLM's group of ranks with a manager that has this exchange."""
    manager = SimpleNamespace(exchange=lambda everyone: exchange, world_size=exchange.ep_size)
    group: Any = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=manager))
    with patch.object(parallel_state, "_EP", group):
        yield


@contextmanager
def _lines() -> Iterator[list[str]]:
    """What the plugin logs meanwhile."""
    lines: list[str] = []
    log, handler = logging.getLogger("vllm.plugins.tokenyard"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
