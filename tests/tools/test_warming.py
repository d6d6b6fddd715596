"""Kernels that were compiled ahead of time are all that calls need."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.package import cold
from tests.cases.programs import run_python
from tokenyard.tools.warming import KINDS

# How many kernels two ranks compile for a first call there and back.
CALLS = """
import sys
import torch
from numba.core import event
compiled = event.RecordingListener()
event.register("numba:compile", compiled)
import tokenyard
from tokenyard.testing import run_virtual

def job(group, dtype):
    x, weights = torch.ones(5, 40).to(dtype), torch.ones(5, 3)
    topk_idx = torch.tensor([[0, 3, 4]] * 5)
    with tokenyard.Buffer(group, transport=sys.argv[1]) as buffer:
        got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=7)
        buffer.combine(got.recv_x, got.handle)

run_virtual(job, 2, getattr(torch, sys.argv[2]))
print(len(compiled.buffer))
"""


def run(settings: dict[str, str], *command: str) -> str:
    done = run_python(*command, limit=280, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind",
    at_night(["collective", "direct", "ring"]),
)
def test_nothing_is_compiled_after_a_warm_up(tmp_path: Path, kind: str) -> None:
    settings = cold(tmp_path)
    said = run(settings, "-m", "tokenyard", "warm-up", "--kinds", kind, "--dtypes", "float32")
    assert "kernels are ready" in said
    assert run(settings, "-c", CALLS, kind, "float32") == "0\n"
    assert run(settings, "-c", CALLS, kind, "float16") != "0\n", "sums of another dtype"


def test_what_cannot_be_warmed_up_is_named() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.int8, want one that combine can sum"):
        tokenyard.warm_up([torch.int8])
    with pytest.raises(ValueError, match="kind is 'all', want one of direct, ring"):
        tokenyard.warm_up(kinds=["all"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_every_kind_of_every_dtype(kind: str, dtype: torch.dtype) -> None:
    tokenyard.warm_up([dtype], [kind])
    begin = time.monotonic()
    tokenyard.warm_up([dtype], [kind])  # nothing is left to compile
    assert time.monotonic() - begin < scaled(5)
