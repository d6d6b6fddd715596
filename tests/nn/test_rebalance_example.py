"""examples/rebalance_moe.py: experts follow the load, and losses are those of one rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.cases.clock import scaled
from tokenyard.testing import run_virtual

SCRIPT = Path(__file__).parents[2] / "examples" / "rebalance_moe.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("rebalance_moe", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(steps: int, every: int, timeout: float) -> None:
    train = example().train
    (one,) = run_virtual(train, 1, steps, 0, timeout=timeout).results
    still = run_virtual(train, 4, steps, 0, timeout=timeout).results[0]
    moving, again = (
        run_virtual(train, 4, steps, every, timeout=timeout).results[0] for _ in range(2)
    )
    assert moving == again  # bits of all losses, rows and moves
    assert moving["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert still["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert moving["moved"] > 0
    before, after = sum(still["uneven"][every:]), sum(moving["uneven"][every:])
    assert after - len(moving["uneven"][every:]) < 0.6 * (before - len(still["uneven"][every:]))


def test_losses_are_those_of_one_rank_and_load_is_even() -> None:
    check(steps=12, every=4, timeout=scaled(60))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_400_steps() -> None:
    check(steps=400, every=50, timeout=scaled(250))
