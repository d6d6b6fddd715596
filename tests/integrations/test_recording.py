"""tokenyard.record on a model of transformers: what routers chose, by the names of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

import tokenyard
from tests.cases.transformers import moe as jobs
from tokenyard.integrations.transformers import expert_parallel
from tokenyard.observe import routing
from tokenyard.testing import assert_same, run_virtual

LAYERS = [f"model.layers.{number}.mlp.experts" for number in range(2)]


def routed(group: Any) -> dict[str, Tensor]:
    """One forward and backward pass; what each experts module was told."""
    model = expert_parallel(jobs.whole_model("mixtral"), group)
    told: dict[str, Tensor] = {}
    for name in LAYERS:

        def keep(_module: Any, given: Any, name: str = name) -> None:
            told[name] = given[1]

        model.get_submodule(name).register_forward_pre_hook(keep)
    jobs.gradients(model, jobs.tokens_of(group.rank()))
    return told


def test_layers_of_transformers(tmp_path: Path) -> None:
    with tokenyard.record(tmp_path / "routing.pt"):
        told = run_virtual(routed, 2).results
    layers = routing.load(tmp_path / "routing.pt")
    assert [layer.name for layer in layers] == LAYERS
    for layer in layers:
        want = torch.cat([of_rank[layer.name] for of_rank in told])
        assert_same(layer.topk_idx, want.to(torch.int16))
        assert (layer.num_experts, layer.hidden) == (8, 64)
