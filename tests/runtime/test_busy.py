"""A process that is busy with something long is heard of, until it is no more."""

from __future__ import annotations

import threading
import time

import pytest

from tests.cases.clock import scaled
from tokenyard.runtime import busy


class Heard:
    """Listens, and reports."""

    def __init__(self) -> None:
        self.beats, self.reports, self.ended = 0, 0, threading.Event()

    def listen(self) -> None:
        self.beats += 1

    def beat(self, seconds: float) -> None:
        assert seconds > 0
        self.reports += 1

    def end(self, seconds: float) -> None:
        self.ended.set()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    monkeypatch.setattr(busy, "_BEAT", 0.01)
    one = Heard()
    busy.listen(one.listen)
    return one


def wait_for_beats(heard: Heard, number: int) -> None:
    deadline = time.monotonic() + scaled(5)
    while heard.beats < number:
        assert time.monotonic() < deadline, "no beats"
        time.sleep(0.001)


def test_it_beats_while_busy(heard: Heard) -> None:
    assert not busy.is_busy()
    with busy.busy(heard):
        assert busy.is_busy()
        with busy.busy(heard):  # one thread for both
            wait_for_beats(heard, 3)
        wait_for_beats(heard, heard.beats + 3)
        assert not heard.ended.is_set()
    assert heard.ended.wait(scaled(5))
    assert not busy.is_busy()
    assert heard.reports >= 5
    before = heard.beats
    time.sleep(0.05)
    assert heard.beats == before


def test_blocks_of_two_threads_that_overlap(heard: Heard) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with busy.busy(heard):
            begun.set()
            go_on.wait(scaled(10))

    thread = threading.Thread(target=other)
    with busy.busy(heard):
        thread.start()
        assert begun.wait(scaled(5))
    wait_for_beats(heard, heard.beats + 3)  # of the other, which began in this one
    go_on.set()
    thread.join(scaled(5))
    assert heard.ended.wait(scaled(5))


def test_whoever_is_forgotten_or_gone_hears_nothing(heard: Heard) -> None:
    gone, forgotten = Heard(), Heard()
    busy.listen(gone.listen)
    busy.listen(forgotten.listen)
    del gone
    busy.forget(forgotten)
    with busy.busy(heard):
        wait_for_beats(heard, 3)
    assert forgotten.beats == 0
    assert heard.ended.wait(scaled(5))
