"""Kernels compiled for ARM64 on any machine, by Numba itself: a program for a process of its own.

    python -m tests.cases.aarch64 read <folder> <kernel> ...     keep the code of kernels as text
    python -m tests.cases.aarch64 read-all <folder> <compiled>   the same of all signatures that
                                                                 were compiled for this machine
    python -m tests.cases.aarch64 keep-all <version> <compiled>  compile them, and leave them in the
                                                                 cache of a Python of that version

Numba asks llvmlite for the machine's triple, and kernels ask Python for its name: both are replaced
before either is imported. Nothing is executed, so that the code need not fit the machine. Set
NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding

ROOT = Path(__file__).parents[2]
TRIPLE = "aarch64-unknown-linux-gnu"
HALF = ":float16"  # after a name: with float16 where the table of signatures has bfloat16


@dataclass(frozen=True)
class Code:
    """A compiled kernel, with all functions that it calls."""

    symbol: str
    llvm: str
    assembly: str


def read(
    folder: Path, *names: str, compiled: Path | None = None, cpu: str = "generic", timeout: float
) -> dict[str, Code]:
    """The code of kernels by name, or of all that were compiled in a folder."""
    how = ["read", str(folder), *names] if compiled is None else ["read-all", str(folder), compiled]
    run(*how, NUMBA_CPU_NAME=cpu, NUMBA_CACHE_DIR=str(folder), timeout=timeout)
    return {path.stem: Code(*json.loads(path.read_text())) for path in folder.glob("*.json")}


def run(*arguments: str | Path, source: Path = ROOT / "src", timeout: float, **env: str) -> None:
    """Run this program, over the package in `source`."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, arguments)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(source),
            "NUMBA_CPU_FEATURES": "",
            "TOKENYARD_PROGRESS": "0",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _become_arm64() -> None:
    """From here on Numba compiles for ARM64."""
    assert "numba" not in sys.modules, "Numba has asked for the triple already"
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    target: Any = llvmlite.binding.Target
    target.from_default_triple = classmethod(lambda cls: cls.from_triple(TRIPLE))
    for name in ("get_process_triple", "get_default_triple"):
        setattr(llvmlite.binding, name, lambda: TRIPLE)
    platform.machine = lambda: "aarch64"


def _named(names: Sequence[str]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Of each: what it is called here, the kernel, and its signature."""
    from numba import types

    from tests.cases.kernel_code import BFLOAT16, SIGNATURES, functions

    known = functions()
    for name in names:
        kernel = name.removesuffix(HALF)
        half = types.int16[::1] if name.endswith(HALF) else BFLOAT16
        signature = tuple(half if one == BFLOAT16 else one for one in SIGNATURES[kernel])
        yield name, known[kernel], signature


def _recorded(compiled: Path) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """The same of all that Numba has kept in a folder."""
    from tests.cases.kernel_code import functions

    known = {(one.__module__, one.__qualname__): (name, one) for name, one in functions().items()}
    for number, path in enumerate(sorted(compiled.rglob("*.nbc"))):
        _, function, _, signature, *_ = pickle.loads(path.read_bytes())
        name, kernel = known[function.modname, function.qualname]
        yield f"{name}-{number}", kernel, signature.args


def main(how: str, where: str, *which: str) -> None:
    _become_arm64()
    if how == "keep-all":
        sys.version = where  # part of the name of what is kept
    for name, kernel, signature in _named(which) if how == "read" else _recorded(Path(*which)):
        kernel.compile(signature)
        if how != "keep-all":
            overload = kernel.overloads[signature]
            code = overload.library
            told = overload.fndesc.mangled_name, code.get_llvm_str(), code.get_asm_str()
            Path(where, f"{name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
