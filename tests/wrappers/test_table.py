"""docs/guide/training.md says of every wrapper what the tests say."""

from __future__ import annotations

from pathlib import Path

from tests.cases.wrappers.table import table

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "training.md"


def test_the_table() -> None:
    assert table() in PAGE.read_text(), "python -m tests.cases.wrappers.table prints the table"
