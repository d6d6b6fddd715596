"""A copy of the package, into which nothing was compiled yet.

Kernels in the package itself are found wherever new ones are kept, so a process is cold only with
such a copy.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import tokenyard

SOURCE = Path(tokenyard.__file__).parents[1]


def copy(folder: Path) -> Path:
    """What PYTHONPATH must name."""
    shutil.copytree(
        SOURCE / "tokenyard", folder / "tokenyard", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def cold(folder: Path) -> dict[str, str]:
    """Settings of a process that finds no kernel, and keeps those that it compiles in a folder."""
    kept = folder / "kernels"
    kept.mkdir(parents=True)
    return {"PYTHONPATH": str(copy(folder / "src")), "NUMBA_CACHE_DIR": str(kept)}
