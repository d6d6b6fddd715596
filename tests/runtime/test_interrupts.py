"""Ctrl-C is neither lost nor obeyed too late, and its traceback is short."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests.cases.clock import scaled
from tests.cases.programs import run_python
from tokenyard.runtime import interrupts
from tokenyard.runtime.events import Worker
from tokenyard.runtime.threads import in_threads


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """A job in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _press(done: list[str], look: bool) -> None:
    with interrupts.deferred(), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("pressed")
        if look:
            interrupts.look()
        done.append("end")


@pytest.mark.parametrize(("look", "done"), [(False, ["pressed", "end"]), (True, ["pressed"])])
def test_deferred(look: bool, done: list[str]) -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _press(seen, look)
    assert seen == done
    with interrupts.deferred():
        interrupts.look()  # what was noted is over


def test_another_handler_is_asked() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert not heard
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def _compile_for_long(began: threading.Event, ended: list[str]) -> None:
    began.set()
    try:
        end = time.monotonic() + scaled(30)
        while time.monotonic() < end:
            interrupts.look()
            time.sleep(0.01)
    except KeyboardInterrupt:
        ended.append("told to")
        raise


@pytest.mark.timeout(60)
def test_a_worker_that_compiles_ends_with_the_program() -> None:
    began, ended = threading.Event(), list[str]()
    worker = Worker("tokenyard-test")
    worker.submit(lambda: _compile_for_long(began, ended))
    began.wait()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        worker.close()
    assert ended == ["told to"]
    interrupts.look()


@pytest.mark.timeout(60)
def test_threads_of_a_call_end_with_it() -> None:
    began, ended = threading.Event(), list[str]()

    def press() -> None:
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    presser, threads = threading.Thread(target=press), torch.get_num_threads()
    presser.start()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(lambda begin, end: _compile_for_long(began, ended), 2, 1 << 30)
    finally:
        torch.set_num_threads(threads)
        presser.join()
    assert ended


ENDED = """
import sys, threading, time
import tokenyard
from tokenyard.runtime import interrupts

group = tokenyard.local_group()
before = sys.excepthook  # torch's
tokenyard.Buffer(group).close()
assert sys.excepthook is before

def compile_for_long():
    for _ in range(60_000):
        interrupts.look()
        time.sleep(0.001)
    print("was not told")

threading.Thread(target=compile_for_long).start()
raise KeyboardInterrupt
"""


@pytest.mark.timeout(120)
def test_a_thread_that_compiles_ends_with_a_program_that_ctrl_c_has_ended() -> None:
    began = time.monotonic()
    done = run_python("-c", ENDED, limit=100)
    assert time.monotonic() - began < scaled(40)
    assert "was not told" not in done.stdout
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
