"""The low-latency mode's exchange between ranks that share memory: one compiled call each way.

Blocks, and the rows of combines, lie in segments of the node's pool, which a post names, and which
are mapped when a post first names them. `posts.py` has the posts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.engine.statistics import Statistics
from tokenyard.errors import PeerDied, PeerLeft, PeerTimeout
from tokenyard.low_latency.handle import LowLatencyHandle, PendingCombine
from tokenyard.low_latency.mismatch import posts_differ
from tokenyard.low_latency.posts import Post, PostKernels, Posts, words
from tokenyard.low_latency.result_memory import Arrived
from tokenyard.shm.attached import Mapped
from tokenyard.shm.mailbox import YIELDS
from tokenyard.shm.node import SharedNode
from tokenyard.shm.pool import KEPT
from tokenyard.shm.segment import Segment
from tokenyard.types import ROW_DTYPES
from tokenyard.wire import call_table as at
from tokenyard.wire import int64s
from tokenyard.wire.call_table import new_table
from tokenyard.wire.slots import (
    COMBINE,
    DISPATCH,
    DTYPE_TERM,
    FD,
    HANDLE,
    NUMBER,
    POST_WORDS,
    ROWS_FD,
    SIGNATURE,
    TERMS,
    SlotShape,
    Stray,
)
from tokenyard.wire.verdicts import (
    BAD,
    DIFFERS,
    LATE,
    LOST,
    LOW,
    MAP,
    MASKED,
    MORE_ROOM,
    STRAY,
    TWICE,
)

_MANY = 16  # segments of a rank
_PATIENT = 32  # calls

Call = Callable[[], int]  # a compiled call, which returns a verdict (see `wire.verdicts`)


class SlotKernels(PostKernels, Protocol):
    def dispatch_calls(self, shape: SlotShape, table: int) -> tuple[Call, Call]: ...

    def combine_calls(self, dtype: torch.dtype, table: int) -> tuple[Call, Call]: ...


class Calls(NamedTuple):
    """The compiled calls of one post and shape, which send and receive, and what they are told."""

    send: Call
    receive: Call
    table: array[int]  # `wire.call_table`
    terms: tuple[int, ...]  # of the post
    most: int  # bytes of a block that these calls may need
    picked: array[int] | None  # of a combine: each pair's place among those of its expert
    load: np.ndarray


class SharedSlots:
    moves_alone = False
    travels = False

    def __init__(
        self,
        node: SharedNode,
        kernels: SlotKernels,
        shrink: bool,
        stage: str,
        statistics: Statistics,
    ) -> None:
        """Share memory for posts. All ranks call this together."""
        self._statistics = statistics
        self._node, self._kernels, self._shrink = node, kernels, shrink
        self._rank, self._size = node.rank, node.size
        self.posts = Posts(node, kernels, shrink, stage)
        self.blocks: list[Segment | None] = [None] * 4
        self._arrays: list[np.ndarray | None] = [None] * 4  # of blocks, which are lent meanwhile
        self._too_large = [0] * 4  # by post: the calls in a row that needed far less than they had
        self.mapped: set[int] = set()  # segments of this rank that all others have mapped
        self._held: dict[tuple[int, int, int], Mapped] = {}  # of others, as `peers` knows them
        self._new: dict[int, tuple[int, set[int]]] = {}  # by post: a call that named others, which
        self._lent: list[Tensor | None] = [None] * 2  # rows that others read where they are
        # By post, shape, and the dtype of the rows of a combine.
        self._calls: dict[tuple[int, SlotShape, torch.dtype | None], Calls] = {}
        self._sent: list[Calls | None] = [None] * 4  # by post: those that have sent, and receive
        self._said: list[Calls | None] = [None] * 4  # by post: those that its head tells of

    def send_dispatch(
        self,
        number: int,
        x: Tensor,
        topk_idx: Tensor,
        handle: LowLatencyHandle,
        out: Arrived,
        totals: Tensor | None,
    ) -> int:
        """Lay tokens out and say so. -1, or the place of a bad pair, as `stage_slots` gives it."""
        shape, post = handle.shape, self.posts.begin(DISPATCH, number)
        calls = self._find_calls(post, shape, None)
        block, table = self._block(post, number, shape.block_bytes, calls.most), calls.table
        if self._said[post.place] is not calls:
            self._say(post, calls, *block.told)
        table[at.NUMBER] = number
        table[at.NUM_TOKENS] = handle.num_tokens
        table[at.X], table[at.TOPK_IDX] = x.data_ptr(), topk_idx.data_ptr()
        table[at.LAYOUT_RANGE], table[at.SENT], table[at.SRC_INFO] = handle.addresses
        table[at.BLOCK] = block.address
        while code := calls.send():
            what, which = code >> 32, code & LOW
            if what == LATE:
                self.posts.wait_to_send(post, number)
            else:
                assert what in (BAD, TWICE)
                return which if what == BAD else -2 - which
        table[at.X] = out.x.data_ptr()
        table[at.SCALES] = 0 if out.scales is None else out.scales.data_ptr()
        table[at.COUNTS] = out.counts.data_ptr()
        table[at.TOTALS] = 0 if totals is None else totals.data_ptr()
        if block.identity not in self.mapped:
            self._new[post.place] = number, {block.identity}
        return -1

    def send_combine(self, number: int, y: Tensor, back: PendingCombine, out: Tensor) -> int:
        """Lay rows out and say so. -1, or the place of a pair that dispatch did not send."""
        handle, shape = back.handle, back.handle.shape
        post, room = self.posts.begin(COMBINE, number), 0
        calls = self._find_calls(post, shape, back.dtype)
        table, tables = calls.table, self._size * shape.table_bytes
        row_bytes = table[at.ROW_BYTES]
        given = self._node.pool.find(y.data_ptr(), y.nbytes) if back.zero_copy else None
        table[at.NUMBER] = number
        table[at.HANDLE], table[at.NUM_TOKENS] = handle.number, handle.num_tokens
        table[at.TOPK_IDX], table[at.WEIGHTS] = back.topk_idx.data_ptr(), back.weights.data_ptr()
        table[at.LAYOUT_RANGE], table[at.SENT], _ = handle.addresses
        table[at.Y], table[at.OUT] = y.data_ptr(), out.data_ptr()
        table[at.COPIES_OWN] = back.own is None
        while True:
            block = self._block(post, number, tables + room * row_bytes, calls.most)
            if given is not None:
                self._say(post, calls, *block.told, *given.told, y.data_ptr() - given.address)
                self._said[post.place] = None
            elif self._said[post.place] is not calls:
                self._say(post, calls, *block.told, *block.told, tables)
            table[at.BLOCK] = block.address
            table[at.ROWS] = block.address + tables if given is None else 0
            table[at.ROOM] = (block.size - tables) // row_bytes
            code = calls.send()
            what, which = code >> 32, code & LOW
            if not code:
                break
            if what == LATE:
                self.posts.wait_to_send(post, number)
            elif what == MORE_ROOM:  # twice what is needed now, so that it is asked for seldom
                room = min(2 * which, self._size * shape.most_back)
            else:
                assert what == BAD
                return which
        if back.own is None:
            table[at.Y] = 0
        self._lent[number % 2] = None if given is None else y
        named = {block.identity, (given or block).identity}
        if not named <= self.mapped:
            self._new[post.place] = number, named
        return -1

    def receive(self, kind: int, number: int, held: object, waits: Tensor | None) -> None:
        """The other half of a call. `held` keeps the memory that its table has addresses of."""
        post = self.posts.of(kind, number)
        if waits is not None:
            self.posts.time_arrivals(post, number, waits)
        calls = self._sent[post.place]
        assert calls is not None
        while code := calls.receive():
            self._answer(code, post, number)
        if self._new or self.posts.owed[post.place]:
            self._after_reading(post, number)

    def _find_calls(self, post: Post, shape: SlotShape, dtype: torch.dtype | None) -> Calls:
        """The compiled calls of a dispatch, or of a combine if the dtype of its rows is given."""
        calls = self._calls.get((post.place, shape, dtype))
        if calls is None:
            calls = self._calls[post.place, shape, dtype] = self._make_calls(post, shape, dtype)
        self._sent[post.place] = calls
        return calls

    def _say(self, post: Post, calls: Calls, *told: int) -> None:
        """Let the post say which calls these are, and where their block, and their rows, lie."""
        self._said[post.place], head = calls, post.head
        head[SIGNATURE], head[FD : FD + len(told)] = calls.table[at.SIGNATURE], told
        head[TERMS : TERMS + len(calls.terms)] = calls.terms

    def combine_buffer(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        """[L, S, D] that others can read. The pool gives it out again once its combine was read."""
        slots = shape.num_local * shape.num_slots
        return self._node.pool.rows(slots, shape.hidden, dtype).view(shape.x_shape)

    def is_shared(self, y: Tensor) -> bool:
        return not y.numel() or self._node.pool.find(y.data_ptr(), y.nbytes) is not None

    def fail(self, kind: int, number: int, error: Exception, unread: bool) -> None:
        self.posts.fail(kind, number, error, unread)

    def skip(self, kind: int, number: int) -> None:
        """Say that this rank will not receive this call."""
        self.posts.done(self.posts.of(kind, number), number)

    def left_out(self) -> list[int]:
        return self.posts.left_out()

    def mask(self, rank: int, masked: bool) -> None:
        self.posts.mask(rank, masked)

    def _answer(self, code: int, post: Post, number: int) -> None:
        """Do what a call that could not go on needs, or raise what it met."""
        what, rank = code >> 32, code & LOW
        if what == LATE:
            self.posts.wait_to_receive(post, number)
        elif what == MASKED and self._shrink:
            self.posts.mask(rank, True)
        elif what == MAP:
            self._map(post, rank)
        elif what == DIFFERS or (what == LOST and self._shrink):
            theirs = words(int(post.peers_R7[rank, 0]), POST_WORDS).copy()
            mine = words(post.own, POST_WORDS)
            is_combine = post.place >= 2
            if is_combine != (theirs[HANDLE] > 0) or (theirs[NUMBER] - number) % 2:
                raise Stray(rank)
            error = posts_differ(post.stage, self._rank, mine, rank, theirs)
            self.posts.done(post, number)
            raise error
        else:  # without shrink no rank is masked or so far ahead: the word is wrong
            assert what in (STRAY, LOST, MASKED)
            raise Stray(rank)

    def _map(self, post: Post, rank: int) -> None:
        known = post.peers_R7[rank]
        theirs = words(int(known[at.PEER_POST]), POST_WORDS)
        is_combine = post.place >= 2
        for fd, to in ((FD, at.PEER_BLOCK), (ROWS_FD, at.PEER_ROWS))[: 1 + is_combine]:
            told = theirs[fd : fd + 3].tolist()
            if rank == self._rank:  # this rank reads its own rows where it was given them
                block = self.blocks[post.place]
                assert block is not None
                known[to : to + 3] = told[-1], block.address, block.size
            else:
                try:
                    mapped = self._node.attached.memory(rank, told, post.stage)
                except (PeerDied, PeerLeft, PeerTimeout):
                    if not self._shrink:
                        raise
                    self.posts.mask(rank, True)
                    return
                if mapped.array.size != told[1]:  # an earlier call mapped it, in another size
                    raise Stray(rank)
                self._held[post.place, rank, to] = mapped
                known[to : to + 3] = told[-1], mapped.address, mapped.array.size

    def wait_to_leave(self, seconds: float) -> None:
        """Wait until all ranks have mapped what this rank named in calls that it has ended."""
        deadline = time.monotonic() + seconds
        for place, (named, _) in self._new.copy().items():  # the Buffer's thread may end a call
            self.posts.wait_to_leave(place, named, deadline)

    def _after_reading(self, post: Post, number: int) -> None:
        """The first call that names a segment ends when all ranks have mapped it. Otherwise this
        rank could close its Buffer, or end, before a slow rank has mapped the segment. If another
        rank waits for this one meanwhile, a later call waits instead.
        """
        if self.posts.owed[post.place] > number:  # a later call failed while this was unread
            self.posts.done(post, number)
        for place, (named, identities) in self._new.copy().items():
            if not self.posts.wait_until_read(place, named, post, number):
                return
            self._new.pop(place, None)
            if len(self.mapped) >= _MANY:  # most of these segments are gone
                self.mapped &= {segment.identity for segment in self._node.pool}
            if self.posts.was_received(place, named):  # who dropped its hook has mapped nothing
                self.mapped |= identities

    def _block(self, post: Post, number: int, num_bytes: int, most: int) -> Segment:
        """Memory for what this call sends: `num_bytes` now, at most `most` in calls of its sizes.

        A block that is too small, or was far too large for many calls, goes back to the pool. The
        pool may lend it at once, so all ranks must have read it before.
        """
        place = post.place
        block = self.blocks[place]
        if block is not None and num_bytes <= block.size:
            if block.size <= KEPT or block.size <= 4 * most:
                self._too_large[place] = 0
                return block
            self._too_large[place] += 1
            if self._too_large[place] < _PATIENT:
                return block
        self._too_large[place] = 0
        if block is not None:
            self.posts.wait_to_send(post, number)
            is_larger = block.size > most
            block = self.blocks[place] = self._arrays[place] = None
            if is_larger:  # the pool trims itself only when it is asked for more
                self._node.pool.trim()
        self._said[place] = None
        block, self._arrays[place] = self._node.pool.take(num_bytes)
        self.blocks[place] = block
        return block

    def forget(self) -> None:
        """Make tables anew: shapes of before will hardly come again."""
        self._calls.clear()

    def _make_calls(self, post: Post, shape: SlotShape, dtype: torch.dtype | None) -> Calls:
        """New calls whose table has all words that follow from the arguments."""
        table, terms, most, picked = new_table(shape), shape.terms, shape.block_bytes, None
        table[at.PATIENCE], table[at.YIELDS] = self._node.mailbox.patience, YIELDS
        table[at.WAITS] = self._node.mailbox.waits.address
        table[at.MASKED], table[at.FLAGS] = self.posts.masked, self.posts.flags
        table[at.POSTS], table[at.READS] = post.all_ranks, post.reads
        table[at.POST], table[at.READ] = post.own, post.read
        table[at.PEERS], table[at.HEAD] = post.peers, post.head_at
        table[at.COUNTERS] = self._statistics.address(post.stage)
        load = self._statistics.load(shape.placement)
        table[at.LOAD] = load.ctypes.data
        if dtype is None:
            send, receive = self._kernels.dispatch_calls(shape, int64s.address(table))
        else:
            code = ROW_DTYPES.index(dtype)
            terms = *terms[:DTYPE_TERM], code, *terms[DTYPE_TERM + 1 :]
            table[at.SIGNATURE] ^= 2 + code
            row_bytes = table[at.ROW_BYTES] = shape.hidden * dtype.itemsize
            most = self._size * (shape.table_bytes + shape.most_back * row_bytes)
            picked = int64s.new(shape.num_max * shape.num_topk)
            table[at.PICKED] = int64s.address(picked)
            send, receive = self._kernels.combine_calls(dtype, int64s.address(table))
        return Calls(send, receive, table, terms, most, picked, load)
