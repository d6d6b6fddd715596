"""What the compiler made of signals and streaming stores, read in its output. `test_fences` has the
order of the two."""

from __future__ import annotations

import platform
import re
import threading
from typing import Any

import numpy as np
import pytest
from numba import njit, types

from tokenyard.kernels.numba import signals
from tokenyard.kernels.numba.llvm.atomics import (
    fence_stores,
    load_acquire,
    store_release,
    stream_line,
)
from tokenyard.kernels.numba.rows import _scatter_kernel
from tokenyard.wire.columns import LINE

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
I64 = types.int64


def compiled(function: Any, *arguments: object) -> tuple[str, str]:
    """LLVM's code and the machine's."""
    kernel = njit(function)
    kernel.compile(arguments)
    return kernel.inspect_llvm(arguments), kernel.inspect_asm(arguments)


def test_loads_acquire_and_stores_release() -> None:
    llvm, _ = compiled(lambda a: load_acquire(a), I64)
    assert re.search(r"load atomic i64, .* acquire, align 8", llvm)
    llvm, _ = compiled(lambda a, v: store_release(a, v), I64, I64)
    assert re.search(r"store atomic i64 .* release, align 8", llvm)


@x86
def test_a_streamed_line_is_one_store_that_passes_the_cache_by() -> None:
    llvm, asm = compiled(lambda t, s: stream_line(t, s), I64, I64)
    assert re.search(r"store <8 x i64> .*align 64, !nontemporal", llvm)
    assert re.search(r"\bv?movnt(dq|ps|pd|i)\b", asm)


@x86
def test_a_fence_of_stores_is_one_instruction() -> None:
    assert "sfence" in compiled(lambda: fence_stores())[1]


@x86
def test_rows_are_scattered_by_streaming_stores() -> None:
    numbers = types.int64[::1]
    table = types.int64[:, ::1]
    _, asm = compiled(_scatter_kernel.py_func, table, *[numbers] * 4, *[I64] * 2, types.boolean)
    assert re.search(r"\bv?movnt(dq|ps|pd)\b", asm)


@pytest.mark.parametrize("shift", [0, 8, 64])
def test_a_streamed_line_arrives_whole(shift: int) -> None:
    source = np.arange(256, dtype=np.uint8)
    memory = np.zeros(256 + LINE, np.uint8)
    base = -memory.ctypes.data % LINE
    stream = njit(lambda t, s: stream_line(t, s))
    stream(memory.ctypes.data + base, source.ctypes.data + shift)
    assert memory[base : base + LINE].tolist() == source[shift : shift + LINE].tolist()
    assert memory[:base].sum() == memory[base + LINE :].sum() == 0


def test_waiting_ends_with_a_signal_or_with_patience() -> None:
    flags = np.zeros(16, np.int64)
    addresses = flags.ctypes.data + np.array([0, 64], np.int64)
    table = addresses.ctypes.data
    assert signals.await_signals(table, 2, 1, 0, 10) == 0
    flags[0] = 3
    assert signals.await_signals(table, 2, 1, 0, 10) == 1  # the first has come, the second not
    later = threading.Timer(0.05, signals.meet, (table, table, 2, 7, 10))
    later.start()
    while (first := signals.await_signals(table, 2, 7, 0, 1000)) < 2:
        assert first in (0, 1)
    assert flags[[0, 8]].tolist() == [7, 7]
    later.join()
