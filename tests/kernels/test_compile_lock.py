"""Of processes that want one kernel, one compiles it; nobody waits for one that is stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.package import cold
from tokenyard.kernels.numba.compile_lock import turn

# Takes its turn, says so, and does not end by itself.
HOLD = """
import sys, time
from tokenyard.kernels.numba.compile_lock import turn
with turn(sys.argv[1], lambda: False):
    print("mine", flush=True)
    while True:
        time.sleep(100) if sys.argv[2] == "stuck" else sum(range(10_000))
"""
# How many functions this process compiled, for a kernel that calls others.
FIRST = """
from numba import int64
from numba.core import event
compiled = event.RecordingListener()
event.register("numba:compile", compiled)
from tokenyard.kernels.numba.signals import _post_kernel
_post_kernel.compile((int64[:, ::1], *[int64] * 7))
print(len(compiled.buffer) // 2)
"""
# Waits for a kernel that another process makes, until it has made one that it will want later.
MEANWHILE = """
import subprocess, sys, threading, time
from numba import int64
from tokenyard.kernels.numba import caching, signals
kernel, signature = signals._post_kernel, (int64[:, ::1], *[int64] * 7)
path = kernel._cache.entry(signature, kernel.targetctx).path + ".turn"
caching.expect((signals.raise_signal, (int64, int64)))
command = [sys.executable, "-c", sys.argv[1], path, "works"]
with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
    other.stdout.readline()
    def release():
        while not signals.raise_signal.overloads:
            time.sleep(0.01)
        print(len(kernel.overloads))
        other.kill()
    threading.Thread(target=release, daemon=True).start()
    kernel.compile(signature)
print(len(kernel.overloads))
"""


@contextmanager
def holder(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "mine\n"
            yield process
        finally:
            process.kill()


def seconds_for_a_turn(path: Path, kept: Path | None = None) -> float:
    begin = time.monotonic()
    with turn(str(path), lambda: kept is not None and kept.exists()):
        return time.monotonic() - begin


def test_a_turn_leaves_nothing(tmp_path: Path) -> None:
    with turn(str(tmp_path / "one.turn"), lambda: False):
        assert [path.name for path in tmp_path.iterdir()] == ["one.turn"]
    assert not list(tmp_path.iterdir())


def test_a_process_that_compiles_is_waited_for(tmp_path: Path) -> None:
    path, kept = tmp_path / "one.turn", tmp_path / "one"
    with holder(path, "works"):
        timer = threading.Timer(scaled(4.0), kept.touch)  # longer than one that is stuck
        timer.start()
        assert seconds_for_a_turn(path, kept) > scaled(4.0) - 0.5
        timer.join()


def test_a_turn_goes_on_when_its_process_dies(tmp_path: Path) -> None:
    path = tmp_path / "one.turn"
    with holder(path, "works") as process:
        timer = threading.Timer(scaled(0.5), process.kill)
        timer.start()
        assert seconds_for_a_turn(path) < scaled(5.0)
        timer.join()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", at_night(["stopped", "stuck"], gate=("stopped",)))
def test_nobody_waits_for_a_process_that_does_not_get_on(tmp_path: Path, how: str) -> None:
    path = tmp_path / "one.turn"
    with holder(path, how) as process:
        if how == "stopped":
            os.kill(process.pid, signal.SIGSTOP)
        assert seconds_for_a_turn(path) < scaled(6.0)
        # Nor does anybody try again.
        assert seconds_for_a_turn(path) < scaled(0.5)


def test_a_folder_that_cannot_be_written_makes_nobody_wait(tmp_path: Path) -> None:
    assert seconds_for_a_turn(tmp_path / "none" / "one.turn") < scaled(1.0)


@pytest.mark.timeout(300)
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    settings = os.environ | cold(tmp_path) | {"TOKENYARD_PROGRESS": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST], env=settings, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    numbers = [int(process.communicate(timeout=scaled(200))[0]) for process in processes]
    kept = [path for path in (tmp_path / "kernels").rglob("*") if path.is_file()]
    assert sum(numbers) == len(kept) > 2, "each kernel is compiled once, and kept"
    assert all(path.suffix == ".nbc" for path in kept), "no turn is left"


def test_who_waits_compiles_what_will_be_wanted(tmp_path: Path) -> None:
    surroundings = {**os.environ, **cold(tmp_path)}
    command = [sys.executable, "-c", MEANWHILE, HOLD]
    out = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["0", "1"]
