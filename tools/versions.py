"""The table of tested versions in docs/guide/install.md: made here, by trying them.

    python -m tools.versions --python python3.10 python3.14 --torch 2.10.0 2.15.0 --numba 0.65.1

For every interpreter and pair of versions it makes an environment with uv, which must be installed,
puts tokenyard into it as `pip install .` would, runs a few tests (`tests/cases/quick.py`), and
writes the result into the table; other cells stay as they are. `--print` only prints it. uv's own
settings apply: UV_FIND_LINKS names a folder of wheels, say.

Where nothing was tried a cell says so. tests/repo/test_versions.py compares the table with the
versions that pyproject.toml allows.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.cases.quick import QUICK, command, settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "install.md"
BEGIN, END = "<!-- versions: python -m tools.versions -->", "<!-- end of the versions -->"
NUMBAS = ("0.65", "0.66", "0.67", "0.68")  # columns
PASSED, NOT_TRIED = "passed", "not tried"
_LIMIT = 900.0  # seconds for one cell


class Row(NamedTuple):
    python: str  # 3.11
    torch: str  # 2.13.0


Table = dict[Row, dict[str, str]]  # by the row, and by the numba of a column


def read(page: str) -> Table:
    """The table of a page."""
    _, rest = page.split(BEGIN)
    lines = [line for line in rest.split(END)[0].splitlines() if line.startswith("|")][2:]
    table: Table = {}
    for line in lines:
        python, torch, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[Row(python, torch)] = dict(zip(NUMBAS, cells, strict=True))
    return table


def page_with(table: Table, page: str) -> str:
    """The text of the page, with this table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    lines = [
        f"| Python | torch | {' | '.join(f'numba {version}' for version in NUMBAS)} |",
        "|---" * (2 + len(NUMBAS)) + "|",
        *(
            f"| {row.python} | {row.torch} | {' | '.join(cells[one] for one in NUMBAS)} |"
            for row, cells in sorted(table.items(), key=lambda item: _order(item[0]))
        ),
    ]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def _order(row: Row) -> tuple[list[int], list[int]]:
    return numbers(row.python), numbers(row.torch)


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def attempt(python: str, torch: str, numba: str) -> str:
    """What comes of these versions: passed, or what failed, in a few words."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        inside = str(folder / "environment/bin/python")
        make = ["uv", "venv", "-q", "-p", python, str(folder / "environment")]
        subprocess.run(make, check=True)
        wanted = [f"torch=={torch}", f"numba=={numba}", "pytest", "pytest-timeout", "hypothesis"]
        installed = subprocess.run(
            ["uv", "pip", "install", "-q", "-p", inside, *wanted, str(ROOT)],
            capture_output=True,
            text=True,
            check=False,
        )
        if installed.returncode != 0:
            print(installed.stderr)
            return why_not(installed.stderr)
        try:
            done = subprocess.run(
                command(inside, *QUICK),
                cwd=ROOT,
                # The package that was installed, not that of this tree.
                env=settings(os.environ, folder / "kernels", PYTHONPATH=""),
                capture_output=True,
                text=True,
                timeout=_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not over after {_LIMIT:.0f} s"
        print(done.stdout[-2000:])
        return PASSED if done.returncode == 0 else "failed"


def why_not(said: str) -> str:
    """In a few words, what uv says where it cannot install."""
    found = re.search(r"(torch|numba|llvmlite|numpy)\S* has no wheels", said)
    return f"no wheel of {found[1]}" if found else "cannot be installed"


def python_version(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--python", nargs="+", default=["python3"], help="interpreters")
    parser.add_argument("--torch", nargs="+", default=["2.13.0"])
    parser.add_argument("--numba", nargs="+", default=["0.68.1"], help="one of each column at most")
    parser.add_argument("--print", action="store_true", help="leave the page as it is")
    args = parser.parse_args(given)
    for python in args.python:
        for torch in args.torch:
            for numba in args.numba:
                row, result = Row(python_version(python), torch), attempt(python, torch, numba)
                print(f"Python {row.python}, torch {torch}, numba {numba}: {result}", flush=True)
                page = PAGE.read_text()
                table = read(page)
                cells = table.setdefault(row, dict.fromkeys(NUMBAS, NOT_TRIED))
                cells[minor(numba)] = f"{result} ({numba})" if result == PASSED else result
                if not args.print:
                    PAGE.write_text(page_with(table, page))


if __name__ == "__main__":
    main()
