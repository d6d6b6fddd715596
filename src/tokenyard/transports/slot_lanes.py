"""The words of low-latency calls between ranks that share memory: posts, failures, masks.

Each rank has a control segment that all others map. For each kind of call and parity (a lane) it
has a post, a word that says which call this rank is done with, and why it failed if it did; and for
each rank a word that says whether that is left out here.

A rank that is left out may fall behind, and find a block written over: so its word is set before
anything is written without waiting for it, and looked at again after reading. Whoever finds itself
left out leaves the other out too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tokenyard.errors import TEXT_WORDS, rejected, text_to_words
from tokenyard.slots import POST_WORDS, TEXT
from tokenyard.transports.symmetric import LINE
from tokenyard.transports.team import SignalKernels, Stopped, Team
from tokenyard.types import round_up

_POST = 8 * POST_WORDS
_READS = 4 * _POST  # after the posts of both kinds and parities
_FAILURES = _READS + 4 * LINE
_FAILURE = LINE + 8 * TEXT_WORDS  # the call's number, and on the next line why
_MASKS = _FAILURES + 4 * _FAILURE


class LaneKernels(SignalKernels, Protocol):
    def signal(self, address: int, value: int) -> None: ...

    def find_failure(
        self, failures: int, posts: int, masked: int, size: int, number: int
    ) -> int: ...

    def await_slots(
        self, signals: int, masked: int, rank: int, size: int, number: int, patience: int
    ) -> int: ...


class Lane(NamedTuple):
    """The words of one kind and parity: addresses, and tables of them that `arrays` keeps."""

    place: int  # 2 * kind + parity
    post: int  # this rank's
    read: int  # this rank's word that it has read
    failure: int  # this rank's
    posts: int  # [R] all ranks'
    reads: int  # [R]
    failures: int  # [R]
    peers: int  # [R, 7], as the kernels want it
    peers_R7: np.ndarray
    head: np.ndarray  # this rank's next post
    head_at: int
    arrays: tuple[np.ndarray, ...]


class Lanes:
    def __init__(self, team: Team, kernels: LaneKernels, shrink: bool, stage: str) -> None:
        """All ranks together."""
        self._team, self._kernels, self._shrink = team, kernels, shrink
        self._rank, self._size = team.rank, team.size
        team.shrinks = shrink
        controls = team.share(round_up(_MASKS + 8 * self._size, 4096), stage).tolist()
        self._lanes = [self._lane(controls, place) for place in range(4)]
        self._own_masks = controls[self._rank] + _MASKS
        self._flags_R = np.array([base + _MASKS + 8 * self._rank for base in controls], np.int64)
        self._masked_R = np.zeros(self._size, np.int64)
        self.flags = int(self._flags_R.ctypes.data)  # [R] addresses: has that rank left this out?
        self.masked = int(self._masked_R.ctypes.data)  # [R] the address of: is that left out here?
        self._owed = [0] * 4  # by lane: a call that failed while an earlier one was unread

    def __getitem__(self, place: int) -> Lane:
        return self._lanes[place]

    def _lane(self, controls: list[int], place: int) -> Lane:
        posts = np.array([base + place * _POST for base in controls], np.int64)
        reads = np.array([base + _READS + place * LINE for base in controls], np.int64)
        failures = np.array([base + _FAILURES + place * _FAILURE for base in controls], np.int64)
        head = np.zeros(TEXT, np.int64)
        peers = np.array([(post, -1, 0, 0, -1, 0, 0) for post in posts], np.int64)
        return Lane(
            place,
            int(posts[self._rank]),
            int(reads[self._rank]),
            int(failures[self._rank]),
            int(posts.ctypes.data),
            int(reads.ctypes.data),
            int(failures.ctypes.data),
            int(peers.ctypes.data),
            peers,
            head,
            int(head.ctypes.data),
            (posts, reads, failures),
        )

    def left_out(self) -> list[int]:
        return np.flatnonzero(self._masked_R).tolist()

    def mask(self, rank: int, masked: bool) -> None:
        self._masked_R[rank] = masked
        self._kernels.signal(self._own_masks + 8 * rank, int(masked))

    def fail(self, kind: int, number: int, text: str, unread: bool) -> None:
        """Instead of sending: tell the others why there is nothing to receive.

        Never waits: who waits for this rank looks here. `unread` if the call failed because what
        was sent two calls ago has not been read here yet.
        """
        lane = self._lanes[2 * kind + number % 2]
        words(lane.failure + LINE, TEXT_WORDS)[:] = text_to_words(text)
        self._kernels.signal(lane.failure, number)
        if unread:
            self._owed[lane.place] = number
        else:
            self.done(lane, number)

    def done(self, lane: Lane, number: int) -> None:
        """Nothing more of this call will be read here."""
        self._kernels.signal(lane.read, max(number, self._owed[lane.place]))

    def pay(self, lane: Lane, number: int) -> None:
        """This call was read: so is one that failed because it was not."""
        if self._owed[lane.place] > number:
            self.done(lane, number)

    def wait_to_send(self, lane: Lane, number: int, stage: str) -> None:
        self._wait(lane.reads, number - 2, stage, partial(self._look, lane, number, stage))

    def wait_to_receive(self, lane: Lane, number: int, stage: str) -> None:
        self._wait(lane.posts, number, stage, partial(self._look, lane, number, stage))

    def wait_until_read(self, lane: Lane, number: int, stage: str) -> None:
        """Nobody is left out because of this: who is left out after a call is so in its result."""
        given_up = set(self.left_out())

        def missing() -> list[int]:
            others = set(self._others()) - given_up
            return [rank for rank in sorted(others) if not self._has(lane.reads, rank, number)]

        while True:
            stopped = self._team.who_stops(lambda: len(missing()), missing, stage, given_up)
            if stopped is None:
                return
            self._blame(stopped, stage)
            given_up.update(stopped.ranks)

    def _look(self, lane: Lane, number: int, stage: str) -> None:
        """If a rank has failed in this call it is over here, too."""
        rank = self._kernels.find_failure(
            lane.failures, lane.posts, self.masked, self._size, number
        )
        if rank >= 0:
            self.done(lane, number)
            failure = lane.arrays[2][rank]
            raise rejected(rank, words(int(failure) + LINE, TEXT_WORDS), stage)

    def _wait(self, signals: int, number: int, stage: str, look: Callable[[], None]) -> None:
        """Until the others' words have come so far; who does not come is left out, or blamed."""

        def step() -> int:
            first = self._kernels.await_slots(
                signals, self.masked, self._rank, self._size, number, 20
            )
            if first < self._size:
                look()
            return self._size - first

        def missing() -> list[int]:
            return [rank for rank in self._others() if not self._has(signals, rank, number)]

        self._go_on(step, missing, stage)

    def _go_on(self, step: Callable[[], int], missing: Callable[[], list[int]], stage: str) -> None:
        while True:
            stopped = self._team.who_stops(step, missing, stage, self.left_out())
            if stopped is None:
                return
            self._blame(stopped, stage)
            for rank in stopped.ranks:
                self.mask(rank, True)

    def _blame(self, stopped: Stopped, stage: str) -> None:
        """Unless the others may go on without them."""
        if not self._shrink:
            raise self._team.blame(stopped, stage)

    def time_arrivals(self, lane: Lane, number: int, waits: Tensor, stage: str) -> None:
        """Add to each rank's place the nanoseconds until its post was there."""
        begin, pending = time.perf_counter_ns(), set(self._others())
        spent = words(waits.data_ptr(), self._size)  # torch asks in which mode a tensor was made

        def step() -> int:
            for rank in sorted(pending):
                if self._masked_R[rank] or self._has(lane.posts, rank, number):
                    spent[rank] += time.perf_counter_ns() - begin
                    pending.discard(rank)
            if pending:
                self._look(lane, number, stage)
            return len(pending)

        self._go_on(step, lambda: sorted(pending), stage)

    def _others(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank and not self._masked_R[r]]

    def _has(self, signals: int, rank: int, number: int) -> bool:
        return self._kernels.await_signals(signals + 8 * rank, 1, number, 0, 1) == 1


def words(address: int, count: int) -> np.ndarray:
    """Words of any rank's control segment."""
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))
