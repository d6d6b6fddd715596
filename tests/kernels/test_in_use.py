"""`kernels.describe`: what computes, for which processor, and why."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from tests.cases.programs import run_python
from tokenyard import kernels
from tokenyard.kernels import base
from tokenyard.kernels.numba.llvm import machine


def test_tensors_on_the_cpu_are_for_numba() -> None:
    told = kernels.describe()
    assert (told.device, told.kernels, told.why) == (
        "cpu",
        "numba",
        "the fastest for tensors on cpu",
    )
    assert told.others["reference"] == "slower"
    assert told.threads == torch.get_num_threads()
    assert told.processor is not None
    assert told.processor.machine == platform.machine()
    assert told.versions["torch"] == torch.__version__
    text = str(told)
    assert text.startswith("kernels: numba, the fastest for tensors on cpu (")
    assert f"processor: {told.processor.name} ({platform.machine()})" in text
    assert f"threads: up to {told.threads} a call" in text


def test_other_devices_and_other_sets_say_why() -> None:
    told = kernels.describe("meta")
    assert (told.kernels, told.why) == ("reference", "no other knows tensors on meta")
    assert told.others["numba"] == "not for tensors on meta"
    assert (told.processor, told.folder) == (None, None)
    assert "processor" not in str(told)

    told = kernels.describe("cpu", "reference")
    assert (told.kernels, told.why, told.others["numba"]) == (
        "reference",
        "asked for",
        "not asked for",
    )
    with pytest.raises(ValueError, match="kernels is 'numba' for tensors on meta"):
        kernels.describe("meta", "numba")


def test_a_gpu_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "has_triton", lambda: False)
    assert base.choice("cuda") == ("reference", "triton is not installed")
    assert base.why_not("triton", "cuda") == "not installed"
    monkeypatch.setattr(base, "has_triton", lambda: True)
    assert base.choice("cuda") == ("triton", "the fastest for tensors on cuda")
    assert base.why_not("numba", "cuda") == "not for tensors on cuda"


X86 = "x86_64-unknown-linux-gnu"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM knows this machine's kind alone")
@pytest.mark.parametrize(
    "name, features, vector_bits, converts_float16",
    [
        ("generic", "", 128, False),
        ("nehalem", "", 128, False),
        ("haswell", "", 256, True),
        ("haswell", "-f16c", 256, False),
        ("znver3", "", 256, True),
        ("skylake-avx512", "", 512, True),
    ],
)
def test_a_processor_is_read_in_what_llvm_makes_of_it(
    name: str, features: str, vector_bits: int, converts_float16: bool
) -> None:
    """Nothing is run, so that the machine need not have these registers."""
    machine.processor()  # so that LLVM is ready
    found = machine.read(X86, name, features)
    assert (found.vector_bits, found.converts_float16) == (vector_bits, converts_float16)
    assert found.streams_by in ("movntps", "vmovntps", "movntdq", "vmovntdq")


TOLD = """
import json
from tokenyard import kernels
told = kernels.describe()
print(json.dumps([told.processor.name, told.processor.is_named, told.folder, told.folder_why]))
"""


def test_what_the_environment_says_is_told(tmp_path: Path) -> None:
    named = {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_CPU_NAME": "generic"}
    done = run_python("-c", TOLD, limit=120, **named)
    assert done.returncode == 0, done.stderr
    told = ["generic", True, str(tmp_path), "which NUMBA_CACHE_DIR names"]
    assert json.loads(done.stdout) == told
