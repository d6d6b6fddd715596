"""A whole low-latency call in one: for ranks that share memory.

A rank's blocks lie in its own memory, and so do its posts; others read both where they are. To send
is to write a block and then, with release, the number in its post. To receive is to wait for the
post's number, with acquire, copy rows straight from there into slots, and leave word that they were
read: only when all ranks have done so is a block written again, two calls later.

    peers   [R, 7] for each rank: its post, and the identity, address and size of its block as they
            are known here; of a combine also those of its rows
    masked  [R] who is left out
    flags   [R] addresses of a word each, which says whether that rank has left this one out

Nothing waits for ever, and nothing is decided here: what did not work is returned (see
`wire.slots`), and the call may be made again. What another rank wrote is compared with what it
may be before it becomes an address, a place or a count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numba import int64, typeof

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, load_acquire, store_release
from tokenyard.kernels.numba.llvm.pointers import LIKE, copy_bytes, pointer
from tokenyard.kernels.numba.low_latency.steps import (
    begin_ranges,
    cast_like,
    count_rows,
    fill_from,
    give_back,
    number_pairs,
    pick_pairs,
    stage_rows,
    sum_tokens,
    wide_scratch,
)
from tokenyard.kernels.numba.signals import reaches
from tokenyard.wire.slots import (
    BAD,
    DIFFERS,
    HANDLE,
    IDENTITY,
    LATE,
    LOST,
    MAP,
    MASKED,
    NUMBER,
    OK,
    ROOM,
    ROWS_BEGIN,
    ROWS_IDENTITY,
    SIGNATURE,
    STRAY,
    TEXT,
    TOKENS,
    TWICE,
    SlotShape,
)

_INT32 = np.empty(0, np.int32)
_INT64 = np.empty(0, np.int64)
_PEER = 7  # words of a peer
_ANY = np.int64(1) << 62  # more rows than there are
_HEAD_BYTES = 8 * TEXT


@njit(nogil=True, cache=True)
def _verdict(what, which):
    return np.int64(what) << 32 | np.int64(which)


@njit(nogil=True, cache=True)
def _await(signals, masked, rank, size, number, patience):
    """The first of others that is not there, or `size`."""
    addresses, skip = pointer(signals, _INT64), pointer(masked, _INT64)
    for r in range(size):
        if skip[r] == 0 and r != rank and not reaches(addresses[r], number, patience):
            return r
    return size


@njit(nogil=True, cache=True)
def _publish(post, head, number, num_tokens, handle):
    """All of the post, and its number last."""
    copy_bytes(post + 8, head + 8, _HEAD_BYTES - 8)
    words = pointer(post, _INT64)
    words[TOKENS] = num_tokens
    words[HANDLE] = handle
    fence_stores()
    store_release(post, number)


@njit(nogil=True, cache=True)
def _find_flag(masked, flags, size):
    """A rank that has left this one out meanwhile, and may have written over what was read."""
    skip, flag = pointer(masked, _INT64), pointer(flags, _INT64)
    fence_stores()  # of loads too, where the machine needs that
    for r in range(size):
        if skip[r] == 0 and load_acquire(flag[r]) != 0:
            return r
    return -1


@njit(nogil=True, cache=True)
def _stray(masked, flags, size, rank):
    """A rank wrote what cannot be, unless it has left this one out, and writes something else."""
    torn = _find_flag(masked, flags, size)
    return _verdict(MASKED, torn) if torn >= 0 else _verdict(STRAY, rank)


@njit(nogil=True, cache=True)
def _check_posts(
    peers, masked, flags, rank, size, number, patience, signature, handle, block_bytes, rows_of
):
    """A block has so many bytes at least. `rows_of` is whose rows must be mapped too: 0 nobody's, 1
    the others', 2 all.
    """
    known, skip, flag = pointer(peers, _INT64), pointer(masked, _INT64), pointer(flags, _INT64)
    for r in range(size):
        if skip[r] != 0:
            continue
        post = known[r * _PEER]
        if not reaches(post, number, patience):
            return _verdict(LATE, r)
        if load_acquire(flag[r]) != 0:
            return _verdict(MASKED, r)
        words = pointer(post, _INT64)
        if words[NUMBER] != number:
            return _verdict(LOST, r)
        if words[SIGNATURE] != signature or words[HANDLE] != handle:
            return _verdict(DIFFERS, r)
    for r in range(size):
        if skip[r] != 0:
            continue
        words = pointer(known[r * _PEER], _INT64)
        with_rows = rows_of == 2 or (rows_of == 1 and r != rank)
        if words[IDENTITY] != known[r * _PEER + 1]:
            return _verdict(MAP, r)
        if with_rows and words[ROWS_IDENTITY] != known[r * _PEER + 4]:
            return _verdict(MAP, r)
        if known[r * _PEER + 3] < block_bytes:
            return _stray(masked, flags, size, r)
    return np.int64(OK)


@njit(nogil=True, cache=True)
def _dispatch_send_kernel(
    like,
    reads,
    masked,
    rank,
    size,
    number,
    patience,
    x,
    topk_idx,
    num_tokens,
    num_topk,
    num_experts,
    sent,
    block,
    rows_at,
    row_bytes,
    scales_at,
    cast,
    head,
    post,
):
    late = _await(reads, masked, rank, size, number - 2, patience)
    if late < size:
        return _verdict(LATE, late)
    bad = number_pairs(topk_idx, num_tokens, num_topk, num_experts, sent)
    if bad >= 0:
        return _verdict(BAD, bad)
    if bad < -1:
        return _verdict(TWICE, -2 - bad)
    stage_rows(x, num_tokens, num_topk, sent, block, rows_at, row_bytes, scales_at, cast, like)
    _publish(post, head, number, num_tokens, 0)
    return np.int64(OK)


@njit(nogil=True, cache=True)
def _dispatch_receive_kernel(
    peers,
    masked,
    flags,
    rank,
    size,
    number,
    patience,
    signature,
    num_max,
    num_topk,
    num_experts,
    local_of_expert,
    num_local,
    rows_at,
    row_bytes,
    scales_at,
    scale_bytes,
    block_bytes,
    x,
    scales,
    counts,
    src_info,
    layout_range,
    stats,
    read,
):
    handle = rows_of = np.int64(0)
    found = _check_posts(
        peers,
        masked,
        flags,
        rank,
        size,
        number,
        patience,
        signature,
        handle,
        block_bytes,
        rows_of,
    )
    if found != OK:
        return found
    known, skip, ends = pointer(peers, _INT64), pointer(masked, _INT64), pointer(counts, _INT32)
    for local in range(num_local):
        ends[local] = 0
    for r in range(size):
        begin_ranges(r, num_local, size, counts, layout_range)
        if skip[r] != 0:
            continue
        tokens = pointer(known[r * _PEER], _INT64)[TOKENS]
        if tokens < 0 or tokens > num_max:
            return _stray(masked, flags, size, r)
        may_be = fill_from(
            r,
            known[r * _PEER + 2],
            tokens,
            num_topk,
            num_experts,
            local_of_expert,
            size,
            size * num_max,
            rows_at,
            row_bytes,
            scales_at,
            scale_bytes,
            x,
            scales,
            counts,
            src_info,
            layout_range,
        )
        if not may_be:
            return _stray(masked, flags, size, r)
    torn = _find_flag(masked, flags, size)
    if torn >= 0:
        return _verdict(MASKED, torn)
    if stats != 0:
        totals = pointer(stats, _INT32)
        for local in range(num_local):
            totals[local] += ends[local]
    store_release(read, number)
    return np.int64(OK)


@njit(nogil=True, cache=True)
def _combine_send_kernel(
    reads,
    masked,
    rank,
    size,
    number,
    patience,
    y,
    num_local,
    num_slots,
    row_bytes,
    layout_range,
    own,
    out,
    room,
    tables,
    table_bytes,
    topk_idx,
    sent,
    picked,
    num_tokens,
    num_topk,
    head,
    post,
    handle,
):
    late = _await(reads, masked, rank, size, number - 2, patience)
    if late < size:
        return _verdict(LATE, late)
    bad = pick_pairs(topk_idx, sent, picked, num_tokens, num_topk)
    if bad >= 0:
        return _verdict(BAD, bad)
    if out != 0:
        needed = np.int64(0)
        for r in range(size):
            if r != rank or own != 0:
                needed += count_rows(layout_range, num_local, size, r)
        if needed > room:
            return _verdict(ROOM, needed)
    row = np.int64(0)
    for r in range(size):
        to = out if r != rank or own != 0 else np.int64(0)
        table = tables + r * table_bytes
        row = give_back(y, num_slots, row_bytes, layout_range, num_local, size, r, to, row, table)
    _publish(post, head, number, num_tokens, handle)
    return np.int64(OK)


@njit(nogil=True, cache=True)
def _combine_receive_kernel(
    like,
    peers,
    masked,
    flags,
    rank,
    size,
    number,
    patience,
    signature,
    handle,
    y,
    table_bytes,
    rank_of_expert,
    local_of_expert,
    row_bytes,
    topk_idx,
    picked,
    weights,
    num_tokens,
    num_topk,
    hidden,
    out,
    read,
    factors,
):
    rows_of = np.int64(1 if y != 0 else 2)
    found = _check_posts(
        peers,
        masked,
        flags,
        rank,
        size,
        number,
        patience,
        signature,
        handle,
        size * table_bytes,
        rows_of,
    )
    if found != OK:
        return found
    known = pointer(peers, _INT64)
    rows, limits = np.empty(size, np.int64), np.empty(size, np.int64)
    tables, left_out = np.empty(size, np.int64), np.empty(size, np.int64)
    skip = pointer(masked, _INT64)
    for r in range(size):
        left_out[r] = skip[r]
        tables[r] = known[r * _PEER + 2] + rank * table_bytes
        if r == rank and y != 0:
            rows[r], limits[r] = y, _ANY
        elif skip[r] == 0:
            begin, room = pointer(known[r * _PEER], _INT64)[ROWS_BEGIN], known[r * _PEER + 6]
            if begin < 0 or begin > room:
                return _stray(masked, flags, size, r)
            rows[r], limits[r] = known[r * _PEER + 5] + begin, (room - begin) // row_bytes
    stray = sum_tokens(
        rows,
        limits,
        tables,
        left_out,
        rank_of_expert,
        local_of_expert,
        row_bytes,
        topk_idx,
        picked,
        weights,
        num_tokens,
        num_topk,
        hidden,
        out,
        like,
        factors,
    )
    if stray >= 0:
        return _stray(masked, flags, size, stray)
    torn = _find_flag(masked, flags, size)
    if torn >= 0:
        return _verdict(MASKED, torn)
    store_release(read, number)
    return np.int64(OK)


@njit(nogil=True, cache=True)
def _signal_kernel(address, value):
    fence_stores()
    store_release(address, value)
    fence_stores()


def signal(address: int, value: int) -> None:
    """Between all that this thread has written, and all that it writes from here on."""
    _signal_kernel(address, value)


@njit(nogil=True, cache=True)
def _find_failure_kernel(failures, posts, masked, size, number):
    failed, posted = pointer(failures, _INT64), pointer(posts, _INT64)
    skip = pointer(masked, _INT64)
    for r in range(size):
        # In this order: a rank that has posted this call may have failed in a later one.
        if skip[r] == 0 and load_acquire(failed[r]) >= number and load_acquire(posted[r]) < number:
            return r
    return -1


def find_failure(failures: int, posts: int, masked: int, size: int, number: int) -> int:
    """A rank that has failed in this call, and so will never post it; or -1."""
    return _find_failure_kernel(failures, posts, masked, size, number)


@njit(nogil=True, cache=True)
def _find_ahead_kernel(
    marks, limits, width, awaited, number, failures, failed_number, masked, rank, size
):
    mark, limit = pointer(marks, _INT64), pointer(limits, _INT64)
    wanted, failed = pointer(awaited, _INT64), pointer(failures, _INT64)
    skip = pointer(masked, _INT64)
    for r in range(size):
        if r == rank or skip[r] != 0:
            continue
        for i in range(width):
            # In this order: what a rank did before that mark can be seen once the mark is.
            if load_acquire(mark[r * width + i]) > limit[i]:
                late = load_acquire(wanted[r]) < number
                if late and (failures == 0 or load_acquire(failed[r]) < failed_number):
                    return r * width + i
                break
    return -1


def find_ahead(
    marks: int,
    limits: int,
    width: int,
    awaited: int,
    number: int,
    failures: int,
    failed_number: int,
    masked: int,
    rank: int,
    size: int,
) -> int:
    """A rank one of whose marks is past its limit, though its awaited word is below the number, and
    that of its failures, if that is asked for, too: rank * width + mark, or -1.

    `marks` is [R, width] addresses and `limits` [width] numbers.
    """
    return _find_ahead_kernel(
        marks, limits, width, awaited, number, failures, failed_number, masked, rank, size
    )


def await_slots(signals: int, masked: int, rank: int, size: int, number: int, patience: int) -> int:
    """The first of the others whose signal has not reached the number, or `size`."""
    return _await(signals, masked, rank, size, number, patience)


# The compiled functions themselves: a dispatcher would ask each argument's type at every call.
def dispatch_calls(shape: SlotShape) -> tuple[Callable[..., int], Callable[..., int]]:
    like = cast_like(shape)
    send = _dispatch_send_kernel.compile((typeof(like),) + (int64,) * 19)
    return partial(send, like), _dispatch_receive_kernel.compile((int64,) * 25)


def combine_calls(dtype: torch.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
    like = LIKE[dtype]
    factors = typeof(wide_scratch(1, dtype.itemsize))
    receive = _combine_receive_kernel.compile((typeof(like),) + (int64,) * 22 + (factors,))
    return _combine_send_kernel.compile((int64,) * 24), partial(receive, like)
