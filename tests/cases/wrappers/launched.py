"""The environment that accelerate and Trainer read; importable by processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own import
    from accelerate.state import AcceleratorState, GradientState


@contextmanager
def launched(group: Any) -> Iterator[None]:
    """The environment that torchrun makes, or none of it without a group."""
    before = dict(os.environ)
    if group is not None:
        rank, size = str(group.rank()), str(group.size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
