"""Ranks of one caller at a time, for all tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.callers.ranks import Callers


@pytest.fixture(scope="session")
def callers() -> Iterator[Callers]:
    started = Callers()
    yield started
    started.close()
