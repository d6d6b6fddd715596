"""Processes that all tests of wrappers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tokenyard.testing import Processes


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Processes]]:
    """So many processes as are asked for, started when they are first needed."""
    with ExitStack() as stack:
        yield cache(lambda num_ranks: stack.enter_context(Processes(num_ranks, timeout=110)))
