"""What the gate runs (.ci/run), and what only the night does (.ci/nightly)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

# How many times as many random cases as in the gate.
_TIMES = int(os.environ.get("TOKENYARD_TEST_CASES", "1"))
_MARKED = type(pytest.param())


def at_night(params: Iterable[Any], gate: Collection[Any] = ()) -> list[Any]:
    """Parameters of a test, for the night; those in `gate` for every run.

    What it returns is for pytest alone: a test that picks from it would miss those of the night.
    """
    values = list(params)
    if marked := [one for one in (*values, *gate) if isinstance(one, _MARKED)]:
        raise TypeError(f"at_night: want plain values, got parameters with marks: {marked}")
    if unknown := [one for one in gate if one not in values]:
        raise ValueError(f"at_night: gate has {unknown}, which no parameter is: {values}")
    return [one if one in gate else pytest.param(one, marks=pytest.mark.slow) for one in values]


def random_cases(number: int) -> int:
    """So many in the gate."""
    return _TIMES * number
