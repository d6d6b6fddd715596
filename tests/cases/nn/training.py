"""What ranks do with examples/train_moe.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

import tokenyard
from tests.cases.nn.moe import gradients

SCRIPT = Path(__file__).parents[3] / "examples" / "train_moe.py"


def example() -> ModuleType:
    name = "train_moe"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run(group: Any, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the gradients of the first step."""
    with tokenyard.Buffer(group) as buffer:
        training = example().Training(buffer)
        losses = training.run(num_steps)
        first = next(losses)
        grads = {name: grad.clone() for name, grad in gradients(training.model).items()}
        return [first, *losses], grads


def run_and_save(group: Any, num_steps: int, path: str) -> None:
    with tokenyard.Buffer(group) as buffer:
        training = example().Training(buffer)
        list(training.run(num_steps))
        training.save(path)


def load_and_run(group: Any, num_steps: int, path: str) -> list[float]:
    with tokenyard.Buffer(group) as buffer:
        training = example().Training(buffer)
        training.load(path)
        return list(training.run(num_steps))
