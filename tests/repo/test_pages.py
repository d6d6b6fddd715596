"""The examples of the pages in docs/: every block of Python runs as it stands, in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))

pytestmark = pytest.mark.docs


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda p: p.stem)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    if page.stem == "transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_operation_has_a_page() -> None:
    assert {"align", "fp8", "low_latency", "permute", "rearrange"} <= {page.stem for page in PAGES}
    # The table of the last is what its own test writes, and nothing else.
    without = ("index", "gpu", "transformers_models")
    for page in PAGES:
        is_told = page.parent.name == "internals" or page.stem in without
        assert is_told or "assert" in "".join(blocks(page)), f"{page.name} asserts nothing"
