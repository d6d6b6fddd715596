"""Rings in memory that ranks of one machine share: rows pass through a fixed amount of it.

This file has the protocol. What a rank does with rows that arrive is in `dispatch` and `combine`.

**Memory.** Each rank owns a ring for every channel c and source rank s. That of rank r begins at
`bases[r] + (c * R + s) * ring_bytes`:

    line 0   tail: records ever written here, an int64 that s alone writes
    line 1   head: records ever taken from here, an int64 that r alone writes
    after    slots of slot_bytes, a multiple of 64: as many as fit, for the columns of this call

A record is one row: an int64, its number among all rows from s to r, and then the columns. Counters
begin at 0, only grow, and are never reset. Both sides know how many records passed before a call:
record i of a call is the one that makes `before + i + 1`, and lies in slot i % slots.

**Writing.** The source may write record i of a call when

    1  head >= before on *all* its rings of that rank: all records of earlier calls were taken;
    2  i < slots + head - before: what the slot held was taken.

It stores the record, which is never streamed, then the tail (release).

**Taking.** The owner may read record i of a call when tail (acquire) > before + i. It reads the
record, counts it, and stores the head (release), which the source loads (acquire). So a record is
whole when it is read, and was read when it is overwritten, though another call's slots lie
elsewhere.

**Which call a record belongs to** is not written down. In combine the owner knows how many records
come on each ring. In dispatch it knows how many come from each rank, but not on which channels; so
it takes records from a rank until that many have come. None of them belongs to a later call: by
rule 1 the source of such a record has seen the heads of all records of this call. The owner counts
a record before it stores the head, and reads the tail before it reads the counts of all its
threads; so it finds that all have come, and takes nothing.

**Nobody waits for ever.** A thread drives both sides of its channels and never waits inside a
kernel: it goes round, writes what there is room for, takes what has come, and returns after some
rounds in which nothing moved. (If threads waited for room, two ranks with full rings would wait for
each other.) A rank in an earlier call needs nothing of the ranks in a later one: these have sent
and taken all of the earlier call. So look at the ranks in the earliest call:

- Dispatch takes whatever has come. So heads reach tails, there is room, and tails grow until all is
  sent.
- Combine takes the rows of a channel's lowest unfinished token once they have come from all ranks
  that owe one. Rows come in the order of tokens, and those of lower tokens were taken. So on each
  of these rings the next record is this token's, or the ring is empty: then there is room, and the
  source, which waits for no other ring, writes it. So this token is finished, and then the next.

tests/models/ring.pml is a model of this, with what goes wrong if a rule is broken.

What a rank knows of its rings to and from one peer on one channel is a *lane*: eight words that one
thread writes, and that live as long as the rings. A kernel can return at any time and be entered
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenyard.kernels.base import Tensors
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import load_acquire, store_release
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, copy_bytes, pointer
from tokenyard.kernels.numba.rows import copy_row, may_stream
from tokenyard.types import round_up
from tokenyard.wire.columns import LINE, row_widths
from tokenyard.wire.rings import RingUse

_TAIL, _HEAD, _SLOTS = 0, LINE, 2 * LINE  # places in a ring

# The words of a lane. Of the records to the peer: ever sent, sent before this call, ever taken as
# last seen; the place of the call's first row in the list of rows, and how many there are. Of the
# records from the peer: ever taken, taken before this call, ever written as last seen.
_SENT, _SENT_BEFORE, _HEAD_SEEN, _FIRST, _COUNT, _TAKEN, _TAKEN_BEFORE, _TAIL_SEEN = range(8)

# The words of a column: its width, whether it is streamed to OUT, and where it lies in ROWS, a SLOT
# and OUT: at base + at * step, `at` being a row's number or a slot's address.
_WIDTH, _STREAMS, _BASE, _STEP = range(4)
ROWS, SLOT, OUT = 0, 2, 4
_COLUMN_WORDS = 8


@dataclass(frozen=True, eq=False)
class Rings:
    """What one rank knows of all rings, for the life of a Buffer."""

    rank: int
    bases_R: np.ndarray  # int64: the address of each rank's rings
    nodes_R: np.ndarray  # int32: the node of each rank
    ring_bytes: int
    lanes_RC: np.ndarray  # [R, C, 8] int64

    @property
    def moved(self) -> int:
        """Records sent and taken so far."""
        return int(self.lanes_RC[:, :, [_SENT, _TAKEN]].sum())


def make_rings(
    rank: int, bases_R: np.ndarray, node_of_rank: Sequence[int], ring_bytes: int, num_channels: int
) -> Rings:
    """Rank r's rings, C * R * ring_bytes of zeros, begin at bases_R[r]; 64 divides both."""
    lanes_RC = np.zeros((len(bases_R), num_channels, LINE // 8), np.int64)
    return Rings(rank, bases_R, np.array(node_of_rank, np.int32), ring_bytes, lanes_RC)


def ring_slots(ring_bytes: int, widths: Sequence[int]) -> int:
    """How many rows of columns of so many bytes fit a ring; there must be room for one."""
    return (ring_bytes - _SLOTS) // _record(tuple(widths))[1]


def ring_bytes(slots: int, widths: Sequence[int]) -> int:
    """How large a ring is that holds so many."""
    return _SLOTS + slots * _record(tuple(widths))[1]


@cache
def _record(widths: tuple[int, ...]) -> tuple[list[int], int]:
    """Where columns lie in a record, and its size: narrow ones beside the number, then lines.

    >>> _record((14336, 4, 64, 32))
    ([64, 8, 14400, 16], 14464)
    """
    offsets, end = [0] * len(widths), 8
    for unit in (8, LINE):
        end = round_up(end, unit)
        for place, width in enumerate(widths):
            if (width < LINE) == (unit < LINE):
                offsets[place], end = end, end + round_up(width, unit)
    return offsets, round_up(end, LINE)


class RingCall(NamedTuple):
    """What kernels are told of a call: numbers, and the addresses of int64s."""

    rank: int
    num_ranks: int
    num_channels: int
    num_columns: int
    ring_bytes: int
    slots: int
    slot_bytes: int
    chunk: int  # rows that move before the next ring has its turn
    bases: int  # the address of [R]
    lanes: int  # of [R, C, 8]
    columns: int  # of [columns, 8]
    order: int  # of [N] int32: the rows of x in the order in which they are sent; 0 if as they lie


def begin_call(
    rings: Rings,
    columns: Tensors,
    outs: Tensors,
    order_N: Tensor | None,
    tokens_N: Tensor,
    counts_R: Sequence[int],
    num_tokens_R: np.ndarray,
    use: RingUse,
) -> tuple[RingCall, np.ndarray]:
    """A call in which counts_R[r] rows of the columns go to rank r.

    `tokens_N` has the token of each row, ascending for each rank, and `num_tokens_R` how many
    tokens they are among: the channels in use share these. The caller keeps the array while kernels
    use the call.
    """
    num_ranks, num_channels, _ = rings.lanes_RC.shape
    widths = row_widths(columns)
    offsets, slot_bytes = _record(widths)
    table = np.array(
        [
            (width, 0, column.data_ptr(), column.stride(0) * column.itemsize, offset, 1, 0, width)
            for column, width, offset in zip(columns, widths, offsets)
        ],
        np.int64,
    )
    for words, width, out in zip(table, widths, outs):
        words[_STREAMS] = may_stream(width, out.numel() * out.itemsize)
        words[OUT + _BASE] = out.data_ptr()
    starts = np.array(list(accumulate(counts_R, initial=0)), np.int64)
    _cut_kernel(rings.lanes_RC, tokens_N.data_ptr(), starts, num_tokens_R, use.num_channels)
    call = RingCall(
        rank=rings.rank,
        num_ranks=num_ranks,
        num_channels=num_channels,
        num_columns=len(columns),
        ring_bytes=rings.ring_bytes,
        slots=use.slots,
        slot_bytes=slot_bytes,
        chunk=use.chunk,
        bases=rings.bases_R.ctypes.data,
        lanes=rings.lanes_RC.ctypes.data,
        columns=table.ctypes.data,
        order=0 if order_N is None else order_N.data_ptr(),
    )
    return call, table


@njit(nogil=True, cache=True)
def _cut_kernel(lanes, tokens, starts, num_tokens, num_used):
    """Begin all lanes' call: cut the rows for each rank where a channel's tokens end. Nothing is
    left for channels that are not used.
    """
    token = pointer(tokens, INT32)
    num_ranks, num_channels, _ = lanes.shape
    for r in range(num_ranks):
        each = (num_tokens[r] + num_used - 1) // num_used
        first = starts[r]
        for c in range(num_channels):
            low, high = first, starts[r + 1]
            while low < high:
                middle = (low + high) // 2
                if token[middle] < (c + 1) * each:
                    low = middle + 1
                else:
                    high = middle
            lanes[r, c, _SENT_BEFORE] = lanes[r, c, _SENT]
            lanes[r, c, _TAKEN_BEFORE] = lanes[r, c, _TAKEN]
            lanes[r, c, _FIRST] = first
            lanes[r, c, _COUNT] = low - first
            first = low


@njit(nogil=True, cache=True)
def column_at(call, column, place, at):
    """The address of a column's bytes: in ROWS or OUT of row `at`, in the SLOT at that address."""
    words = pointer(call.columns + column * _COLUMN_WORDS * 8, INT64)
    return words[place + _BASE] + at * words[place + _STEP]


@njit(nogil=True, cache=True)
def _to_slot(call, slot, row):
    """Copy one row of all columns into a slot, which is read again at once: nothing is streamed."""
    for column in range(call.num_columns):
        words = pointer(call.columns + column * _COLUMN_WORDS * 8, INT64)
        target = column_at(call, column, SLOT, slot)
        copy_bytes(target, column_at(call, column, ROWS, row), words[_WIDTH])


@njit(nogil=True, cache=True)
def to_out(call, row, source, source_at):
    """Copy one row of all columns into the results, past the cache where there are many."""
    for column in range(call.num_columns):
        words = pointer(call.columns + column * _COLUMN_WORDS * 8, INT64)
        target = column_at(call, column, OUT, row)
        from_at = column_at(call, column, source, source_at)
        copy_row(target, from_at, words[_WIDTH], words[_STREAMS] != 0)


@njit(nogil=True, cache=True)
def _ring_at(call, owner, channel, source):
    ring = np.int64(channel) * call.num_ranks + source
    return pointer(call.bases, INT64)[owner] + ring * call.ring_bytes


@njit(nogil=True, cache=True)
def _lane_at(call, peer, channel):
    return call.lanes + (np.int64(peer) * call.num_channels + channel) * LINE


@njit(nogil=True, cache=True)
def _slot_at(call, ring, record):
    return ring + _SLOTS + record % call.slots * call.slot_bytes


@njit(nogil=True, cache=True)
def unsent(call, peer, channel):
    """How many rows this rank has yet to send."""
    lane = pointer(_lane_at(call, peer, channel), INT64)
    return lane[_COUNT] - (lane[_SENT] - lane[_SENT_BEFORE])


@njit(nogil=True, cache=True)
def next_row(call, peer, channel):
    """The next row to be sent: its number among all for that peer, and where in x it lies."""
    lane = pointer(_lane_at(call, peer, channel), INT64)
    place = lane[_FIRST] + lane[_SENT] - lane[_SENT_BEFORE]
    number = place - pointer(_lane_at(call, peer, 0), INT64)[_FIRST]
    return number, np.int64(pointer(call.order, INT32)[place]) if call.order != 0 else place


@njit(nogil=True, cache=True)
def count_sent(call, peer, channel):
    pointer(_lane_at(call, peer, channel), INT64)[_SENT] += 1


@njit(nogil=True, cache=True)
def _is_drained(call, peer):
    """Rule 1: whether the peer took all records of earlier calls."""
    for c in range(call.num_channels):
        before = pointer(_lane_at(call, peer, c), INT64)[_SENT_BEFORE]
        if load_acquire(_ring_at(call, peer, c, call.rank) + _HEAD) < before:
            return False
    return True


@njit(nogil=True, cache=True)
def room(call, peer, channel):
    """How many records this rank may write to the peer's ring."""
    lane = pointer(_lane_at(call, peer, channel), INT64)
    if lane[_SENT] == lane[_SENT_BEFORE] and not _is_drained(call, peer):
        return np.int64(0)
    # The peer writes the head's line: look again only if what was seen last leaves no room.
    if lane[_HEAD_SEEN] < max(lane[_SENT_BEFORE], lane[_SENT] + 1 - call.slots):
        lane[_HEAD_SEEN] = load_acquire(_ring_at(call, peer, channel, call.rank) + _HEAD)
    return lane[_HEAD_SEEN] + call.slots - lane[_SENT]


@njit(nogil=True, cache=True)
def send(call, peer, channel):
    """Write a chunk of rows to the peer's ring, or as many as there is room for. How many?"""
    count = min(unsent(call, peer, channel), call.chunk)
    if count > 0:
        count = min(count, room(call, peer, channel))
    if count <= 0:
        return np.int64(0)
    ring = _ring_at(call, peer, channel, call.rank)
    lane = pointer(_lane_at(call, peer, channel), INT64)
    for _ in range(count):
        number, row = next_row(call, peer, channel)
        slot = _slot_at(call, ring, lane[_SENT] - lane[_SENT_BEFORE])
        pointer(slot, INT64)[0] = number
        _to_slot(call, slot, row)
        count_sent(call, peer, channel)
    # After the records: all that the tail counts is whole.
    store_release(ring + _TAIL, lane[_SENT])
    return count


@njit(nogil=True, cache=True)
def waiting(call, source, channel):
    """How many records are there to be taken from this rank's ring for the source."""
    lane = pointer(_lane_at(call, source, channel), INT64)
    if lane[_TAIL_SEEN] <= lane[_TAKEN]:
        ring = _ring_at(call, call.rank, channel, source)
        lane[_TAIL_SEEN] = load_acquire(ring + _TAIL)
    return lane[_TAIL_SEEN] - lane[_TAKEN]


@njit(nogil=True, cache=True)
def next_slot(call, source, channel, ahead):
    """The address of the next record to be taken, or of one that comes so many after it."""
    lane = pointer(_lane_at(call, source, channel), INT64)
    record = lane[_TAKEN] - lane[_TAKEN_BEFORE] + ahead
    return _slot_at(call, _ring_at(call, call.rank, channel, source), record)


@njit(nogil=True, cache=True)
def take(call, source, channel, count):
    """The next records were read: count them, then let the source write over them."""
    lane = _lane_at(call, source, channel)
    taken = pointer(lane, INT64)[_TAKEN] + count
    store_release(lane + 8 * _TAKEN, taken)
    store_release(_ring_at(call, call.rank, channel, source) + _HEAD, taken)


@njit(nogil=True, cache=True)
def taken(call, source):
    """How many records of this call were taken from the source, by all threads of this rank."""
    total = np.int64(0)
    for c in range(call.num_channels):
        lane = _lane_at(call, source, c)
        total += load_acquire(lane + 8 * _TAKEN) - pointer(lane, INT64)[_TAKEN_BEFORE]
    return total
