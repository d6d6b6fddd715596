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
from tokenyard.errors import PeerDied, PeerLeft
from tokenyard.low_latency.handle import STAGE_OF, PendingCombine
from tokenyard.low_latency.mismatch import posts_differ
from tokenyard.low_latency.posts import Differs, Post, PostKernels, Posts, words
from tokenyard.shm.attached import Mapped
from tokenyard.shm.mailbox import YIELDS
from tokenyard.shm.node import SharedNode
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
    IDENTITY,
    NUMBER,
    POST_WORDS,
    ROWS_BEGIN,
    ROWS_FD,
    ROWS_IDENTITY,
    SIGNATURE,
    TERMS,
    SlotResults,
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
_ALWAYS_KEPT = 1 << 20  # bytes of a block
_PATIENT = 32  # calls

Call = Callable[[], int]  # a compiled call, which returns a verdict (see `wire.verdicts`)


class SlotKernels(PostKernels, Protocol):
    def dispatch_calls(self, shape: SlotShape, send: int, receive: int) -> tuple[Call, Call]: ...

    def combine_calls(self, dtype: torch.dtype, send: int, receive: int) -> tuple[Call, Call]: ...


class Halves(NamedTuple):
    """Compiled calls that send and receive, and the tables that tell them what (`call_table`)."""

    send: Call
    send_table: array[int]
    receive: Call
    receive_table: array[int]
    load: np.ndarray  # whose address is in that table


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
        """All ranks together."""
        self._statistics = statistics
        self._node, self._kernels, self._shrink = node, kernels, shrink
        self._rank, self._size = node.rank, node.size
        self.posts = Posts(node, kernels, shrink, stage)
        self.blocks: list[Segment | None] = [None] * 4
        self._arrays: list[np.ndarray | None] = [None] * 4  # of blocks, which are lent meanwhile
        self._too_large = [0] * 4  # by post: the calls in a row that needed far less than they had
        self.mapped: set[int] = set()  # segments of this rank that all others have mapped
        self._held: dict[tuple[int, int, int], Mapped] = {}  # of others, as `peers` knows them
        self.new: dict[int, tuple[int, set[int]]] = {}  # by post: a call that named others, which
        self.lent: list[Tensor | None] = [None] * 2  # rows that others read where they are
        # By post, shape, and the dtype of the rows of a combine.
        self._halves: dict[tuple[int, SlotShape, torch.dtype | None], Halves] = {}

    def send_dispatch(
        self, number: int, x: Tensor, topk_idx: Tensor, shape: SlotShape, sent: Tensor, stage: str
    ) -> int:
        """Lay tokens out and say so. -1, or the place of a bad pair, as `stage_slots` gives it."""
        self.posts.begin(DISPATCH, number)
        post = self.posts.of(DISPATCH, number)
        most, head = shape.block_bytes, post.head
        block = self._block(post, number, most, most, stage)
        if head[SIGNATURE] != shape.signature or head[IDENTITY] != block.identity:
            head[SIGNATURE], head[FD : IDENTITY + 1] = shape.signature, block.told
            head[TERMS : TERMS + len(shape.terms)] = shape.terms
        halves = self._calls(post, shape, None)
        table = halves.send_table
        table[at.NUMBER] = number
        table[at.NUM_TOKENS] = topk_idx.shape[0]
        table[at.TOPK_IDX] = topk_idx.data_ptr()
        table[at.SENT] = sent.data_ptr()
        table[at.X] = x.data_ptr()
        table[at.BLOCK] = block.address
        while code := halves.send():
            what, which = code >> 32, code & LOW
            if what == LATE:
                self.posts.wait_to_send(post, number, stage)
            else:
                assert what in (BAD, TWICE)
                return which if what == BAD else -2 - which
        self._note_new(post.place, number, {block.identity})
        return -1

    def receive_dispatch(
        self,
        number: int,
        shape: SlotShape,
        out: SlotResults,
        totals: Tensor | None,
        waits: Tensor | None,
        stage: str,
    ) -> None:
        post = self.posts.of(DISPATCH, number)
        if waits is not None:
            self.posts.time_arrivals(post, number, waits, stage)
        halves = self._calls(post, shape, None)
        table = halves.receive_table
        table[at.NUMBER] = number
        table[at.X] = out.x.data_ptr()
        table[at.SCALES] = 0 if out.scales is None else out.scales.data_ptr()
        table[at.COUNTS] = out.counts.data_ptr()
        table[at.SRC_INFO] = out.src_info.data_ptr()
        table[at.LAYOUT_RANGE] = out.layout_range.data_ptr()
        table[at.TOTALS] = 0 if totals is None else totals.data_ptr()
        while code := halves.receive():
            self._answer(code, post, number, stage)
        self._after_reading(post, number, stage)

    def send_combine(self, number: int, y: Tensor, back: PendingCombine, stage: str) -> int:
        """Lay rows out and say so. -1, or the place of a pair that dispatch did not send."""
        handle, shape = back.handle, back.handle.shape
        self.posts.begin(COMBINE, number)
        post, row_bytes = self.posts.of(COMBINE, number), shape.hidden * y.element_size()
        tables, room = self._size * shape.table_bytes, 0
        most = tables + self._size * shape.most_back * row_bytes
        given = self._node.pool.find(y.data_ptr(), y.nbytes) if back.zero_copy else None
        halves = self._calls(post, shape, y.dtype)
        table = halves.send_table
        table[at.NUMBER] = number
        table[at.HANDLE] = handle.number
        table[at.NUM_TOKENS] = back.topk_idx.shape[0]
        table[at.TOPK_IDX] = back.topk_idx.data_ptr()
        table[at.SENT] = handle.sent.data_ptr()
        table[at.PICKED] = back.picked.data_ptr()
        table[at.Y] = y.data_ptr()
        table[at.LAYOUT_RANGE] = handle.layout_range.data_ptr()
        table[at.COPIES_OWN] = back.own is None
        while True:
            block = self._block(post, number, tables + room * row_bytes, most, stage)
            self._head_combine(post, shape, block, tables, y, given)
            table[at.BLOCK] = block.address
            table[at.ROWS] = block.address + tables if given is None else 0
            table[at.ROOM] = (block.size - tables) // row_bytes
            code = halves.send()
            what, which = code >> 32, code & LOW
            if not code:
                self.lent[number % 2] = None if given is None else y
                self._note_new(post.place, number, {block.identity, (given or block).identity})
                return -1
            if what == LATE:
                self.posts.wait_to_send(post, number, stage)
            elif what == MORE_ROOM:  # twice what is needed now, so that it is asked for seldom
                room = min(2 * which, self._size * shape.most_back)
            else:
                assert what == BAD
                return which

    def _head_combine(
        self,
        post: Post,
        shape: SlotShape,
        block: Segment,
        tables: int,
        y: Tensor,
        given: Segment | None,
    ) -> None:
        head, code = post.head, ROW_DTYPES.index(y.dtype)
        signature = combine_signature(shape, y.dtype)
        own = block.identity
        if signature != head[SIGNATURE] or not own == head[IDENTITY] == head[ROWS_IDENTITY]:
            head[SIGNATURE], head[FD : IDENTITY + 1] = signature, block.told
            head[ROWS_FD : ROWS_BEGIN + 1] = *block.told, tables
            head[TERMS : TERMS + len(shape.terms)] = shape.terms
            head[TERMS + DTYPE_TERM] = code
        if given is not None:
            head[ROWS_FD : ROWS_BEGIN + 1] = *given.told, y.data_ptr() - given.address

    def receive_combine(
        self, number: int, back: PendingCombine, out: Tensor, waits: Tensor | None, stage: str
    ) -> None:
        handle, shape, post = back.handle, back.handle.shape, self.posts.of(COMBINE, number)
        if waits is not None:
            self.posts.time_arrivals(post, number, waits, stage)
        halves = self._calls(post, shape, back.dtype)
        table = halves.receive_table
        table[at.NUMBER] = number
        table[at.HANDLE] = handle.number
        table[at.NUM_TOKENS] = back.topk_idx.shape[0]
        table[at.TOPK_IDX] = back.topk_idx.data_ptr()
        table[at.PICKED] = back.picked.data_ptr()
        table[at.WEIGHTS] = back.weights.data_ptr()
        table[at.Y] = 0 if back.own is None else back.own.data_ptr()
        table[at.OUT] = out.data_ptr()
        while code := halves.receive():
            self._answer(code, post, number, stage)
        self._after_reading(post, number, stage)

    def watch(self, differs: Differs) -> None:
        self.posts.watch(differs)

    def travel(self, kind: int, number: int, stage: str) -> None:
        """Nothing to do: receivers read blocks where they are."""

    def combine_buffer(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        """[L, S, D] that others can read. The pool gives it out again once its combine was read."""
        slots = shape.num_local * shape.num_slots
        return self._node.pool.rows(slots, shape.hidden, dtype).view(shape.x_shape)

    def is_shared(self, y: Tensor) -> bool:
        return not y.numel() or self._node.pool.find(y.data_ptr(), y.nbytes) is not None

    def fail(self, kind: int, number: int, text: str, stage: str, unread: bool) -> None:
        self.posts.fail(kind, number, text, unread)

    def skip(self, kind: int, number: int) -> None:
        """Say that this rank will not receive this call."""
        self.posts.done(self.posts.of(kind, number), number)

    def left_out(self) -> list[int]:
        return self.posts.left_out()

    def mask(self, rank: int, masked: bool) -> None:
        self.posts.mask(rank, masked)

    def _answer(self, code: int, post: Post, number: int, stage: str) -> None:
        """Do what a call that could not go on needs, or raise what it met."""
        what, rank = code >> 32, code & LOW
        if what == LATE:
            self.posts.wait_to_receive(post, number, stage)
        elif what == MASKED and self._shrink:
            self.posts.mask(rank, True)
        elif what == MAP:
            self._map(post, rank, stage)
        elif what == DIFFERS or (what == LOST and self._shrink):
            theirs = words(int(post.peers_R7[rank, 0]), POST_WORDS).copy()
            mine = words(post.own, POST_WORDS)
            is_combine = post.place >= 2
            if is_combine != (theirs[HANDLE] > 0) or (theirs[NUMBER] - number) % 2:
                raise Stray(rank)
            error = posts_differ(stage, self._rank, mine, rank, theirs)
            self.posts.done(post, number)
            raise error
        else:  # without shrink no rank is masked or so far ahead: the word is wrong
            assert what in (STRAY, LOST, MASKED)
            raise Stray(rank)

    def _map(self, post: Post, rank: int, stage: str) -> None:
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
                    mapped = self._node.attached.memory(rank, told, stage)
                except (PeerDied, PeerLeft):
                    if not self._shrink:
                        raise
                    self.posts.mask(rank, True)
                    return
                if mapped.array.size != told[1]:  # an earlier call mapped it, in another size
                    raise Stray(rank)
                self._held[post.place, rank, to] = mapped
                known[to : to + 3] = told[-1], mapped.address, mapped.array.size

    def _note_new(self, place: int, number: int, named: set[int]) -> None:
        if not named <= self.mapped:
            self.new[place] = number, named

    def wait_to_leave(self, seconds: float) -> None:
        """Wait until all ranks have mapped what this rank named in calls that it has ended."""
        deadline = time.monotonic() + seconds
        for place, (named, _) in self.new.copy().items():  # the Buffer's thread may end a call
            self.posts.wait_to_leave(place, named, deadline)

    def _after_reading(self, post: Post, number: int, stage: str) -> None:
        """The first call that names a segment ends when all ranks have mapped it. Otherwise this
        rank could close its Buffer, or end, before a slow rank has mapped the segment. If another
        rank waits for this one meanwhile, a later call waits instead.
        """
        self.posts.pay(post, number)
        for place, (named, identities) in self.new.copy().items():
            if not self.posts.wait_until_read(place, named, post, number, stage):
                return
            self.new.pop(place, None)
            if len(self.mapped) >= _MANY:  # most of these segments are gone
                self.mapped &= {segment.identity for segment in self._node.pool}
            if self.posts.was_received(place, named):  # who dropped its hook has mapped nothing
                self.mapped |= identities

    def _block(self, post: Post, number: int, num_bytes: int, most: int, stage: str) -> Segment:
        """Memory for what this call sends: `num_bytes` now, at most `most` in calls of its sizes.

        A block that is too small, or was far too large for many calls, goes back to the pool. The
        pool may lend it at once, so all ranks must have read it before.
        """
        place = post.place
        block = self.blocks[place]
        if block is not None and num_bytes <= block.size:
            if block.size <= _ALWAYS_KEPT or block.size <= 4 * most:
                self._too_large[place] = 0
                return block
            self._too_large[place] += 1
            if self._too_large[place] < _PATIENT:
                return block
        self._too_large[place] = 0
        if block is not None:
            self.posts.wait_to_send(post, number, stage)
            is_larger = block.size > most
            block = self.blocks[place] = self._arrays[place] = None
            if is_larger:  # the pool trims itself only when it is asked for more
                self._node.pool.trim()
        block, self._arrays[place] = self._node.pool.take(num_bytes)
        self.blocks[place] = block
        return block

    def forget(self) -> None:
        """Make tables anew: shapes of before will hardly come again."""
        self._halves.clear()

    def _calls(self, post: Post, shape: SlotShape, dtype: torch.dtype | None) -> Halves:
        """The calls of a post: of a dispatch, or of a combine if the dtype of its rows is given.

        All that follows from the arguments is in their tables.
        """
        halves = self._halves.get((post.place, shape, dtype))
        if halves is None:
            halves = self._halves[post.place, shape, dtype] = self.make_calls(post, shape, dtype)
        return halves

    def make_calls(self, post: Post, shape: SlotShape, dtype: torch.dtype | None) -> Halves:
        send_table, receive_table = new_table(shape), new_table(shape)
        for table in (send_table, receive_table):
            table[at.PATIENCE], table[at.YIELDS] = self._node.mailbox.patience, YIELDS
            table[at.WAITS] = self._node.mailbox.waits.address
            table[at.MASKED] = self.posts.masked
            table[at.FLAGS] = self.posts.flags
            table[at.READS] = post.reads
            table[at.POSTS] = post.all_ranks
            table[at.READ] = post.read
            table[at.PEERS] = post.peers
            table[at.POST] = post.own
            table[at.HEAD] = post.head_at
            table[at.COUNTERS] = self._statistics.address(
                STAGE_OF[DISPATCH if dtype is None else COMBINE]
            )
            if dtype is not None:
                table[at.SIGNATURE] = combine_signature(shape, dtype)
                table[at.ROW_BYTES] = shape.hidden * dtype.itemsize
        load = self._statistics.load(shape.placement.num_experts, shape.num_local)
        receive_table[at.LOAD] = load.ctypes.data
        tables = int64s.address(send_table), int64s.address(receive_table)
        if dtype is None:
            send, receive = self._kernels.dispatch_calls(shape, *tables)
        else:
            send, receive = self._kernels.combine_calls(dtype, *tables)
        return Halves(send, send_table, receive, receive_table, load)


def combine_signature(shape: SlotShape, dtype: torch.dtype) -> int:
    return shape.signature ^ 2 + ROW_DTYPES.index(dtype)
