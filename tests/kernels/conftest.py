"""What tests of several kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
import torch

from tokenyard.runtime import threads

_ONE_OF = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter is slow, and few have a GPU to break: of a test with many parameters the
    gate interprets the first, and one of three of the others.
    """
    seen = set()
    for item in items:
        if item.get_closest_marker("triton") is None:
            continue
        test = item.nodeid.split("[")[0]
        if test in seen and crc32(item.nodeid.encode()) % _ONE_OF:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


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
