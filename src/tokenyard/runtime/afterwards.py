"""Work that finalizers leave to a thread.

The collector of cycles runs wherever memory is allocated, also while its thread holds a lock. So a
finalizer takes no lock and waits for nobody: it says what is to be done, and a thread does it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

_AT_END = 2.0  # seconds that the end of the process waits for what is left

# SimpleQueue.put may interrupt itself, as its documentation promises.
_work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
_pid = 0  # the process whose thread runs: a fork has none


def start() -> None:
    """Start the thread, before anything is left to it. Where no thread can be started, the system
    takes all back when the process ends.
    """
    global _pid, _work
    if _pid != os.getpid():
        _pid, _work = os.getpid(), queue.SimpleQueue()
        with suppress(RuntimeError):  # a limit on threads
            threading.Thread(target=_run, daemon=True, name="tokenyard-afterwards").start()


def leave(work: Callable[[], None]) -> None:
    """Do this soon, on another thread. What it raises is nobody's."""
    _work.put(work)


def _run() -> None:
    while True:
        work = _work.get()
        with suppress(Exception):
            work()
        del work  # and what it holds


@atexit.register
def _finish() -> None:
    if _pid == os.getpid():
        over = threading.Event()
        _work.put(over.set)
        over.wait(_AT_END)
