"""The low-latency mode's exchange between ranks that share memory: one compiled call each way.

Each rank has a control segment that all others map. For each kind of call and parity it has a post,
a word that says which call this rank is done with, and why it failed if it did; and for each rank a
word that says whether that is left out here. Blocks, and the rows of combines, lie in segments of
their own, which a post names, and which are mapped when a post first names them.

A rank that is left out may fall behind, and find a block written over: so its word is set before
anything is written without waiting for it, and looked at again after reading.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import (
    TEXT_WORDS,
    CallMismatch,
    PeerInputError,
    text_to_words,
    words_to_text,
)
from tokenyard.slots import (
    BAD,
    DTYPE_TERM,
    FD,
    LATE,
    MAP,
    MASKED,
    POST_WORDS,
    ROOM,
    ROWS_BEGIN,
    ROWS_FD,
    ROWS_SIZE,
    SIGNATURE,
    SIZE,
    TERMS,
    TEXT,
    TWICE,
    Back,
    Received,
    SlotShape,
    say_difference,
)
from tokenyard.transports.symmetric import LINE, Segment, rows
from tokenyard.transports.team import SignalKernels, Team
from tokenyard.types import ROW_DTYPES, round_up

DISPATCH, COMBINE = 0, 1
_LOW = (1 << 32) - 1
_POST = 8 * POST_WORDS
_READS = 4 * _POST  # after the posts of both kinds and parities
_FAILURES = _READS + 4 * LINE
_FAILURE = LINE + 8 * TEXT_WORDS  # the call's number, and on the next line why
_MASKS = _FAILURES + 4 * _FAILURE


class SlotKernels(SignalKernels, Protocol):
    def dispatch_calls(self, shape: SlotShape) -> tuple[Callable[..., int], Callable[..., int]]: ...

    def combine_calls(
        self, dtype: torch.dtype
    ) -> tuple[Callable[..., int], Callable[..., int]]: ...

    def signal(self, address: int, value: int) -> None: ...

    def find_failure(
        self, failures: int, posts: int, masked: int, size: int, number: int
    ) -> int: ...

    def await_slots(
        self, signals: int, masked: int, rank: int, size: int, number: int, patience: int
    ) -> int: ...


class _Lane(NamedTuple):
    """The posts of one kind and parity: addresses, and tables of them that `arrays` keeps."""

    post: int  # this rank's
    read: int  # this rank's word that it has read
    failure: int  # this rank's
    posts: int  # [R] all ranks'
    reads: int  # [R]
    failures: int  # [R]
    peers: int  # [R, 5], as the kernels want it
    peers_R5: np.ndarray
    head: np.ndarray  # this rank's next post
    arrays: tuple[np.ndarray, ...]


class SharedSlots:
    moves_alone = False

    def __init__(self, team: Team, kernels: SlotKernels, shrink: bool, stage: str) -> None:
        """All ranks together."""
        self._team, self._kernels, self._shrink = team, kernels, shrink
        self._rank, self._size = team.rank, team.size
        controls = team.share(round_up(_MASKS + 8 * self._size, 4096), stage).tolist()
        self._lanes = [self._lane(controls, place) for place in range(4)]
        self._own_masks = controls[self._rank] + _MASKS
        self._flags_R = np.array([base + _MASKS + 8 * self._rank for base in controls], np.int64)
        self._flags = int(self._flags_R.ctypes.data)
        self._masked_R = np.zeros(self._size, np.int64)
        self._masked = int(self._masked_R.ctypes.data)
        self._blocks: list[Segment | None] = [None] * 4
        self._mapped: set[int] = set()  # files of this rank that all others have mapped
        self._new = [(0, -1)] * 4  # by lane: the last call that named another, and which
        self._owed = [0] * 4  # by lane: a call that failed while an earlier one was unread
        self._lent: list[Tensor | None] = [None] * 2  # rows that others read where they are
        self._planned: dict[tuple[int, Any], tuple[Callable[..., int], Callable[..., int]]] = {}

    def _lane(self, controls: list[int], place: int) -> _Lane:
        posts = np.array([base + place * _POST for base in controls], np.int64)
        reads = np.array([base + _READS + place * LINE for base in controls], np.int64)
        failures = np.array([base + _FAILURES + place * _FAILURE for base in controls], np.int64)
        peers = np.array([(post, -1, 0, -1, 0) for post in posts], np.int64)
        return _Lane(
            int(posts[self._rank]),
            int(reads[self._rank]),
            int(failures[self._rank]),
            int(posts.ctypes.data),
            int(reads.ctypes.data),
            int(failures.ctypes.data),
            int(peers.ctypes.data),
            peers,
            np.zeros(TEXT, np.int64),
            (posts, reads, failures),
        )

    def send_dispatch(
        self, number: int, x: Tensor, topk_idx: Tensor, shape: SlotShape, sent: Tensor, stage: str
    ) -> int:
        """Lay tokens out and say so. -1, or the place of a bad pair, as `stage_slots` gives it."""
        place = number % 2
        lane, block = self._lanes[place], self._block(place, shape.block_bytes)
        head = lane.head
        if head[SIGNATURE] != shape.signature or head[FD] != block.fd:
            head[SIGNATURE], head[FD], head[SIZE] = shape.signature, block.fd, block.size
            head[TERMS : TERMS + len(shape.terms)] = shape.terms
        call = partial(
            self._calls(DISPATCH, shape)[0],
            lane.reads,
            self._masked,
            self._rank,
            self._size,
            number,
            self._team.patience,
            x.data_ptr(),
            topk_idx.data_ptr(),
            topk_idx.shape[0],
            shape.num_topk,
            shape.placement.num_experts,
            sent.data_ptr(),
            block.address,
            shape.rows_at,
            shape.row_bytes,
            shape.scales_at,
            shape.cast,
            int(head.ctypes.data),
            lane.post,
        )
        while code := call():
            what, which = code >> 32, code & _LOW
            if what == LATE:
                self._wait_to_send(lane, number, stage)
            else:
                assert what in (BAD, TWICE)
                return which if what == BAD else -2 - which
        self._note_new(place, number, block.fd)
        return -1

    def receive_dispatch(
        self,
        number: int,
        shape: SlotShape,
        out: Received,
        totals: Tensor | None,
        waits: Tensor | None,
        stage: str,
    ) -> None:
        lane = self._lanes[number % 2]
        if waits is not None:
            self._time_arrivals(lane, number, waits, stage)
        call = partial(
            self._calls(DISPATCH, shape)[1],
            lane.peers,
            self._masked,
            self._flags,
            self._rank,
            self._size,
            number,
            self._team.patience,
            shape.signature,
            shape.num_max,
            shape.num_topk,
            shape.placement.num_experts,
            shape.local_table,
            shape.num_local,
            shape.rows_at,
            shape.row_bytes,
            shape.scales_at,
            shape.scale_bytes,
            out.x.data_ptr(),
            0 if out.scales is None else out.scales.data_ptr(),
            out.counts.data_ptr(),
            out.src_info.data_ptr(),
            out.layout_range.data_ptr(),
            0 if totals is None else totals.data_ptr(),
            lane.read,
        )
        while code := call():
            self._answer(code, lane, number, stage)
        self._after_reading(number % 2, number, stage)

    def send_combine(self, number: int, y: Tensor, back: Back, stage: str) -> int:
        """Lay rows out and say so. -1, or the place of a pair that dispatch did not send."""
        handle, shape, place = back.handle, back.handle.shape, 2 + number % 2
        lane, row_bytes = self._lanes[place], shape.hidden * y.element_size()
        table_bytes, room = _table_bytes(shape), 0
        tables = self._size * table_bytes
        given = self._team.pool.find(y.data_ptr(), y.nbytes) if back.zero_copy else None
        while True:
            block = self._block(place, tables + room * row_bytes)
            self._head_combine(lane, shape, block, tables, y, given)
            code = self._calls(COMBINE, y.dtype)[0](
                lane.reads,
                self._masked,
                self._rank,
                self._size,
                number,
                self._team.patience,
                y.data_ptr(),
                shape.num_local,
                shape.num_slots,
                row_bytes,
                handle.layout_range.data_ptr(),
                back.own is None,
                block.address + tables if given is None else 0,
                (block.size - tables) // row_bytes,
                block.address,
                table_bytes,
                back.topk_idx.data_ptr(),
                handle.sent.data_ptr(),
                back.picked.data_ptr(),
                back.topk_idx.shape[0],
                shape.num_topk,
                int(lane.head.ctypes.data),
                lane.post,
                handle.number,
            )
            what, which = code >> 32, code & _LOW
            if not code:
                self._lent[number % 2] = None if given is None else y
                self._note_new(place, number, block.fd if given is None else given.fd)
                return -1
            if what == LATE:
                self._wait_to_send(lane, number, stage)
            elif what == ROOM:  # twice as much as is needed now, so that it is asked for seldom
                room = min(2 * which, self._size * shape.most_back)
            else:
                assert what == BAD
                return which

    def _head_combine(
        self,
        lane: _Lane,
        shape: SlotShape,
        block: Segment,
        tables: int,
        y: Tensor,
        given: Segment | None,
    ) -> None:
        head, code = lane.head, ROW_DTYPES.index(y.dtype)
        signature = _combine_signature(shape, y.dtype)
        if head[SIGNATURE] != signature or head[FD] != block.fd or head[ROWS_FD] != block.fd:
            head[SIGNATURE], head[FD], head[SIZE] = signature, block.fd, block.size
            head[ROWS_FD], head[ROWS_SIZE], head[ROWS_BEGIN] = block.fd, block.size, tables
            head[TERMS : TERMS + len(shape.terms)] = shape.terms
            head[TERMS + DTYPE_TERM] = code
        if given is not None:
            begin = y.data_ptr() - given.address
            head[ROWS_FD], head[ROWS_SIZE], head[ROWS_BEGIN] = given.fd, given.size, begin

    def receive_combine(
        self, number: int, back: Back, out: Tensor, waits: Tensor | None, stage: str
    ) -> None:
        handle, shape, lane = back.handle, back.handle.shape, self._lanes[2 + number % 2]
        if waits is not None:
            self._time_arrivals(lane, number, waits, stage)
        wide = np.float64 if back.dtype == torch.float64 else np.float32
        call = partial(
            self._calls(COMBINE, back.dtype)[1],
            lane.peers,
            self._masked,
            self._flags,
            self._rank,
            self._size,
            number,
            self._team.patience,
            _combine_signature(shape, back.dtype),
            handle.number,
            0 if back.own is None else back.own.data_ptr(),
            _table_bytes(shape),
            shape.placement.rank_of_expert.data_ptr(),
            shape.placement.local_of_expert.data_ptr(),
            shape.hidden * out.element_size(),
            back.topk_idx.data_ptr(),
            back.picked.data_ptr(),
            back.weights.data_ptr(),
            back.topk_idx.shape[0],
            shape.num_topk,
            shape.hidden,
            out.data_ptr(),
            lane.read,
            np.empty(shape.num_topk, wide),
        )
        while code := call():
            self._answer(code, lane, number, stage)
        self._after_reading(2 + number % 2, number, stage)

    def travel(self, kind: int, number: int, stage: str) -> None:
        """Nothing does: blocks are read where they are."""

    def combine_buffer(self, shape: SlotShape, dtype: torch.dtype) -> Tensor:
        """[L, S, D] that others can read. It is not given again before its combine was read."""
        slots = shape.num_local * shape.num_slots
        _, array = self._team.pool.take(slots * shape.hidden * dtype.itemsize)
        flat = rows(array, 0, slots, shape.hidden, dtype)
        return flat.view(shape.num_local, shape.num_slots, shape.hidden)

    def is_shared(self, y: Tensor) -> bool:
        return self._team.pool.find(y.data_ptr(), y.nbytes) is not None

    def fail(self, kind: int, number: int, text: str, stage: str, unread: bool) -> None:
        """Instead of sending: tell the others why there is nothing to receive.

        Never waits: who waits for this rank looks here. `unread` if the call failed because what
        was sent two calls ago has not been read here yet.
        """
        place = 2 * kind + number % 2
        lane = self._lanes[place]
        _words(lane.failure + LINE, TEXT_WORDS)[:] = text_to_words(text)
        self._kernels.signal(lane.failure, number)
        if unread:
            self._owed[place] = number
        else:
            self.skip(kind, number)

    def skip(self, kind: int, number: int) -> None:
        """Instead of receiving: nothing of this call will be read here."""
        place = 2 * kind + number % 2
        self._kernels.signal(self._lanes[place].read, max(number, self._owed[place]))

    @property
    def masked(self) -> list[bool]:
        return [bool(one) for one in self._masked_R]

    def mask(self, rank: int, masked: bool) -> None:
        self._masked_R[rank] = masked
        self._kernels.signal(self._own_masks + 8 * rank, int(masked))

    def _answer(self, code: int, lane: _Lane, number: int, stage: str) -> None:
        """Do what a call that could not go on needs, or raise what it met."""
        what, rank = code >> 32, code & _LOW
        if what == LATE:
            self._wait_to_receive(lane, number, stage)
        elif what == MASKED:
            self.mask(rank, True)
        elif what == MAP:
            self._map(lane, rank, stage)
        else:
            theirs = _words(int(lane.peers_R5[rank, 0]), POST_WORDS).copy()
            self._kernels.signal(lane.read, number)
            mine = _words(lane.post, POST_WORDS)
            raise CallMismatch(say_difference(stage, self._rank, mine, rank, theirs))

    def _map(self, lane: _Lane, rank: int, stage: str) -> None:
        known = lane.peers_R5[rank]
        post = _words(int(known[0]), POST_WORDS)
        for fd, size, at in ((FD, SIZE, 1), (ROWS_FD, ROWS_SIZE, 3)):
            if rank == self._rank:  # its rows are read where they were given
                block = self._blocks[self._lanes.index(lane)]
                assert block is not None
                known[at], known[at + 1] = post[fd], block.address
            elif post[size]:
                address = self._team.memory(rank, int(post[fd]), int(post[size]), stage)
                known[at], known[at + 1] = post[fd], address

    def _note_new(self, place: int, number: int, fd: int) -> None:
        if fd not in self._mapped:
            self._new[place] = number, fd

    def _after_reading(self, place: int, number: int, stage: str) -> None:
        """A call that was the first to name some memory ends when all have mapped it, lest this
        rank should close its Buffer, or end, before a slow one has done so.
        """
        if self._owed[place] > number:
            self._kernels.signal(self._lanes[place].read, self._owed[place])
        named, fd = self._new[place]
        if named == number:
            self._wait(self._lanes[place].reads, number, stage, lambda: None)
            self._mapped.add(fd)

    def _wait_to_send(self, lane: _Lane, number: int, stage: str) -> None:
        self._wait(lane.reads, number - 2, stage, partial(self._look, lane, number, stage))

    def _wait_to_receive(self, lane: _Lane, number: int, stage: str) -> None:
        self._wait(lane.posts, number, stage, partial(self._look, lane, number, stage))

    def _look(self, lane: _Lane, number: int, stage: str) -> None:
        """If a rank has failed in this call it is over here, too."""
        rank = self._kernels.find_failure(
            lane.failures, lane.posts, self._masked, self._size, number
        )
        if rank >= 0:
            self._kernels.signal(lane.read, number)
            failure = lane.arrays[2][rank]
            raise PeerInputError(
                f"rank {rank} rejected its input, so no rank went on: "
                f"{words_to_text(_words(int(failure) + LINE, TEXT_WORDS))}",
                rank=rank,
                stage=stage,
            )

    def _wait(self, signals: int, number: int, stage: str, look: Callable[[], None]) -> None:
        """Until the others' words have come so far; who does not come is left out, or blamed."""

        def step() -> int:
            first = self._kernels.await_slots(
                signals, self._masked, self._rank, self._size, number, 20
            )
            if first < self._size:
                look()
            return self._size - first

        def missing() -> list[int]:
            return [rank for rank in self._others() if not self._has(signals, rank, number)]

        self._go_on(step, missing, stage)

    def _go_on(self, step: Callable[[], int], missing: Callable[[], list[int]], stage: str) -> None:
        while True:
            given_up = np.flatnonzero(self._masked_R).tolist()
            dead, late = self._team.who_stops(step, missing, given_up)
            if not dead and not late:
                return
            if not self._shrink:
                raise self._team.died(dead, stage) if dead else self._team.timed_out(late, stage)
            for rank in dead or late:
                self.mask(rank, True)

    def _time_arrivals(self, lane: _Lane, number: int, waits: Tensor, stage: str) -> None:
        """Add to each rank's place the nanoseconds until its post was there."""
        begin, pending = time.perf_counter_ns(), set(self._others())

        def step() -> int:
            for rank in sorted(pending):
                if self._masked_R[rank] or self._has(lane.posts, rank, number):
                    waits[rank] += time.perf_counter_ns() - begin
                    pending.discard(rank)
            if pending:
                self._look(lane, number, stage)
            return len(pending)

        self._go_on(step, lambda: sorted(pending), stage)

    def _others(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank and not self._masked_R[r]]

    def _has(self, signals: int, rank: int, number: int) -> bool:
        return self._kernels.await_signals(signals + 8 * rank, 1, number, 0, 1) == 1

    def _block(self, place: int, num_bytes: int) -> Segment:
        """Who still reads an earlier one keeps it mapped."""
        block = self._blocks[place]
        if block is None or block.size < num_bytes:
            block = self._blocks[place] = self._team.keep(round_up(num_bytes, 4096))
        return block

    def _calls(self, kind: int, key: Any) -> tuple[Callable[..., int], Callable[..., int]]:
        if (kind, key) not in self._planned:
            plan = self._kernels.dispatch_calls if kind == DISPATCH else self._kernels.combine_calls
            self._planned[kind, key] = plan(key)
        return self._planned[kind, key]


def _table_bytes(shape: SlotShape) -> int:
    return round_up(8 * shape.placement.most_experts, LINE)


def _combine_signature(shape: SlotShape, dtype: torch.dtype) -> int:
    return shape.signature ^ 2 + ROW_DTYPES.index(dtype)


def _words(address: int, count: int) -> np.ndarray:
    """Words of any rank's control segment."""
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))
