"""Events of calls that have ended already."""

from __future__ import annotations

import pytest

from tokenyard import EventHandle, EventOverlap


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
