"""GPUs and the links between them, as nvidia-smi tells. No machine with a GPU has run this yet."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import torch

from tokenyard.tools.doctor.findings import OK, WARN, Finding

PART = "GPUs"
_SECONDS = 20.0


def look() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        built = torch.version.cuda or torch.version.hip
        build = f"a build for GPUs ({built})" if built else "a CPU build"
        yield Finding(OK, PART, f"none was found: there is no nvidia-smi; torch is {build}")
        return
    names = _ask(tool, "--query-gpu=name,memory.total", "--format=csv,noheader")
    if not names:
        yield Finding(WARN, PART, "nvidia-smi finds no GPU", "docker run --gpus all; the driver")
        return
    yield Finding(OK, PART, f"{len(names)}: {'; '.join(names)}")
    if torch.version.cuda is None:
        yield Finding(WARN, PART, "torch is a CPU build", "install torch's CUDA build")
    if len(names) > 1:
        links = links_of(_ask(tool, "topo", "-m"))
        if any(link.startswith("NV") for link in links):
            yield Finding(OK, PART, f"links between GPUs: {', '.join(links)}")
        elif links:
            what = f"links between GPUs: {', '.join(links)}, no NVLink"
            yield Finding(WARN, PART, what, "NCCL_DEBUG=INFO shows the way that rows take")


def links_of(matrix: list[str]) -> list[str]:
    """The kinds of links in the matrix of `nvidia-smi topo -m`.

    >>> links_of(["     GPU0 GPU1 CPU Affinity", "GPU0  X NV12 0-31", "GPU1 NV12 X 0-31"])
    ['NV12']
    """
    num = sum(line.startswith("GPU") for line in matrix)
    cells = [line.split()[1 : 1 + num] for line in matrix if line.startswith("GPU")]
    return sorted({cell for row in cells for cell in row} - {"X"})


def _ask(*command: str) -> list[str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.splitlines()]
    return [line for line in lines if line] if done.returncode == 0 else []
