"""What computes on tensors of a device, and why: for people, logs and bug reports.

>>> from tokenyard import kernels
>>> kernels.describe("meta").kernels
'reference'
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenyard.kernels import base

if TYPE_CHECKING:
    from tokenyard.kernels.numba.llvm.machine import Processor


class InUse(NamedTuple):
    """The answer of `describe`; `str` of it is for people."""

    device: str
    kernels: str  # the name of the set
    why: str
    others: dict[str, str]  # why not the other sets, by name
    processor: Processor | None  # of compiled kernels for the CPU, else None
    threads: int  # that a call may take, on the CPU
    folder: str | None  # where compiled kernels are kept; None if nowhere, or if none are
    folder_why: str
    versions: dict[str, str]  # of torch, numba, llvmlite and triton, those that are installed

    def __str__(self) -> str:
        others = "; ".join(f"{name}: {why}" for name, why in self.others.items())
        lines = [f"kernels: {self.kernels}, {self.why} ({others})"]
        if self.processor is not None:
            found = self.processor
            by = "named by NUMBA_CPU_NAME" if found.is_named else "found on this machine"
            halves = "instructions" if found.converts_float16 else "integer arithmetic"
            past = f"past the cache by {found.streams_by}" if found.streams_by else "like others"
            lines += [
                f"processor: {found.name} ({found.machine}), {by}",
                f"    vectors of {found.vector_bits or 'unknown'} bits; float16 converted by "
                f"{halves}; long rows written {past}",
                f"compiled kernels: kept in {self.folder or 'no folder'}, {self.folder_why}",
            ]
        if self.device == "cpu":
            lines += [f"threads: up to {self.threads} a call, as torch.set_num_threads says"]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return "\n".join([*lines, f"versions: {versions}"])


def describe(device: torch.device | str = "cpu", kernels: str = "auto") -> InUse:
    """What computes on tensors of a device, if `kernels=` is given as here; raises ValueError if
    it cannot be.

    Compiles nothing that is kept, but loads the set, which takes a second.
    """
    device_type = torch.device(device).type
    base.pick(kernels, device_type)
    name, why = base.choice(device_type) if kernels == "auto" else (kernels, "asked for")
    processor, folder, folder_why = None, None, "nothing is compiled"
    if name == "numba":
        from tokenyard.kernels.numba.caching import folder_in_use
        from tokenyard.kernels.numba.llvm.machine import processor as find_processor

        processor = find_processor()
        folder, folder_why = folder_in_use()
    return InUse(
        device=device_type,
        kernels=name,
        why=why,
        others={one: base.why_not(one, device_type) for one in base.SETS if one != name},
        processor=processor,
        threads=torch.get_num_threads(),
        folder=folder,
        folder_why=folder_why,
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    for name in ("numba", "llvmlite", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
