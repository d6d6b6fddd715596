"""What goes wrong on purpose, in the process of one rank: stalls, exceptions, errors, death.

The two tables are all that this fuzzer knows of the library's inside. A name that is no longer
there raises when it is looked up.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.fuzz.steps import Trouble
from tokenyard.errors import SharedMemoryError
from tokenyard.shm.pool import SegmentPool

_SHARED = ("direct", "ring", "hierarchical")  # transports on which ranks have a SharedNode
_GLOO = ("collective", "hierarchical")
_ALL = ("direct", "ring", "collective", "hierarchical")

# Where a stall, an exception or a death may come: the module, the name in it, and the transports
# whose calls pass there; "low" for those of the low-latency mode alone.
POINTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Agreement.meet": ("tokenyard.engine.agreement", "Agreement.meet", _ALL),
    "Mailbox.exchange": ("tokenyard.shm.mailbox", "Mailbox.exchange", _SHARED),
    "Mailbox.meet": ("tokenyard.shm.mailbox", "Mailbox.meet", ("direct", "hierarchical")),
    "memory": ("tokenyard.shm.attached", "AttachedSegments.memory", (*_SHARED, "low")),
    "attach": ("tokenyard.shm.attached", "attach", (*_SHARED, "low")),
    "Pool.take": ("tokenyard.shm.pool", "SegmentPool.take", ("direct", "hierarchical")),
    "Worker._do": ("tokenyard.runtime.events", "Worker._do", _ALL),
    "write_rows": ("tokenyard.kernels.numba", "write_rows", ("direct",)),
    "sum_rows": ("tokenyard.kernels.numba", "sum_rows", ("direct",)),
    "take_rows": ("tokenyard.kernels.numba", "take_rows", ("direct",)),
    "share_rows": ("tokenyard.kernels.numba", "share_rows", ("direct",)),
    "ring_dispatch": ("tokenyard.kernels.numba", "ring_dispatch", ("ring",)),
    "ring_combine": ("tokenyard.kernels.numba", "ring_combine", ("ring",)),
    "pack": ("tokenyard.kernels.numba", "pack", _GLOO),
    "Links.stream": ("tokenyard.transports.hierarchical.links", "Links.stream", ("hierarchical",)),
    "gloo": ("tokenyard.comm.watched", "Watched.start", _GLOO),
    "Slots.send": ("tokenyard.low_latency.shared", "SharedSlots._send", ("low",)),
    "Slots.enter": ("tokenyard.low_latency.shared", "SharedSlots._enter", ("low",)),
    "Slots.map": ("tokenyard.low_latency.shared", "SharedSlots._map", ("low",)),
    "Slots.move": ("tokenyard.low_latency.stepwise", "StepwiseSlots._move", _GLOO),
}

# System calls as the library makes them, and the module it makes them through.
_SYSTEM: dict[str, str] = {
    "memfd_create": "os",
    "posix_fallocate": "os",
    "open": "os",
    "pidfd_open": "os",
    "map_file": "tokenyard.shm.segment",
    "readlink": "os",
    "fcntl": "fcntl",
}
SYSTEM_CALLS = tuple(_SYSTEM)


class Interrupted(BaseException):
    """Out of a signal handler, as KeyboardInterrupt is."""


class Injected(RuntimeError):
    """On a thread that takes no signals."""


def points_of(transport: str, low_latency: bool) -> list[str]:
    shared = transport in ("direct", "ring")
    if low_latency:
        return [
            name
            for name, (*_, where) in POINTS.items()
            if ("low" in where if shared else name in ("gloo", "Slots.move", "Agreement.meet"))
        ]
    return [name for name, (*_, where) in POINTS.items() if transport in where]


class Arm:
    """A trouble that waits to be met."""

    _armed: ClassVar[dict[str, list[Arm]]] = {}  # by point
    _honest: ClassVar[dict[str, Any]] = {}  # what was there before

    def __init__(
        self, trouble: Trouble, act: Callable[[], None] | None = None, thread: int | None = None
    ) -> None:
        """Met by any thread, or by one: asynchronous calls before it pass the same points."""
        self.trouble, self.fired, self._thread = trouble, False, thread
        self._act = act or functools.partial(strike, trouble)
        self._passed, self._lock = 0, threading.Lock()
        others = Arm._armed.setdefault(trouble.what, [])
        if not others:
            _replace(trouble.what)
        others.append(self)

    def disarm(self) -> None:
        others = Arm._armed[self.trouble.what]
        if self in others:
            others.remove(self)
            if not others:
                holder, name = _find(self.trouble.what)
                setattr(holder, name, Arm._honest.pop(self.trouble.what))

    def meet(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            return
        with self._lock:
            self._passed += 1
            if self.fired or self._passed <= self.trouble.nth:
                return
            self.fired = True
        self._act()


def _find(point: str) -> tuple[Any, str]:
    """What holds the function of a point, and its name there."""
    module, path = (_SYSTEM[point], point) if point in _SYSTEM else POINTS[point][:2]
    *parents, name = path.split(".")
    holder = functools.reduce(getattr, parents, importlib.import_module(module))
    return holder, name


def _replace(point: str) -> None:
    """By a function that meets what is armed. Of system calls only the library's count."""
    holder, name = _find(point)
    real = Arm._honest[point] = getattr(holder, name)

    @functools.wraps(real, updated=())
    def instead(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if point not in _SYSTEM or caller.startswith("tokenyard."):
            for arm in list(Arm._armed[point]):
                arm.meet()
        return real(*args, **options)

    setattr(holder, name, instead)


def strike(trouble: Trouble) -> None:
    if trouble.kind in ("stall", "late"):
        time.sleep(trouble.number)
    elif trouble.kind == "stop":
        wake = f"sleep {trouble.number}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", wake]):
            os.kill(os.getpid(), signal.SIGSTOP)
    elif trouble.kind == "errno":
        raise OSError(int(trouble.number), os.strerror(int(trouble.number)))
    elif trouble.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif threading.current_thread() is threading.main_thread():
        raise Interrupted("a signal handler raises")
    else:
        raise Injected("a thread raises")


@contextmanager
def intruding(
    point: str, call: Callable[[], Any], said: list[BaseException | None]
) -> Iterator[None]:
    """When this thread passes the point, another one makes a call of its own, and is waited for."""

    def intrude() -> None:
        try:
            call()
            said.append(None)
        except BaseException as error:
            said.append(error)

    def act() -> None:
        thread = threading.Thread(target=intrude, name="fuzz-intruder")
        thread.start()
        thread.join(3)

    arm = Arm(Trouble(kind="thread", rank=0, what=point), act, threading.get_ident())
    try:
        yield
    finally:
        arm.disarm()


@dataclass
class Poor:
    """A process that gets no memory for rows that it shares."""

    fired: bool = False


@contextmanager
def without_memory(nth: int) -> Iterator[Poor]:
    """From the nth request on, also for what lies idle."""
    poor, counted = Poor(), 0
    pool: Any = SegmentPool
    take, shelf = pool.take, pool._from_shelf
    lock = threading.Lock()

    def refuse(self: Any, num_bytes: int) -> Any:
        nonlocal counted
        with lock:
            counted += 1
            if counted > nth:
                poor.fired = True
        if poor.fired:
            raise SharedMemoryError(f"{num_bytes} bytes of shared memory are needed (injected)")
        return take(self, num_bytes)

    pool.take, pool._from_shelf = refuse, lambda *_: None
    try:
        yield poor
    finally:
        pool.take, pool._from_shelf = take, shelf
