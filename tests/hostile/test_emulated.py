"""ARM64 on x86, by emulation: ranks and kernels give the bits of `spec`.

By hand, about an hour with the root to be made: pytest -m slow tests/hostile/test_emulated.py. With
TOKENYARD_ARM64_ROOT the root is made in that folder, and used again. Emulation shows what code
computes; it orders memory as x86 does, so `tests/kernels/test_aarch64.py` reads the order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import arm64_root
from tests.cases.aarch64 import ROOT
from tests.cases.clock import scaled
from tests.cases.emulated_ranks import KINDS
from tests.cases.package import cold

KERNELS = tuple(
    f"tests/kernels/test_{name}.py" for name in ("atomics", "ring", "low_latency", "quantize")
)
NOT_HERE = arm64_root.why_not()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(NOT_HERE is not None, reason=str(NOT_HERE)),
]

Native = dict[str, str]  # what each run printed on this machine


def ranks(num_ranks: int) -> list[str]:
    return ["-m", "tests.cases.emulated_ranks", str(num_ranks), *KINDS]


def kernels() -> list[str]:
    return ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *KERNELS]


RUNS = {"2 ranks": ranks(2), "4 ranks": ranks(4), "kernels": kernels()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("TOKENYARD_ARM64_ROOT")
    return Path(kept) if kept else tmp_path_factory.mktemp("arm64") / "root"


@pytest.fixture(scope="module")
def native(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Native:
    """Run all on this machine, and compile for ARM64 what it had to compile."""
    settings = cold(tmp_path_factory.mktemp("native"))
    arm64_root.make(folder)
    printed = {
        name: subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
            timeout=scaled(900),
            check=True,
        ).stdout
        for name, arguments in RUNS.items()
    }
    arm64_root.take_in(folder, Path(settings["NUMBA_CACHE_DIR"]))
    return printed


def cases(printed: str) -> list[str]:
    """What was equal, without its time."""
    return re.findall(r"^(\d ranks, .*: equal), ", printed, re.M)


@pytest.mark.parametrize("name", RUNS)
def test_emulated(name: str, native: Native, folder: Path) -> None:
    printed = arm64_root.run(folder, *RUNS[name], timeout=scaled(5000))
    print(printed)
    assert cases(printed) == cases(native[name])
    if name == "kernels":
        assert re.search(r"^\d+ passed", printed, re.M)
        assert "failed" not in printed
    else:
        assert len(cases(printed)) > len(KINDS)
