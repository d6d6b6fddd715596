"""Notes about failures in a group's store: whose they are, which count, and a lost store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases.clock import scaled
from tokenyard import PeerDied, PeerLeft, PeerTimeout
from tokenyard.comm import process_table
from tokenyard.comm.failure_board import FailureBoard, FailureNote, StoreLost
from tokenyard.comm.process_table import ProcessId, ProcessWatch, this_process
from tokenyard.comm.torch_dist import GlooPart


def board_of(store: dist.Store, rank: int, label: str) -> FailureBoard:
    board = FailureBoard(lambda: store, rank)
    board.label = label
    return board


def test_notes_are_those_of_one_buffer() -> None:
    store = dist.HashStore()
    first, other = board_of(store, 0, "7"), board_of(store, 0, "8")
    reader = board_of(store, 1, "7")
    other.post(PeerDied, (2,), {})
    assert reader.read(range(3)) == {}
    first.post(PeerLeft, (0,), {"rows": 3})
    (note,) = reader.read(range(3)).values()
    assert (note.kind, note.culprits, note.done) == (PeerLeft, (0,), {"rows": 3})
    assert first.read(range(3)) == {}  # its own are no news


def test_the_first_note_that_names_somebody_stays() -> None:
    store = dist.HashStore()
    author, reader = board_of(store, 0, "7"), board_of(store, 1, "7")
    for kind, culprits in [(PeerDied, ()), (PeerTimeout, (2,)), (PeerLeft, (0,))]:
        author.post(kind, culprits, {})
    note = reader.read([0])[0]
    assert (note.kind, note.culprits) == (PeerTimeout, (2,))


def test_who_left_after_an_exchange_is_not_missed_in_it() -> None:
    part = object.__new__(GlooPart)
    part.members, part.label = (0, 1, 2), "rows"
    left = {1: FailureNote(PeerLeft, (1,), time.monotonic(), {"rows": 4})}
    assert part._concern(left, 4) == {}
    assert part._concern(left, 5) == left
    assert part._concern(left, None) == {}  # an exchange of the user's
    assert part._concern({3: left[1]}, 5) == {}  # whom nobody waits for here
    died = {3: FailureNote(PeerDied, (5,), time.monotonic(), {"rows": 9})}
    assert part._concern(died, 4) == died


def test_a_lost_store_is_asked_once() -> None:
    asked = []

    def connect() -> dist.Store:
        asked.append(1)
        raise ConnectionRefusedError

    board = FailureBoard(connect, 0)
    for _ in range(2):
        with pytest.raises(StoreLost):
            board.post(PeerDied, (), {})
    assert asked == [1]


class SlowStore:
    """A mock of a store whose operations take so many seconds each."""

    seconds = 0.0

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        time.sleep(self.seconds)
        return all(key in self._kept for key in keys)

    def set(self, key: str, value: str) -> None:
        self._kept[key] = value.encode()

    def get(self, key: str) -> Any:
        return self._kept[key]


def test_a_store_that_was_slow_once_is_asked_again() -> None:
    store = SlowStore()
    store.seconds = 0.8
    board = board_of(store, 0, "7")  # type: ignore[arg-type]
    with pytest.raises(StoreLost):
        board.read([0, 1])
    with pytest.raises(StoreLost):
        board.read([0, 1])  # at once, while the first has not ended
    store.seconds = 0.0
    time.sleep(scaled(1))
    assert board.read([0, 1]) == {}


def test_many_ranks_may_take_longer_than_one_operation() -> None:
    store = SlowStore()
    author = board_of(store, 800, "7")  # type: ignore[arg-type]
    author.post(PeerDied, (3,), {})
    store.seconds = 0.001
    reader = board_of(store, 0, "7")  # type: ignore[arg-type]
    assert list(reader.read(range(1000))) == [800]


def test_a_note_is_taken_back_when_its_author_gets_on() -> None:
    store = dist.HashStore()
    author, reader = board_of(store, 0, "7"), board_of(store, 1, "7")
    author.post(PeerTimeout, (2,), {})
    assert list(reader.read([0])) == [0]
    author.withdraw()
    assert reader.read([0]) == {}
    author.post(PeerDied, (2,), {})
    author.withdraw()  # whoever died never comes back
    assert list(reader.read([0])) == [0]


def test_late_ranks_of_an_earlier_opening_are_not_news() -> None:
    store = dist.HashStore()
    author = FailureBoard(lambda: store, 0, opening=1)
    author.post(PeerTimeout, (1,), {})
    assert list(FailureBoard(lambda: store, 1, opening=1).read([0])) == [0]
    assert FailureBoard(lambda: store, 1, opening=2).read([0]) == {}


def test_who_is_busy_says_so_again_and_again() -> None:
    store = dist.HashStore()
    author, reader = board_of(store, 0, "7"), board_of(store, 1, "7")
    author.post_busy()  # long ago, for all that the reader knows
    assert not reader.is_busy()
    author.post_busy()
    assert reader.is_busy()
    assert not author.is_busy()
    reader.forget_busy()
    assert not reader.is_busy()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="there is no table of processes")
def test_processes_are_seen_to_die() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = this_process()
    with open(f"/proc/{child.pid}/stat") as file:
        begun = int(file.read().rsplit(")", 1)[1].split()[19])
    theirs = me._replace(pid=child.pid, begun=begun)
    elsewhere, hidden = ProcessId(me.table + 1, 1, 1), ProcessId(me.table, 1, -1)
    watch = ProcessWatch(0, [5, 5, 5, 5], [me, theirs, elsewhere, hidden])
    assert [watch.sees(rank) for rank in range(4)] == [True, True, False, False]
    assert watch.dead_ranks() == ()
    assert watch.neighbours(1) == [0, 1, 3]
    child.kill()
    deadline = time.monotonic() + scaled(30)
    while not watch.dead_ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.dead_ranks() == (1,)  # nobody has buried it yet
    child.communicate()
    assert watch.dead_ranks() == (1,)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="there is no table of processes")
def test_who_died_before_the_others_looked_is_dead() -> None:
    """A rank may die between telling its number, and the others' first look at it."""
    me = this_process()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    buried = me._replace(pid=child.pid)
    used_again = me._replace(begun=me.begun - 1)  # the number of another, earlier process
    watch = ProcessWatch(0, [5, 5, 5], [me, buried, used_again])
    assert watch.dead_ranks() == (1, 2)


def test_hidden_processes_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of hidepid, which hides the processes of other users: a signal still finds them."""
    me = this_process()
    monkeypatch.setattr(process_table, "open", no_such_file, raising=False)
    watch = ProcessWatch(0, [5, 5], [me, me._replace(begun=7)])
    assert not watch.sees(1)
    assert watch.dead_ranks() == ()


def no_such_file(path: str) -> None:
    raise FileNotFoundError(path)
