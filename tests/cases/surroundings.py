"""Defaults of torch that may hold around a call, and an object whose calls are made inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Around = Callable[[], AbstractContextManager[Any]]


@contextmanager
def _float64() -> Iterator[None]:
    """The default dtype, which is one of the process."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Around] = {
    "": nullcontext,
    "meta": lambda: torch.device("meta"),
    "float64": _float64,
    "inference": torch.inference_mode,
}


class Surrounded:
    """An object, or a module, whose functions are called inside of something."""

    def __init__(self, inner: Any, around: Around) -> None:
        self._inner, self._around = inner, around

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with self._around():
                return getattr(self._inner, name)(*args, **options)

        return call
