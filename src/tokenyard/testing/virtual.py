"""Virtual ranks: threads of this process, over the loopback communicator."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld, this_thread
from tokenyard.errors import PeerError
from tokenyard.testing.processes import not_ended


@dataclass(frozen=True)
class VirtualRun:
    """What run_virtual returns: what each rank returned, and the bytes that each sent to each."""

    results: list[Any]
    bytes_sent: dict[str, Tensor]  # by stage: [R, R] int64, from rank i to rank j


def run_virtual(
    job: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 60.0
) -> VirtualRun:
    """Call job(group, *args) on num_ranks virtual ranks. `Buffer(group)` takes the group as it is.

    If ranks fail, the error of the lowest failed rank is raised; errors that only report another
    rank (PeerError) come last. If ranks do not end in time, TimeoutError names them and shows where
    each one stands. Such a rank is stopped when it next waits for others; if it never does, its
    thread is left behind.
    """
    world = LoopbackWorld(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: dict[int, BaseException] = {}

    def body(group: LoopbackGroup) -> None:
        rank = group.rank()
        this_thread.seat = group.seat
        try:
            world.baton.begin()
            results[rank] = job(group, *args)
        except BaseException as error:
            errors[rank] = error
        finally:
            world.leave(rank)

    threads = [
        threading.Thread(target=body, args=(world.group(rank),), daemon=True, name=f"rank-{rank}")
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    failed = dict(errors)  # before the late ones are told
    late = {rank: _stack(one) for rank, one in enumerate(threads) if one.is_alive()}
    if late:
        world.end()
        # A thread that still runs when the interpreter ends may abort the process in torch.
        _let_end(threads, 0.2)
        atexit.register(_let_end, threads, 30.0)
    if failed:
        first = min(failed, key=lambda rank: (isinstance(failed[rank], PeerError), rank))
        error = failed[first]
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"(virtual rank {first} of {num_ranks})")
        raise error
    if late:
        raise not_ended(late, timeout, "virtual ")
    return VirtualRun(results, world.bytes_sent)


def _stack(of: threading.Thread) -> str:
    frame = sys._current_frames().get(of.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


def _let_end(threads: Sequence[threading.Thread], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
