"""float16 where the machine has no instructions for it, and sets that a device cannot use."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tokenyard.kernels import base

SUMS = """
import torch
from tokenyard import unpermute
bits = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(torch.float16)
every = bits[~bits.isnan()].view(2, -1)  # all values; not whole vectors
alone = torch.arange(len(every))[:, None]
assert torch.equal(unpermute(every, alone).view(torch.int16), (every + 0).view(torch.int16))
random = torch.randn(4, 4096, generator=torch.Generator().manual_seed(1))
wide = torch.cat([random, random * 1e-7, random * 3e4, random * 2**-24])
pairs = torch.arange(16).view(8, 2)
for factor in (1.0, 1e-3, 0.5):
    y = wide.half()
    weights = torch.full((8, 2), factor)
    want = torch.zeros(8, 4096)
    for k in range(2):
        want += y[pairs[:, k]].float() * factor
    got = unpermute(y, pairs, weights=weights)
    assert torch.equal(got.view(torch.int16), want.half().view(torch.int16))
assert unpermute(torch.full((1, 4), torch.nan).half(), alone[:1]).isnan().all()
print("equal")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of x86-64")
def test_sums_of_float16_need_no_instructions_for_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUMS],
        env={
            **os.environ,
            "NUMBA_CPU_NAME": "nehalem",
            "NUMBA_CPU_FEATURES": "",
            "NUMBA_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=scaled(250),
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_rearrange_takes_no_kernels_that_the_device_cannot_use() -> None:
    empty = torch.empty(0, 2, device="meta")
    with pytest.raises(ValueError, match="kernels is 'numba' for tensors on meta, want auto or"):
        tokenyard.rearrange(empty, empty.clone(), kernels="numba")


def test_triton_is_left_out_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SETS", ("triton", "numba", "reference"))
    monkeypatch.setattr(base, "interprets_triton", lambda: False)
    assert base.available.__wrapped__() == ("numba", "reference")
