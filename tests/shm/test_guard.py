"""TOKENYARD_GUARD=1: who writes beside a result is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cases.clock import scaled

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no shared memory")

CALLS = """
import ctypes
import torch, tokenyard
from tokenyard.testing import run_virtual

def job(group):
    with tokenyard.Buffer(group, transport="direct", low_latency_mode=True) as buffer:
        ids = torch.tensor([[0, 1], [1, 0], [1, -1]])
        for n in range(4):
            x = torch.arange(3 * 25.0).view(3, 25) + n
            got = buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(3, 2), num_experts=2)
            y = buffer.combine(got.recv_x, got.handle).x
            assert torch.equal(y, x * torch.tensor([[2.0], [2.0], [1.0]])), y
            low = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
            back = buffer.low_latency_combine(low.recv_x, ids, torch.ones(3, 2), low.handle)
            assert torch.equal(back.combined_x, y)
        rows = buffer.get_next_combine_buffer(got.handle)
        return {"shared": rows, "summed": y, "low": back.combined_x}

results = run_virtual(job, 2).results[0]
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CALLS + code],
        env={**os.environ, "TOKENYARD_GUARD": "1", **environment},
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )


@pytest.mark.parametrize("name", ["shared", "summed", "low"])
def test_a_byte_behind_the_cache_line_of_a_result(name: str) -> None:
    """Rows of 100 bytes: the last cache line of three has 20 bytes to spare, of two 56."""
    code = (
        f"end = results[{name!r}].data_ptr() + results[{name!r}].nbytes\n"
        "print('well so far', flush=True)\n"
        "ctypes.memset((end + 63) // 64 * 64, 1, 1)"
    )
    done = run(code)
    assert (done.stdout, done.returncode) == ("well so far\n", -signal.SIGSEGV), done.stderr
    assert run(code, TOKENYARD_GUARD="0").stdout == "well so far\n"


def test_a_byte_between_a_result_and_its_cache_line() -> None:
    code = (
        "y = results.pop('summed')\n"
        "ctypes.memset(y.data_ptr() + y.nbytes, 1, 1)\n"
        "print('well so far', flush=True)\n"
        "del y"
    )
    done = run(code)
    assert (done.stdout, done.returncode) == ("well so far\n", -signal.SIGABRT), done.stderr
    assert "bytes beside a result were written to" in done.stderr
