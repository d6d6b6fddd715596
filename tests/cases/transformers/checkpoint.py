"""What a rank does with checkpoints of a transformers model; importable by processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.cases.transformers.moe import tokens_of, whole_model
from tokenyard.integrations.transformers import expert_parallel
from tokenyard.nn import checkpoint_state


def train(group: Any, path: str, load: bool) -> dict[str, Tensor]:
    """Two steps, which are saved, or loaded; then one more. All ranks have the same tokens."""
    model = expert_parallel(whole_model("mixtral"), group, tokens="same")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        if step == 2:
            (dcp.load if load else dcp.save)(checkpoint_state(model, optimizer), checkpoint_id=path)
        if step == 2 or not load:
            optimizer.zero_grad()
            ids = tokens_of(step)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    state = checkpoint_state(model, optimizer)
    return {name: one for name, one in state.items() if isinstance(one, Tensor)}
