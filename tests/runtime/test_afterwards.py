"""Finalizers leave their work to a thread: whoever is interrupted by one waits for nobody."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tokenyard
from tests.cases.clock import scaled
from tokenyard.comm.loopback import LoopbackGroup, LoopbackWorld
from tokenyard.runtime import afterwards, busy


def test_work_is_done_on_another_thread_and_may_fail() -> None:
    threads: list[threading.Thread] = []
    done = threading.Event()

    def fail() -> None:
        raise ValueError("nobody hears of it")

    afterwards.start()
    afterwards.leave(fail)
    afterwards.leave(lambda: threads.append(threading.current_thread()))
    afterwards.leave(done.set)
    assert done.wait(scaled(20))
    assert threads[0] is not threading.current_thread()


class Silent:
    def beat(self, seconds: float) -> None: ...

    def end(self, seconds: float) -> None: ...


def make_garbage(is_async: bool) -> weakref.ref[tokenyard.Buffer]:
    """A Buffer that only the collector of cycles finds."""
    buffer = tokenyard.Buffer(LoopbackGroup(LoopbackWorld(1), 0))
    if is_async:
        got = buffer.dispatch(
            torch.zeros(1, 8),
            topk_idx=torch.zeros(1, 1, dtype=torch.int64),
            topk_weights=torch.ones(1, 1),
            num_experts=1,
            async_finish=True,
        )
        got.event.current_stream_wait()
    buffer.me = buffer  # type: ignore[attr-defined]
    return weakref.ref(buffer)


def hold_a_lock_of_ours() -> None:
    with busy.busy(Silent()):
        pass


@pytest.mark.timeout(120)
@pytest.mark.parametrize("which", ["ours", "that of concurrent.futures"])
def test_the_collector_may_run_while_a_lock_is_held(which: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        ways: dict[str, Callable[[], object]] = {
            "ours": hold_a_lock_of_ours,
            "that of concurrent.futures": lambda: pool.submit(int),
        }
        before, made = gc.get_threshold(), []
        gc.collect()
        try:
            for count in range(1, 60):  # allocations until the collector runs
                gc.disable()
                made.append(make_garbage(which != "ours"))
                gc.set_threshold(gc.get_count()[0] + count)
                gc.enable()
                ways[which]()
                gc.set_threshold(*before)
        finally:
            gc.enable()
            gc.set_threshold(*before)
            gc.collect()
    assert not [one for one in made if one() is not None]
