"""Results that are kept can be read, and docs/performance.md has their tables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.take_results import file_name
from tokenyard.tools.bench.catalogue import BENCHMARKS
from tokenyard.tools.bench.report import commit
from tools import results


def test_the_page_has_the_tables_of_today() -> None:
    page = results.PAGE.read_text()
    assert page == results.page_with_tables(page), "run `python -m tools.results --write`"


def test_kept_results_are_named_by_machine_and_commit() -> None:
    kept = results.all_results()
    assert kept
    names = {file_name(one.machine["processor"], one.machine["commit"]) for one in kept}
    assert names == {path.name for path in results.RESULTS.glob("*.json")}
    assert all(report.bench in BENCHMARKS for one in kept for report in one.reports)


def test_a_result_of_a_checkout_names_its_commit() -> None:
    now = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    named = commit()
    assert named is not None
    assert now.stdout.startswith(named)


def test_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results.draw(tmp_path / "results.svg")
    assert (tmp_path / "results.svg").read_text().count("<use ") > len(BENCHMARKS)
