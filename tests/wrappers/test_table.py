"""docs/guide/training.md says of every wrapper what the tests say."""

from __future__ import annotations

from pathlib import Path

from tests.cases.wrappers.table import OTHERS, table

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "training.md"


def test_the_table() -> None:
    assert table() in PAGE.read_text(), "python -m tests.cases.wrappers.table prints the table"


def test_the_tests_that_the_table_names() -> None:
    for _, _, test in OTHERS:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), test
