"""Lines that need a GPU to run are few, marked, and counted on the page about GPUs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "# no GPU has run this"


def test_marked_lines_are_counted_in_the_docs() -> None:
    marked = {}
    for path in (ROOT / "src" / "tokenyard").rglob("*.py"):
        count = path.read_text().count(MARK)
        if count:
            marked[path.relative_to(ROOT / "src" / "tokenyard").as_posix()] = count
    told = re.findall(
        r"^\| `([\w/]+\.py)` \| (\d+) \|", (ROOT / "docs" / "guide" / "gpu.md").read_text(), re.M
    )
    assert {name: int(count) for name, count in told} == marked
    assert sum(marked.values()) < 25


def test_lines_about_cuda_are_marked() -> None:
    """Those that call it; to ask for a tensor's device or name is no call."""
    for path in (ROOT / "src" / "tokenyard").rglob("*.py"):
        for line in path.read_text().splitlines():
            code = line.split("#")[0]
            if re.search(r"torch\.cuda\.\w+\(|pin_memory\(", code) and "is_initialized" not in code:
                assert MARK in line, f"{path.name}: {line.strip()}"
