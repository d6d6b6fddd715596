"""A few tests that soon say whether kernels and ranks work, for places where all would take long:
another processor, other versions. They need pytest, pytest-timeout and hypothesis.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Sums, casts and a transpose, rows of halves between two processes, and through rings.
QUICK = (
    "tests/kernels/test_kernels.py::test_reduce[numba-(0, 0, 0, 0, 0, 0)-512-torch.float16]",
    "tests/kernels/test_quantize.py::test_every_half[ascending-torch.float16-plain-numba]",
    "tests/kernels/test_rearrange.py::test_squares_are_written_around_the_cache",
    "tests/transports/test_conformance.py::test_processes[2-float16-odd-hidden-direct]",
    "tests/transports/test_conformance.py::test_processes[2-float16-odd-hidden-collective]",
)


def command(python: str, *tests: str) -> list[str]:
    """A run of these tests that leaves nothing in the tree but compiled Python."""
    return [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]


def settings(environment: Mapping[str, str], folder: Path, **more: str) -> dict[str, str]:
    """The environment of such a run: this one, with a folder of its own for kernels."""
    kept = {name: value for name, value in environment.items() if not name.startswith("NUMBA_")}
    return {
        **kept,
        "NUMBA_CACHE_DIR": str(folder),
        "TOKENYARD_PROGRESS": "0",
        **more,
    }
