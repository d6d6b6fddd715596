"""What the gate runs (.ci/run), and what only the night does (.ci/nightly)."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

# How many times as many random cases as in the gate.
_TIMES = int(os.environ.get("TOKENYARD_TEST_CASES", "1"))


def at_night(params: Iterable[Any], gate: Container[Any] = ()) -> list[Any]:
    """Parameters of a test, for the night; those in `gate` for every run."""
    return [one if one in gate else pytest.param(one, marks=pytest.mark.slow) for one in params]


def random_cases(number: int) -> int:
    """So many in the gate."""
    return _TIMES * number
