"""Posts: how low-latency calls of ranks that share memory are told, fail and wait.

Every rank has a segment that all others map. It holds, for each kind of call (dispatch, combine)
and for even and odd calls: the post, the number of the last call that this rank has read, beside it
that of the last call which it was done with unread, and the failure of a call. It also holds a mask
for each other rank: whether this rank has left it out.

A rank that is left out may fall behind, so that others write over a block which it still reads.
Therefore the others set its mask before they write without waiting for it, and it looks at its mask
again after reading. A rank that finds itself left out leaves the other rank out too.

Ranks might make calls of the two modes in different orders. One would wait for a post, the other
for a message of the mailbox, both for ever. So a rank that waits also looks whether a rank it waits
for has gone past the call. It can tell, because all ranks must make the same calls in the same
order, and the user's thread writes the first word of each call (a post, a failure or a message) in
that order, even if the call is received much later:

- This rank had sent M messages, and K posts of the other kind, when it sent a post. A rank that has
  sent more than M messages, or more than K posts of the other kind, is past that call. Then its
  post of the call, or its failure, must be there; if neither is, the calls differ.
- This rank waits for a message, and has made K low-latency calls of some kind. A rank that has made
  more of them is past the message. Then its message must be there.

A rank reads these two words in this order, with acquire, so the second is never older than the
first. The counts are those of the moment at which this rank sent; the post keeps them, so hooks and
calls on the Buffer's thread may end as late as they like. When a third rank fails, some ranks have
posted and others have not. Its failure was written before their words, so a rank that finds a
difference looks for failures once more.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tokenyard.errors import TEXT_WORDS, error_to_words, rejected
from tokenyard.low_latency.handle import STAGE_OF
from tokenyard.shm.liveness import Stopped
from tokenyard.shm.mailbox import SignalKernels
from tokenyard.shm.node import SharedNode
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE
from tokenyard.wire.signals import MAIL
from tokenyard.wire.slots import POST_WORDS, TEXT

_POST = 8 * POST_WORDS
_READS = 4 * _POST  # the numbers of the calls that were read, after the four posts
_UNREAD = 8  # behind each: of the last that this rank was done with and had not read
_FAILURES = _READS + 4 * LINE
_FAILURE = LINE + 8 * TEXT_WORDS  # the call's number, and on the next line why
_MASKS = _FAILURES + 4 * _FAILURE
_MARKS = 9  # numbers of a rank: of its messages, of its four posts, of their four failures

# Called when another rank makes another call: with the stage, that rank, and the kind of its
# low-latency call or the message that it sent. It raises.
Differs = Callable[[str, int, int | np.ndarray], None]


def control_bytes(num_ranks: int) -> int:
    """Bytes of the segment in which a rank posts its calls."""
    return round_up(_MASKS + 8 * num_ranks, 4096)


class PostKernels(SignalKernels, Protocol):
    """Functions of `kernels.numba.low_latency.posts`, which says what they are given."""

    signal: Callable[[int, int], None]
    find_failure: Callable[..., int]
    find_ahead: Callable[..., int]


class Post(NamedTuple):
    """Where the words of one kind and of even or odd calls are. `arrays` keeps the tables alive."""

    place: int  # among the four: each kind of call has two, which its calls use in turn
    stage: str  # what its calls are called
    own: int  # this rank's post
    read: int  # this rank's number of the last call that it has read
    failure: int  # this rank's failure
    all_ranks: int  # [R] addresses: all ranks' posts
    reads: int  # [R] addresses: all ranks' numbers of calls read
    failures: int  # [R] addresses: all ranks' failures
    peers: int  # [R, 7]: each rank's post, and its segments as they are mapped here
    peers_R7: np.ndarray
    head: np.ndarray  # this rank's next post
    head_at: int
    arrays: tuple[np.ndarray, ...]


class Posts:
    def __init__(self, node: SharedNode, kernels: PostKernels, shrink: bool, stage: str) -> None:
        """Share memory for the posts of all ranks, which call this together."""
        self._node, self._kernels, self._shrink = node, kernels, shrink
        self._rank, self._size = node.rank, node.size
        node.liveness.shrinks = shrink
        controls = node.share(control_bytes(self._size), stage, "posts").tolist()
        self._posts = [self._post(controls, place) for place in range(4)]
        self._own_masks = controls[self._rank] + _MASKS
        self._flags_R = np.array([base + _MASKS + 8 * self._rank for base in controls], np.int64)
        self._masked_R = np.zeros(self._size, np.int64)
        # Addresses of [R]: of the masks by which others leave this rank out, and of words that say
        # which ranks this one has left out.
        self.flags = int(self._flags_R.ctypes.data)
        self.masked = int(self._masked_R.ctypes.data)
        self.owed = [0] * 4  # by post: a call that failed while an earlier one was unread
        self.mails = node.mailbox.epochs  # whose number of messages tells what came before a call
        self.made = [0, 0]  # by kind: the last call that was begun here
        # By post: how many messages, and how many calls of the other kind, came before it.
        self.before = [(0, 0)] * 4
        words_of = [
            words(node.mailbox.arrivals, self._size),
            *(post.arrays[0] for post in self._posts),
        ]
        words_of += [post.arrays[2] for post in self._posts]
        self._marks_RM = np.ascontiguousarray(np.stack(words_of, axis=1))
        self._nothing = np.zeros(1, np.int64)
        self._nothing_R = np.full(self._size, self._nothing.ctypes.data, np.int64)
        self._never = int(self._nothing_R.ctypes.data)  # [R] addresses of a word that stays 0
        self._differs: Differs | None = None
        node.mailbox.look = self._look_beyond_mail

    def __getitem__(self, place: int) -> Post:
        return self._posts[place]

    def of(self, kind: int, number: int) -> Post:
        """The post of a call, by its kind and number."""
        return self._posts[2 * kind + number % 2]

    def _post(self, controls: list[int], place: int) -> Post:
        posts = np.array([base + place * _POST for base in controls], np.int64)
        reads = np.array([base + _READS + place * LINE for base in controls], np.int64)
        failures = np.array([base + _FAILURES + place * _FAILURE for base in controls], np.int64)
        head = np.zeros(TEXT, np.int64)
        peers = np.array([(post, -1, 0, 0, -1, 0, 0) for post in posts], np.int64)
        return Post(
            place,
            STAGE_OF[place // 2],
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

    def watch(self, differs: Differs) -> None:
        """Let `differs` raise where another rank makes another call."""
        self._differs = differs

    def begin(self, kind: int, number: int) -> Post:
        """The post of a call which this rank is about to send."""
        self.made[kind], place = number, 2 * kind + number % 2
        self.before[place] = self.mails[MAIL], self.made[1 - kind]
        return self._posts[place]

    def left_out(self) -> list[int]:
        return np.flatnonzero(self._masked_R).tolist()

    def mask(self, rank: int, masked: bool) -> None:
        self._masked_R[rank] = masked
        self._kernels.signal(self._own_masks + 8 * rank, int(masked))

    def fail(self, kind: int, number: int, error: Exception, unread: bool) -> None:
        """Instead of sending: tell the others why there is nothing to receive.

        It never waits: ranks that wait for this one look for failures. `unread` says that the call
        failed because this rank has not yet read what was sent two calls ago.
        """
        post = self.of(kind, number)
        self.made[kind] = number
        words(post.failure + LINE, TEXT_WORDS)[:] = error_to_words(error)
        self._kernels.signal(post.failure, number)
        if unread:
            self.owed[post.place] = number
        else:
            self.done(post, number)

    def done(self, post: Post, number: int) -> None:
        """This rank will not read this call, or one that failed while it was unread."""
        last = max(number, self.owed[post.place])
        words(post.read + _UNREAD, 1)[0] = last
        self._kernels.signal(post.read, last)

    def wait_to_send(self, post: Post, number: int) -> None:
        self._wait(post, post.reads, number - 2, number)

    def wait_to_receive(self, post: Post, number: int) -> None:
        self._wait(post, post.all_ranks, number, number)

    def wait_until_read(self, place: int, named: int, post: Post, number: int) -> bool:
        """At the end of call `number`: wait until all ranks have read what call `named` has sent.

        It masks nobody, because the results of the call say already which ranks were masked. It
        returns False at once if a rank may be waiting for this one: this rank has a hook still to
        call, or another rank is past the call that ends here.
        """
        given_up, limits = set(self.left_out()), self._limits(post, number)
        reads = self._posts[place].reads

        def missing() -> list[int]:
            others = set(self._others()) - given_up
            return [rank for rank in sorted(others) if not self._has(reads, rank, named)]

        def step() -> int:
            left = len(missing())
            if left and (self._is_owing() or self._find_ahead(limits, self._never, 1) >= 0):
                return 0
            return left

        while True:
            stopped = self._node.liveness.who_stops(step, missing, post.stage, given_up)
            if stopped is None:
                return not missing()
            self._blame(stopped, post.stage)
            given_up.update(stopped.ranks)

    def was_received(self, place: int, named: int) -> bool:
        """Whether all ranks that were done with a call had read it, and mapped what it named."""
        reads = self._posts[place].arrays[1]
        return all(words(int(reads[rank]) + _UNREAD, 1)[0] < named for rank in self._others())

    def wait_to_leave(self, place: int, named: int, deadline: float) -> None:
        """Wait, before this rank closes its Buffer, until all ranks have read call `named`. It
        blames nobody, and does not wait for a call that this rank has not read itself.
        """
        post = self._posts[place]
        if words(post.read, 1)[0] < named:
            return
        while time.monotonic() < deadline:
            waiting = set(self._others()) - set(self.left_out()) - self._node.liveness.gone()
            if all(self._has(post.reads, rank, named) for rank in waiting):
                return
            time.sleep(1e-3)

    def _look(self, post: Post, number: int) -> None:
        """Raise if another rank has failed in this call: then it is over on this rank too."""
        rank = self._kernels.find_failure(
            post.failures, post.all_ranks, self.masked, self._size, number
        )
        if rank >= 0:
            self.done(post, number)
            failure = post.arrays[2][rank]
            raise rejected(rank, words(int(failure) + LINE, TEXT_WORDS), post.stage)

    def _is_owing(self) -> bool:
        """Whether this rank has sent a call that it has not received yet."""
        return any(words(post.own, 1)[0] > words(post.read, 1)[0] for post in self._posts)

    def _look_beyond(
        self, post: Post, limits: np.ndarray, signals: int, reach: int, number: int
    ) -> None:
        """Raise if a rank that this one waits for has gone past the call."""
        if self._differs is None:
            return
        found = self._find_ahead(limits, signals, reach, post.failures, number)
        if found >= 0:
            self._look(post, number)
            rank, mark = divmod(found, _MARKS)
            place = (mark - 1) % 4
            theirs = self._node.mailbox.next_message(rank) if mark == 0 else place // 2
            self._differs(post.stage, rank, theirs)

    def _look_beyond_mail(self, stage: str) -> None:
        if self._differs is None:
            return
        dispatches, combines = self.made
        made = [dispatches, dispatches, combines, combines]
        limits = np.array([self._node.mailbox.num_sent, *made, *made], np.int64)
        found = self._find_ahead(limits, self._node.mailbox.arrivals, self._node.mailbox.num_sent)
        if found >= 0:
            rank, mark = divmod(found, _MARKS)
            self._differs(stage, rank, (mark - 1) % 4 // 2)

    def _limits(self, post: Post, number: int) -> np.ndarray:
        """The largest numbers (see `_MARKS`) of a rank that is not past this call."""
        mails, others = self.before[post.place]
        own, other = [number] * 2, [others] * 2
        made = own + other if post.place < 2 else other + own
        return np.array([mails, *made, *made], np.int64)

    def _find_ahead(
        self, limits: np.ndarray, awaited: int, reach: int, failures: int = 0, number: int = 0
    ) -> int:
        return self._kernels.find_ahead(
            self._marks_RM, limits, self.masked, self._rank, awaited, reach, failures, number
        )

    def _wait(self, post: Post, signals: int, reach: int, number: int) -> None:
        """Wait until the signals of all others have reached `reach`. Ranks that stop are blamed, or
        left out where ranks may shrink.
        """
        limits, begin, last = self._limits(post, number), time.monotonic_ns(), self._rank

        def step() -> int:
            nonlocal last
            first = self._kernels.await_signals(
                signals, self._size, reach, 0, 20, self._rank, self.masked
            )
            if first < self._size:
                last = first
                self._look(post, number)
                self._look_beyond(post, limits, signals, reach, number)
            return self._size - first

        def missing() -> list[int]:
            return [rank for rank in self._others() if not self._has(signals, rank, reach)]

        self._go_on(step, missing, post.stage)
        if last != self._rank:
            self._node.mailbox.waits.note(last, begin)

    def _go_on(self, step: Callable[[], int], missing: Callable[[], list[int]], stage: str) -> None:
        while True:
            stopped = self._node.liveness.who_stops(step, missing, stage, self.left_out())
            if stopped is None:
                return
            self._blame(stopped, stage)
            for rank in stopped.ranks:
                self.mask(rank, True)

    def _blame(self, stopped: Stopped, stage: str) -> None:
        """Raise the error that names them, unless the others may go on without them."""
        if not self._shrink:
            raise self._node.liveness.blame(stopped, stage)

    def time_arrivals(self, post: Post, number: int, waits: Tensor) -> None:
        """Add to each rank's place the nanoseconds until its post was there."""
        begin, pending = time.perf_counter_ns(), set(self._others())
        limits = self._limits(post, number)
        # Written as words: torch refuses to write a tensor of inference mode outside of it.
        spent = words(waits.data_ptr(), self._size)

        def step() -> int:
            for rank in sorted(pending):
                if self._masked_R[rank] or self._has(post.all_ranks, rank, number):
                    spent[rank] += time.perf_counter_ns() - begin
                    pending.discard(rank)
            if pending:
                self._look(post, number)
                self._look_beyond(post, limits, post.all_ranks, number, number)
            return len(pending)

        self._go_on(step, lambda: sorted(pending), post.stage)

    def _others(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank and not self._masked_R[r]]

    def _has(self, signals: int, rank: int, number: int) -> bool:
        return self._kernels.await_signals(signals + 8 * rank, 1, number, 0, 1) == 1


def words(address: int, count: int) -> np.ndarray:
    """Words at an address, as an array."""
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))
