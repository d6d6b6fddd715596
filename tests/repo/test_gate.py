"""The table at the end of .ci/run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools import gate

SUITE = "<testsuites><testsuite>{}</testsuite></testsuites>"
PASSED = '<testcase classname="tests.a.test_b" name="{}" time="{}"/>'
FAILED = '<testcase classname="tests.a.test_b" name="{}" time="1"><failure/></testcase>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steps").write_text("lint 3\nunit 5\nmulti-process 65\ndone 70\n")
    many = "".join(PASSED.format(f"test_{i}", i) for i in range(7))
    (tmp_path / "unit-1.xml").write_text(SUITE.format(many + FAILED.format("test_late")))
    (tmp_path / "unit-2.xml").write_text(SUITE.format(PASSED.format("test_long", 40.25)))
    return tmp_path


def write_second_tries(folder: Path, passed: int, failed: int) -> None:
    cases = [PASSED.format(f"test_late_{i}", 1) for i in range(passed)]
    cases += [FAILED.format(f"test_wrong_{i}") for i in range(failed)]
    (folder / "unit-1-again.xml").write_text(SUITE.format("".join(cases)))


def test_shows_steps_and_their_slowest_tests(folder: Path, capsys: Any) -> None:
    assert gate.main([str(folder)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["lint", "2"]
    assert rows[2] == ["unit", "60", "9", "40.2", "tests.a.test_b::test_long"]
    assert [row[-1][-6:] for row in rows[3:7]] == ["test_6", "test_5", "test_4", "test_3"]
    assert rows[7] == ["multi-process", "5"]


@pytest.mark.parametrize("passed, status", [(0, 0), (5, 0), (6, 1)])
def test_names_second_tries_and_fails_for_many(
    folder: Path, capsys: Any, passed: int, status: int
) -> None:
    write_second_tries(folder, passed, failed=2)
    assert gate.main([str(folder)]) == status
    out = capsys.readouterr().out
    assert f"passed only at the second try: {passed}\n" in out
    assert out.count("test_late_") == passed
    assert "test_wrong" not in out
