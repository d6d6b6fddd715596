"""Processes that all tests of nn share: what they import takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tokenyard.testing import Processes


class Pools:
    """So many processes as are asked for, started when they are first needed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pools: dict[int, Processes] = {}

    def __getitem__(self, num_ranks: int) -> Processes:
        if num_ranks not in self._pools:
            pool = Processes(num_ranks, timeout=110)
            self._pools[num_ranks] = self._stack.enter_context(pool)
        return self._pools[num_ranks]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(stack)


@pytest.fixture
def two_processes(pools: Pools) -> Processes:
    return pools[2]
