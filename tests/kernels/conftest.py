"""What tests of several kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tokenyard.runtime import threads


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the thread pools that the numba set makes. Torch's number is put back."""
    sizes: list[int] = []
    make = threads.ThreadPoolExecutor

    def counted(size: int, **options: Any) -> Any:
        sizes.append(size)
        return make(size, **options)

    monkeypatch.setattr(threads, "ThreadPoolExecutor", counted)
    before = torch.get_num_threads()
    yield sizes
    torch.set_num_threads(before)
