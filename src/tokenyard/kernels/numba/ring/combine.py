"""Combine through rings: a rank sums a token from the slots, once all its rows have come.

`plan_ring_combine` says what moves; `ring_combine` drives some channels, and is called again until
nothing is left. `protocol` has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenyard.kernels.base import Tensors
from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, pause
from tokenyard.kernels.numba.llvm.pointers import INT32, INT64, LIKE, pointer
from tokenyard.kernels.numba.reduce import NO_NODE, may_stream, scratch, sum_token
from tokenyard.kernels.numba.ring.protocol import (
    ROWS,
    SLOT,
    RingCall,
    Rings,
    begin_call,
    column_at,
    next_slot,
    room,
    send,
    take,
    unsent,
    waiting,
)
from tokenyard.types import Flow, split_range
from tokenyard.wire.rings import RingUse

_WEIGHT = np.empty(0, np.float32)


class _Sum(NamedTuple):
    """What kernels are told of the sums: numbers, and addresses."""

    copy_start: int
    copy_rank: int
    copy_slot: int
    own: int  # where in x the rows of this rank itself begin
    biases: int
    num_biases: int
    nodes: int
    num_nodes: int
    out: int
    hidden: int
    streaming: bool
    weights_out: int
    num_topk: int  # 0 if weights are not summed


@dataclass(frozen=True, eq=False)
class RingCombine:
    """A combine on its way: `ring_combine` is called until it has nothing left to do."""

    rings: Rings
    call: RingCall
    sums: _Sum
    like: np.ndarray
    tokens_C: np.ndarray  # [C, 2]: the next token of each channel, and the end of its tokens
    kept: tuple[object, ...]  # memory that the call has addresses of

    @property
    def moved(self) -> int:
        """Rows sent and taken, and tokens summed: grows as long as anything moves."""
        return self.rings.moved + int(self.tokens_C[:, 0].sum())

    def awaited(self) -> list[int]:
        """The ranks whose rows this rank waits for; if there are none, those that give no room.

        (Who gives no room may itself wait for rows.) To be asked while no thread drives the call.
        """
        rows, rooms = np.zeros((2, self.call.num_ranks), np.bool_)
        _awaited_kernel(self.call, self.sums, self.tokens_C, rows, rooms)
        return np.flatnonzero(rows if rows.any() else rooms).tolist()


def plan_ring_combine(
    rings: Rings,
    columns: Tensors,
    outs: Tensors,
    flow: Flow,
    recv_src_idx_N: Tensor,
    biases_TD: Tensors,
    use: RingUse,
) -> RingCombine:
    """Rows of x [N, D], and of weights [N, K] if there are, go back to the ranks they came from;
    those that this rank had sent along the flow come back, and are summed into outs of T rows.

    The columns lie by source rank, of those tokens that recv_src_idx_N says. Biases are added to
    the first.
    """
    out_TD, weights_out = outs[0], outs[1] if len(outs) > 1 else None
    num_tokens, hidden = out_TD.shape
    route, counts = flow.route, flow.recv_counts
    num_tokens_R = np.array(flow.tokens_R, np.int64)  # contiguous, as in a dispatch
    call, table = begin_call(rings, columns, [], None, recv_src_idx_N, counts, num_tokens_R, use)
    biases = np.array([bias.data_ptr() for bias in biases_TD], np.int64)
    row_bytes = hidden * out_TD.itemsize
    moved = (route.copy_rank.shape[0] + num_tokens) * row_bytes
    sums = _Sum(
        copy_start=route.copy_start.data_ptr(),
        copy_rank=route.copy_rank.data_ptr(),
        copy_slot=route.copy_slot.data_ptr(),
        own=list(accumulate(counts, initial=0))[rings.rank],
        biases=biases.ctypes.data,
        num_biases=len(biases),
        nodes=rings.nodes_R.ctypes.data,
        num_nodes=int(rings.nodes_R.max()) + 1,
        out=out_TD.data_ptr(),
        hidden=hidden,
        streaming=may_stream(out_TD.data_ptr(), row_bytes, moved),
        weights_out=0 if weights_out is None else weights_out.data_ptr(),
        num_topk=0 if weights_out is None else weights_out.shape[1],
    )
    kept = (table, *columns, biases, *biases_TD, route, *outs)
    unused = [(num_tokens, num_tokens)] * (call.num_channels - use.num_channels)
    tokens_C = np.array([*split_range(num_tokens, use.num_channels), *unused], np.int64)
    return RingCombine(rings, call, sums, LIKE[out_TD.dtype], tokens_C, kept)


@njit(nogil=True, cache=True)
def _has_come(call, sums, token, channel):
    """Whether the token's row has come from all ranks that owe one."""
    starts, ranks = pointer(sums.copy_start, INT32), pointer(sums.copy_rank, INT32)
    for copy in range(starts[token], starts[token + 1]):
        if ranks[copy] != call.rank and waiting(call, ranks[copy], channel) <= 0:
            return False
    return True


@njit(nogil=True, cache=True)
def _list_rows(call, sums, token, channel, column, sources, homes):
    """Write down where the token's rows of this column lie, and on which node. How many?"""
    starts, ranks = pointer(sums.copy_start, INT32), pointer(sums.copy_rank, INT32)
    slots, node = pointer(sums.copy_slot, INT32), pointer(sums.nodes, INT32)
    address, home = pointer(sources, INT64), pointer(homes, INT32)
    count = np.int64(0)
    for copy in range(starts[token], starts[token + 1]):
        rank = np.int64(ranks[copy])
        if rank == call.rank:
            address[count] = column_at(call, column, ROWS, sums.own + slots[copy])
        else:
            address[count] = column_at(call, column, SLOT, next_slot(call, rank, channel, 0))
        home[count] = node[rank]
        count += 1
    return count


@njit(nogil=True, cache=True)
def _sum_next(call, sums, token, channel, sources, homes, like, scratch, weight_scratch):
    """Sum one token's rows, and let their sources write over them."""
    row_bytes = sums.hidden * np.int64(like.itemsize)
    biases, address = pointer(sums.biases, INT64), pointer(sources, INT64)
    for b in range(sums.num_biases):
        address[b] = biases[b] + token * row_bytes
    rows, rows_homes = sources + 8 * sums.num_biases, homes + 4 * sums.num_biases
    count = _list_rows(call, sums, token, channel, 0, rows, rows_homes)
    sum_token(
        sums.out + token * row_bytes,
        sources,
        homes,
        sums.num_biases + count,
        sums.num_nodes,
        sums.hidden,
        sums.streaming,
        like,
        scratch,
    )
    if sums.num_topk > 0:
        _list_rows(call, sums, token, channel, 1, rows, rows_homes)
        sum_token(
            sums.weights_out + token * sums.num_topk * 4,
            rows,
            rows_homes,
            count,
            sums.num_nodes,
            sums.num_topk,
            False,
            _WEIGHT,
            weight_scratch,
        )
    starts, ranks = pointer(sums.copy_start, INT32), pointer(sums.copy_rank, INT32)
    for copy in range(starts[token], starts[token + 1]):
        if ranks[copy] != call.rank:
            take(call, ranks[copy], channel, 1)


@njit(nogil=True, cache=True)
def _left(call, tokens, begin, end):
    """Rows that these channels have yet to send, and tokens that they have yet to sum."""
    left = np.int64(0)
    for c in range(begin, end):
        left += tokens[c, 1] - tokens[c, 0]
        for peer in range(call.num_ranks):
            if peer != call.rank:
                left += unsent(call, peer, c)
    return left


@njit(nogil=True, cache=True)
def _combine_kernel(call, sums, tokens, begin, end, patience, like, scratch, weight_scratch):
    sources = np.empty(sums.num_biases + call.num_ranks, np.int64)
    homes = np.full(sums.num_biases + call.num_ranks, NO_NODE, np.int32)
    idle = 0
    while idle < patience:
        moved = np.int64(0)
        for c in range(begin, end):
            # From the next rank on, so that ranks do not all begin with the same peer.
            for i in range(1, call.num_ranks):
                moved += send(call, (call.rank + i) % call.num_ranks, c)
            stop = min(tokens[c, 0] + call.chunk, tokens[c, 1])
            while tokens[c, 0] < stop and _has_come(call, sums, tokens[c, 0], c):
                _sum_next(
                    call,
                    sums,
                    tokens[c, 0],
                    c,
                    sources.ctypes.data,
                    homes.ctypes.data,
                    like,
                    scratch,
                    weight_scratch,
                )
                tokens[c, 0] += 1
                moved += 1
        if moved > 0:
            idle = 0
        elif _left(call, tokens, begin, end) == 0:
            break
        else:
            idle += 1
            pause()
    fence_stores()
    return _left(call, tokens, begin, end)


def ring_combine(plan: RingCombine, begin: int, end: int, patience: int) -> int:
    """Drive channels begin..end until all is done or nothing moved for `patience` rounds.

    Returns how many rows are yet to be sent, and tokens to be summed, by these channels.
    """
    return _combine_kernel(
        plan.call,
        plan.sums,
        plan.tokens_C,
        begin,
        end,
        patience,
        plan.like,
        scratch(plan.like),
        scratch(_WEIGHT),
    )


@njit(nogil=True, cache=True)
def _awaited_kernel(call, sums, tokens, rows, rooms):
    starts, ranks = pointer(sums.copy_start, INT32), pointer(sums.copy_rank, INT32)
    for c in range(call.num_channels):
        for peer in range(call.num_ranks):
            if peer != call.rank:
                rooms[peer] |= unsent(call, peer, c) > 0 and room(call, peer, c) <= 0
        token = tokens[c, 0]
        if token < tokens[c, 1]:
            for copy in range(starts[token], starts[token + 1]):
                if ranks[copy] != call.rank:
                    rows[ranks[copy]] |= waiting(call, ranks[copy], c) <= 0
