"""Dispatch through rings: a rank takes whatever has come, and puts it in its final place at once.

`plan_ring_dispatch` says what moves. `ring_dispatch` drives some channels, and is called again and
again until nothing is left. `protocol` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tokenyard.kernels.base import Tensors
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, pause
from tokenyard.kernels.numba.llvm.pointers import INT64, pointer
from tokenyard.kernels.numba.ring.protocol import (
    ROWS,
    SLOT,
    RingCall,
    Rings,
    begin_call,
    count_sent,
    next_row,
    next_slot,
    room,
    send,
    take,
    taken,
    to_out,
    unsent,
    waiting,
)
from tokenyard.types import Flow
from tokenyard.wire.rings import RingUse


@dataclass(frozen=True, eq=False)
class RingDispatch:
    """A dispatch on its way: `ring_dispatch` is called until it has nothing left to do."""

    rings: Rings
    call: RingCall
    starts_R: np.ndarray  # where each source's rows begin among those that arrive
    counts_R: np.ndarray  # how many there are
    kept: tuple[object, ...]  # memory that the call has addresses of

    @property
    def moved(self) -> int:
        """Rows sent and taken: grows as long as anything moves."""
        return self.rings.moved

    def awaited(self) -> list[int]:
        """The ranks whose rows this rank waits for; if there are none, those that give no room.

        (Who gives no room may itself wait for rows.) To be asked while no thread drives the call.
        """
        rows, rooms = np.zeros((2, self.call.num_ranks), np.bool_)
        _awaited_kernel(self.call, self.counts_R, rows, rooms)
        return np.flatnonzero(rows if rows.any() else rooms).tolist()


def plan_ring_dispatch(
    rings: Rings, columns: Tensors, outs: Tensors, flow: Flow, use: RingUse
) -> RingDispatch:
    """Each column [T, B] is to arrive in a contiguous out [N, B] of the ranks it goes to."""
    route, recv_counts = flow.route, flow.recv_counts
    num_tokens = np.full(len(recv_counts), route.copy_start.shape[0] - 1)
    sent = route.send_token
    call, table = begin_call(rings, columns, outs, sent, sent, route.send_counts, num_tokens, use)
    return RingDispatch(
        rings,
        call,
        np.array(list(accumulate(recv_counts, initial=0))[:-1], np.int64),
        np.array(recv_counts, np.int64),
        (table, *columns, *outs, route),
    )


@njit(nogil=True, cache=True)
def _keep(call, starts, channel):
    """Copy a chunk of rows that stay on this rank, past the ring. How many?"""
    count = min(unsent(call, call.rank, channel), call.chunk)
    for _ in range(count):
        number, row = next_row(call, call.rank, channel)
        to_out(call, starts[call.rank] + number, ROWS, row)
        count_sent(call, call.rank, channel)
    if count > 0:
        take(call, call.rank, channel, count)
    return count


@njit(nogil=True, cache=True)
def _receive(call, starts, counts, source, channel):
    """Take a chunk of records, or as many as there are. How many? -1 if one is not of this call."""
    count = min(waiting(call, source, channel), call.chunk)
    # If all have come, these are of a later call. In this order: see "which call".
    if count <= 0 or taken(call, source) == counts[source]:
        return np.int64(0)
    for i in range(count):
        slot = next_slot(call, source, channel, i)
        number = pointer(slot, INT64)[0]
        if number < 0 or number >= counts[source]:  # never an address from broken memory
            return np.int64(-1)
        to_out(call, starts[source] + number, SLOT, slot)
    take(call, source, channel, count)
    return count


@njit(nogil=True, cache=True)
def _left(call, counts, begin, end):
    """Rows that these channels have yet to send, and those that this rank has yet to get."""
    left = np.int64(0)
    for peer in range(call.num_ranks):
        left += counts[peer] - taken(call, peer)
        for c in range(begin, end):
            left += unsent(call, peer, c)
    return left


@njit(nogil=True, cache=True)
def _dispatch_kernel(call, starts, counts, begin, end, patience):
    idle = 0
    while idle < patience:
        moved = np.int64(0)
        for c in range(begin, end):
            moved += _keep(call, starts, c)
            # From the next rank on, so that ranks do not all begin with the same peer.
            for i in range(1, call.num_ranks):
                peer = (call.rank + i) % call.num_ranks
                moved += send(call, peer, c)
                came = _receive(call, starts, counts, peer, c)
                if came < 0:
                    fence_stores()  # every way out fences: rows may have been streamed
                    return -1 - peer
                moved += came
        if moved > 0:
            idle = 0
        elif _left(call, counts, begin, end) == 0:
            break
        else:
            idle += 1
            pause()
    fence_stores()
    return _left(call, counts, begin, end)


def ring_dispatch(plan: RingDispatch, begin: int, end: int, patience: int) -> int:
    """Drive channels begin..end until all is done or nothing moved for `patience` rounds.

    Returns how many rows are left, which is 0 when these channels have sent all, and this rank has
    got all, by whatever channels. It is -1 - r if rank r's ring holds a row that cannot be.
    """
    return _dispatch_kernel(plan.call, plan.starts_R, plan.counts_R, begin, end, patience)


@njit(nogil=True, cache=True)
def _awaited_kernel(call, counts, rows, rooms):
    for peer in range(call.num_ranks):
        if peer != call.rank:
            rows[peer] = taken(call, peer) < counts[peer]
            for c in range(call.num_channels):
                rows[peer] &= waiting(call, peer, c) <= 0
                rooms[peer] |= unsent(call, peer, c) > 0 and room(call, peer, c) <= 0
