"""Events of calls that have ended already, and moments of a stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenyard import Buffer, EventHandle, EventOverlap
from tokenyard.runtime.events import Worker


def test_event_of_a_synchronous_call_holds_nothing() -> None:
    with pytest.raises(ValueError, match="there is no event to wait for: the call was not made"):
        EventOverlap().current_stream_wait()
    with EventOverlap():
        pass


def test_event_waits_at_the_end_of_a_block() -> None:
    class Watched(EventHandle):
        waits = 0

        def current_stream_wait(self) -> None:
            self.waits += 1

    event = Watched()
    with EventOverlap(event):
        assert event.waits == 0
    assert event.waits == 1


class MockCuda:
    """Stands for torch.cuda: a stream that notes what it recorded and what it waits for."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def current_stream(self) -> MockCuda:
        return self

    def wait_event(self, event: Any) -> None:
        self.said.append(f"wait for {event.number}")

    def is_initialized(self) -> bool:
        return True

    def event(self) -> Any:
        cuda, number = self, sum(word.startswith("record") for word in self.said)

        class Event:
            def __init__(self) -> None:
                self.number = number

            def record(self) -> None:
                cuda.said.append(f"record {self.number}")

            def query(self) -> bool:
                return False

        return Event()


def test_an_event_captures_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepEP's EventHandle() does, which callers give as previous_event. With a mock of
    torch.cuda: no GPU has run this.
    """
    cuda = MockCuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", cuda.is_initialized)
    monkeypatch.setattr(torch.cuda, "Event", cuda.event)
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    first, second = EventOverlap(EventHandle()), Buffer.capture()
    assert cuda.said == ["record 0", "record 1"]
    assert not first.is_over
    second.current_stream_wait()
    first.current_stream_wait()
    assert cuda.said[2:] == ["wait for 1", "wait for 0"]
    worker = Worker("test")
    later = worker.submit(lambda: None)
    later.current_stream_wait()
    worker.close()
    assert later.is_over
    assert len(cuda.said) == 4  # an event of the Buffer's thread is none of the stream
