"""What a rank does with a family's tiny model; importable by processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.cases.transformers.families import classes_of, tiny_model
from tests.cases.transformers.family_checks import step
from tokenyard.integrations.transformers import expert_parallel, from_pretrained, save_pretrained


def save_and_load(group: Any, family: str, path: str) -> Tensor | str:
    """What the model says that was saved and loaded again, or why it cannot be loaded."""
    model = expert_parallel(tiny_model(family), group)
    save_pretrained(model, path)
    dist.barrier(group)
    try:
        loaded = from_pretrained(classes_of(family)[0], path, group, tokens="same")
    except ValueError as error:
        return str(error)
    return step(loaded.eval(), 0)[0]
