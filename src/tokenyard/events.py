"""Events, with DeepEP's names.

On CPU every call is done when it returns, so an event is always over; the classes are here for code
that chains calls by events, and for the asynchronous transports to come.
"""

from __future__ import annotations

from types import TracebackType


class EventHandle:
    """A moment that has passed: all work before it is done."""

    def current_stream_wait(self) -> None: ...


class EventOverlap:
    """What calls return beside their results. `event` is None after a synchronous call.

    As a context manager it waits at the end of the block, which may overlap with the call:

        with event:
            something_else()
        # here the call's results can be used
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[object, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors  # kept alive until the event is dropped

    def current_stream_wait(self) -> None:
        if self.event is None:
            raise ValueError(
                "there is no event to wait for: the call was not made with async_finish"
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
