"""Events, with DeepEP's names, and the thread on which calls go on after they have returned.

A call with async_finish=True agrees with the other ranks and takes memory for its results before it
returns. The Buffer's thread then moves the rows, one call after the other, and the call's event is
over when the results can be read. Without async_finish a call has ended when it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tokenyard.runtime.interrupts import stopping


class EventHandle:
    """Completion of an asynchronous call.

    Without a future it is, as in DeepEP, a moment of the current stream: all work that the stream
    has got so far. Where no GPU is in use, that work is complete. `StreamEvent` (a moment of a
    GPU's stream) and `RecvEvent` (a low-latency call that the Buffer's thread receives) answer the
    same two questions.
    """

    def __init__(self, future: Future[None] | None = None) -> None:
        self._future = future
        is_plain = future is None and type(self) is EventHandle
        self._moment = _record_current() if is_plain and torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        """Wait until the call has ended. If it failed, raise its error. For a moment of a stream
        the current stream waits, and the host does not.
        """
        if self._future is not None:
            self._future.result()
        if self._moment is not None:
            torch.cuda.current_stream().wait_event(self._moment)  # no GPU has run this

    def __reduce__(self) -> tuple[Any, ...]:
        """Wait: a copy is of a call that has ended."""
        self.current_stream_wait()
        return EventHandle, ()

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, well or not. Does not wait."""
        if self._moment is not None:
            return self._moment.query()
        return self._future is None or self._future.done()


def _record_current() -> Any:
    event = torch.cuda.Event()  # no GPU has run this
    event.record()  # no GPU has run this
    return event


class EventOverlap:
    """What calls return beside their results. `event` is None after a synchronous call.

    As a context manager it waits at the end of the block, which runs while the call goes on:

        with event:
            something_else()
        # here the call's results can be used
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[object, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors  # kept alive until the event is dropped

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, well or not; True after a synchronous one. Does not wait."""
        return self.event is None or self.event.is_over

    def current_stream_wait(self) -> None:
        """Wait until the call has ended, and raise its error if it failed. ValueError after a
        synchronous call, as in DeepEP.
        """
        if self.event is None:
            raise ValueError(
                "there is no event to wait for: the call was not made with async_finish"
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class Worker:
    """A thread that does pieces of work in order. It starts with the first of them.

    After a failure it does nothing more, since the other ranks are not where later work expects
    them: every later piece fails with the same error.
    """

    def __init__(
        self, name: str, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        """The thread calls `on_failure` with the first error. A worker that is closed drops it, so
        that its owner needs no garbage collector.
        """
        self._name, self._on_failure = name, on_failure
        self._thread: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None  # the last piece, until `drain` has seen it end
        self.failure: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> EventHandle:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        # Tensors that were made in inference mode can only be written to in that mode.
        self.pending = self._thread.submit(self._run, work, torch.is_inference_mode_enabled())
        return EventHandle(self.pending)

    def drain(self) -> None:
        """Wait until all work is done. Raises its error if some failed."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def wait(self) -> None:
        """Wait until all work so far has ended, well or not."""
        if self.pending is not None:
            with stopping(sys.exc_info()[1]):
                futures.wait([self.pending])

    def close(self) -> None:
        """Wait until all work has ended, well or not."""
        if self._thread is not None:
            with stopping(sys.exc_info()[1]):
                self._thread.shutdown()
        self._on_failure = None

    def close_then(self, last: Callable[[], None]) -> None:
        """Close without waiting. The thread calls `last` at its end; without one, this does."""

        def end() -> None:
            last()
            self._on_failure = None

        if self._thread is None:
            end()
            return
        self._thread.submit(end)
        self._thread.shutdown(wait=False)

    def _run(self, work: Callable[[], None], inference: bool) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            self._do(work, inference)
        except BaseException as error:
            self.failure = error
            if self._on_failure is not None:
                self._on_failure(error)
            raise

    def _do(self, work: Callable[[], None], inference: bool) -> None:
        with torch.inference_mode(inference):
            work()
