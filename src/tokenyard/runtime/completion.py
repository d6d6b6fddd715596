"""How a call ends: at once, on the Buffer's thread, or when the user calls a hook.

Both modes say it with one `Completion`. A `RecvHook` is the second half of a low-latency call that
was left for later; a `RecvEvent` tells when the Buffer's thread has done that half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tokenyard.runtime.copies import Once
from tokenyard.runtime.events import EventHandle


class Completion(NamedTuple):
    """What the user asked for. Without any of it a call has ended when it returns."""

    async_finish: bool = False  # the call returns before its rows have moved; its event waits
    on_comm_stream: bool = False  # results are allocated there; the current stream is not awaited
    return_recv_hook: bool = False  # nothing is received before the user calls the hook
    waits: Any = None  # [R] int64, to which the nanoseconds spent waiting for each rank are added

    @property
    def is_later(self) -> bool:
        """Whether work is left when the call has returned."""
        return self.async_finish or self.return_recv_hook


AT_ONCE = Completion()


class RecvHook(Once):
    """The second half of a call. The first call of the hook does it; later ones do nothing, but
    raise what it met on the Buffer's thread, or in a call that needed its place.
    """

    def __init__(self, work: Callable[[], None], way: EventHandle | None = None) -> None:
        """`way` is over when the rows are here, where the Buffer's thread brings them."""
        self._work: Callable[[], None] | None = work
        self._way = way
        self.refused: Exception | None = None  # what `on_thread` kept for the user
        self.then: list[Callable[[], None]] = []  # done after the work

    @property
    def is_over(self) -> bool:
        return self._work is None

    def __call__(self) -> None:
        # Drop the work first, so that its results do not outlive the tensors that the user holds.
        work, self._work = self._work, None
        if work is not None:
            work()
            for do in self.then:
                do()
        elif self.refused is not None:
            raise self.refused

    def look(self) -> None:
        """Raise what the rows have met on their way: in a Buffer that is broken already, nobody
        else may have told the user yet.
        """
        if self._way is not None:
            self._way.current_stream_wait()

    def on_thread(self) -> None:
        """Do it before the user asks. What all ranks raise does not break the Buffer: the event,
        or the user's own call of the hook, raises it.
        """
        try:
            self()
        except Exception as error:
            if not getattr(error, "on_all_ranks", False):
                raise
            self.refused = error


class RecvEvent(EventHandle):
    """The event of a hook that the Buffer's thread calls."""

    def __init__(self, over: EventHandle, hook: RecvHook) -> None:
        super().__init__()
        self._over, self._hook = over, hook

    def current_stream_wait(self) -> None:
        self._over.current_stream_wait()
        if self._hook.refused is not None:
            raise self._hook.refused

    @property
    def is_over(self) -> bool:
        return self._over.is_over
