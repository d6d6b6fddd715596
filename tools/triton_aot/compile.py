"""Kernels compiled ahead of time, for devices that are not there, and what the compiler made.

The launchers are called as they always are, on tensors of a real model's sizes. A driver that only
knows its target stands in for the device's, and what Triton's JIT is about to compile (types,
alignment, constants) is compiled for that target, and not run.

    >>> made = compile_for("sm_90", only=["from_fp8 plain"])
    >>> [(one.kernel, one.case, one.spills) for one in made]
    [('_from_fp8_kernel', 'from_fp8 plain', 0)]
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime import driver

from tokenyard.runtime import memory
from tools.triton_aot.catalogue import cases

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. `text` is PTX, or AMD's assembly."""

    case: str
    kernel: str
    target: str
    text: str
    shared: int  # bytes of shared memory

    @cached_property
    def _used(self) -> tuple[int, int]:
        if self.target.startswith("sm_"):
            said = _ptxas(self.target, self.text)
            spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
            return int(re.findall(r"Used (\d+) registers", said)[0]), sum(map(int, spills))
        vector = re.findall(r"\.vgpr_count:\s+(\d+)", self.text)
        spills = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", self.text)
        return int(vector[0]), sum(map(int, spills))

    @property
    def registers(self) -> int:
        """Of a thread; on AMD the vector registers."""
        return self._used[0]

    @property
    def spills(self) -> int:
        """Bytes that ptxas spills, registers that AMD's compiler does."""
        return self._used[1]

    def widest(self, what: str) -> int:
        """Bytes of the widest "load" or "store" of global memory."""
        if self.target.startswith("sm_"):
            word = {"load": "ld", "store": "st"}[what]
            found = re.findall(rf"\b{word}\.global\S*?(?:\.v(\d))?\.b(\d+)\b", self.text)
            return max((int(n or 1) * int(bits) // 8 for n, bits in found), default=0)
        sizes = {"dwordx4": 16, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1}
        found = re.findall(rf"(?:global|buffer)_{what}_(\w+)", self.text)
        return max((sizes.get(one, 1) for one in found), default=0)


@cache
def _ptxas(arch: str, ptx: str) -> str:
    """What it says of a kernel, with the options that Triton gives it."""
    tool = get_ptxas(int(arch.removeprefix("sm_")))
    name = re.findall(r"^\.target\s+(\w+)", ptx, re.MULTILINE)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [
            tool.path,
            "-v",
            "--fmad=false",
            f"--gpu-name={name}",
            str(source),
            "-o",
            str(out),
        ]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stderr


class _Absent:
    """In place of the driver of a device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target)  # kernels are kept by device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _compiling(target: str, made: list[Compiled], case: list[str]) -> Iterator[None]:
    def compile_it(**said: Any) -> bool:
        kernel, how = said["fn"].jit_function, said["compile"]
        source = ASTSource(kernel, how["signature"], how["constants"], how["configs"][0])
        options = {name: how[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        out = triton.compile(source, target=TARGETS[target], options=options)
        text = out.asm["ptx" if target.startswith("sm_") else "amdgcn"]
        made.append(Compiled(case[0], kernel.__name__, target, text, out.metadata.shared))
        return True  # so that nothing is launched

    honest = memory.empty, knobs.runtime.jit_cache_hook
    present = driver._active  # reset_active() would look for a device
    memory.empty = torch.zeros  # counts that the host reads
    knobs.runtime.jit_cache_hook = compile_it
    driver.set_active(_Absent(TARGETS[target]))
    try:
        yield
    finally:
        memory.empty, knobs.runtime.jit_cache_hook = honest
        driver._active = present


def compile_for(target: str, only: Iterable[str] | None = None) -> list[Compiled]:
    """Every kernel with every dtype, or those of the cases that begin with these words."""
    made: list[Compiled] = []
    case = [""]
    words = ("",) if only is None else tuple(only)
    with _compiling(target, made, case):
        for name, call in cases():
            if name.startswith(words):
                case[0] = name
                call()
    return made
