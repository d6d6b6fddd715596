"""The table of tested versions in docs/guide/install.md fits what pyproject.toml allows."""

from __future__ import annotations

import re

from tools import versions
from tools.versions import NOT_TRIED, NUMBAS, PASSED, Row, numbers

PROJECT = (versions.ROOT / "pyproject.toml").read_text()
PAGE = versions.PAGE.read_text()
TABLE = versions.read(PAGE)


def allowed(pattern: str) -> list[list[int]]:
    found = re.search(pattern, PROJECT)
    assert found is not None, pattern
    return [numbers(version) for version in found.groups()]


def passed() -> list[tuple[Row, str]]:
    return [
        (row, numba)
        for row, cells in TABLE.items()
        for numba, cell in cells.items()
        if cell.startswith(PASSED)
    ]


def test_the_bounds_of_every_version_have_passed() -> None:
    (python,) = allowed(r'requires-python = ">=([\d.]+)"')
    (torch,) = allowed(r'"torch>=([\d.]+)"')
    least, below = allowed(r'"numba>=([\d.]+),<([\d.]+)"')
    pythons = {tuple(numbers(row.python)) for row, _ in passed()}
    torches = {tuple(numbers(row.torch)[:2]) for row, _ in passed()}
    numbas = {tuple(numbers(numba)) for _, numba in passed()}
    assert min(pythons) == tuple(python)
    assert min(torches) == tuple(torch)
    assert numbas == {(0, minor) for minor in range(least[1], below[1])}
    assert {tuple(numbers(one)) for one in NUMBAS} == numbas


def test_every_python_has_passed_from_the_oldest_to_the_newest() -> None:
    minors = sorted({numbers(row.python)[1] for row, _ in passed()})
    assert minors == list(range(minors[0], minors[-1] + 1))


def test_every_cell_says_what_came_of_it() -> None:
    cells = [cell for row in TABLE.values() for cell in row.values()]
    assert cells
    for cell in cells:
        assert re.fullmatch(rf"{PASSED} \([\d.]+\)|{NOT_TRIED}|no wheel of \w+", cell), cell


def test_a_table_is_read_as_it_was_written() -> None:
    table = {
        Row("3.9", "2.9.1"): dict.fromkeys(NUMBAS, NOT_TRIED),
        Row("3.10", "2.10.0"): {**dict.fromkeys(NUMBAS, NOT_TRIED), NUMBAS[0]: "passed (0.65.1)"},
    }
    written = versions.page_with(table, PAGE)
    assert versions.read(written) == table
    assert written.index("| 3.9 |") < written.index("| 3.10 |")
    assert versions.page_with(TABLE, PAGE) == PAGE


def test_what_cannot_be_installed_says_which_wheel_is_missing() -> None:
    said = "Because torch==2.15.0 has no wheels with a matching Python implementation tag"
    assert versions.why_not(said) == "no wheel of torch"
    assert versions.why_not("error: no network") == "cannot be installed"
