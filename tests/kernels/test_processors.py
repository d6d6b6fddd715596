"""Kernels compiled for other processors of x86-64, down to the oldest: without F16C, without AVX2,
without and with AVX-512. They are run here, as far as this machine has their instructions.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from tests.cases.clock import scaled
from tests.cases.conformance import CASES
from tests.cases.quick import QUICK, ROOT, command, settings

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86-64"),
]

# What a machine must have to run code for a processor; its other features LLVM does not use here.
NEEDS = {
    "generic": (),
    "nehalem": ("sse4.2",),
    "haswell": ("avx2", "bmi2", "f16c", "fma"),
    "znver3": ("avx2", "bmi2", "f16c", "fma"),
    "skylake-avx512": ("avx2", "bmi2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl"),
}


def check(name: str, folder: Path, limit: float, *tests: str) -> None:
    here = llvm.get_host_cpu_features()
    missing = [feature for feature in NEEDS[name] if not here.get(feature)]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")
    done = subprocess.run(
        command(sys.executable, *tests),
        cwd=ROOT,
        env=settings(os.environ, folder, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=""),
        capture_output=True,
        text=True,
        timeout=scaled(limit),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generic", "haswell"])
def test_a_few_kernels_and_two_processes(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 250, *QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NEEDS)
def test_all_kernels_and_two_processes(name: str, tmp_path: Path) -> None:
    """All tests of kernels but those of the cache, which compile for processors of their own, and
    all conformance cases between two processes.
    """
    left_out = ["test_caching", "test_compile_lock", "test_processors"]
    left_out += ["test_triton", "test_triton_code"]
    files = [
        str(path.relative_to(ROOT))
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
        if path.stem not in left_out
    ]
    between_two = [
        f"tests/transports/test_conformance.py::test_processes[2-{case}-{transport}]"
        for case in CASES
        for transport in ("direct", "ring", "collective")
    ]
    check(name, tmp_path, 2500, "-m", "not slow and not triton", *files, *between_two)
