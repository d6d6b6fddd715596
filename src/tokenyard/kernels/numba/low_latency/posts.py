"""Posts of ranks that share memory, and their other words: waiting for them, and what they say.

A rank's posts lie in its own memory; others read them there. A rank that leaves another out may
write over what that one reads, and raises a flag before it does so: after reading, a rank looks at
the flags once more. What another rank wrote is compared with what it may be before it becomes an
address, a place or a count.

Most functions take the address of a call's table (`wire.call_table`). Nothing waits for ever and
nothing is decided here: what did not work is returned as a verdict (`wire.verdicts`), and the call
may be made again.
"""

from __future__ import annotations

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.atomics import fence_stores, load_acquire
from tokenyard.kernels.numba.llvm.pointers import INT64, copy_bytes, pointer
from tokenyard.kernels.numba.signals import await_all, raise_signal, verdict
from tokenyard.wire import call_table as at
from tokenyard.wire.slots import HANDLE, IDENTITY, NUMBER, ROWS_IDENTITY, SIGNATURE, TEXT, TOKENS
from tokenyard.wire.verdicts import DIFFERS, DONE, LATE, LOST, MAP, MASKED, STRAY

_HEAD_BYTES = 8 * TEXT
NO_ROWS, OTHERS_ROWS, ALL_ROWS = 0, 1, 2  # whose rows a call reads in their memory


@njit(nogil=True, cache=True)
def _await_others(table, signals, number):
    """DONE once the signals of all others have reached the number."""
    words = pointer(table, INT64)
    rank, size, masked = words[at.RANK], words[at.SIZE], words[at.MASKED]
    patience, yields, waits = words[at.PATIENCE], words[at.YIELDS], words[at.WAITS]
    late = await_all(signals, size, number, 0, patience, yields, waits, rank, masked)
    return np.int64(DONE) if late == size else verdict(LATE, late)


@njit(nogil=True, cache=True)
def await_reads(table):
    """DONE once all others have read what this rank sent two calls ago, where it sends now."""
    words = pointer(table, INT64)
    return _await_others(table, words[at.READS], words[at.NUMBER] - 2)


@njit(nogil=True, cache=True)
def publish(table):
    """Write all of this rank's post, and its number last."""
    words = pointer(table, INT64)
    post = pointer(words[at.POST], INT64)
    copy_bytes(words[at.POST] + 8, words[at.HEAD] + 8, _HEAD_BYTES - 8)
    post[TOKENS] = words[at.NUM_TOKENS]
    post[HANDLE] = words[at.HANDLE]
    raise_signal(words[at.POST] + 8 * NUMBER, words[at.NUMBER])


@njit(nogil=True, cache=True)
def check_flags(table):
    """DONE, or a rank that has left this one out, and may have written over what was read."""
    words = pointer(table, INT64)
    skip, flag = pointer(words[at.MASKED], INT64), pointer(words[at.FLAGS], INT64)
    fence_stores()  # of loads too, where the machine needs that
    for r in range(words[at.SIZE]):
        if skip[r] == 0 and load_acquire(flag[r]) != 0:
            return verdict(MASKED, r)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def stray(table, rank):
    """The rank wrote what cannot be, unless one that left this rank out writes something else."""
    torn = check_flags(table)
    return torn if torn != DONE else verdict(STRAY, rank)


@njit(nogil=True, cache=True)
def check_posts(table, block_bytes, rows_of):
    """DONE once all ranks have posted this call as this rank expects it, and memory is mapped.

    A block has so many bytes at least. `rows_of` says whose rows must be mapped too.
    """
    words = pointer(table, INT64)
    rank, size, number = words[at.RANK], words[at.SIZE], words[at.NUMBER]
    peers, flag = words[at.PEERS], pointer(words[at.FLAGS], INT64)
    skip = pointer(words[at.MASKED], INT64)
    late = _await_others(table, words[at.POSTS], number)
    if late != DONE:
        return late
    for r in range(size):
        if skip[r] != 0:
            continue
        if load_acquire(flag[r]) != 0:
            return verdict(MASKED, r)
        post = pointer(pointer(words[at.POSTS], INT64)[r], INT64)
        if post[NUMBER] != number:
            return verdict(LOST, r)
        if post[SIGNATURE] != words[at.SIGNATURE] or post[HANDLE] != words[at.HANDLE]:
            return verdict(DIFFERS, r)
    for r in range(size):
        if skip[r] != 0:
            continue
        peer = pointer(peers + 8 * at.PEER_WORDS * r, INT64)
        post = pointer(peer[at.PEER_POST], INT64)
        with_rows = rows_of == ALL_ROWS or (rows_of == OTHERS_ROWS and r != rank)
        if post[IDENTITY] != peer[at.PEER_BLOCK + at.SEGMENT_IDENTITY]:
            return verdict(MAP, r)
        if with_rows and post[ROWS_IDENTITY] != peer[at.PEER_ROWS + at.SEGMENT_IDENTITY]:
            return verdict(MAP, r)
        if peer[at.PEER_BLOCK + at.SEGMENT_SIZE] < block_bytes:
            return stray(table, r)
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def _signal_kernel(address, value):
    raise_signal(address, value)
    fence_stores()


def signal(address: int, value: int) -> None:
    """Raise a signal after all that this thread has written, and before all that it writes next."""
    _signal_kernel(address, value)


@njit(nogil=True, cache=True)
def _find_failure_kernel(failures, posts, masked, size, number):
    failed, posted = pointer(failures, INT64), pointer(posts, INT64)
    skip = pointer(masked, INT64)
    for r in range(size):
        # In this order: a rank that has posted this call may have failed in a later one.
        if skip[r] == 0 and load_acquire(failed[r]) >= number and load_acquire(posted[r]) < number:
            return r
    return -1


def find_failure(failures: int, posts: int, masked: int, size: int, number: int) -> int:
    """A rank that has failed in this call, and so will never post it; or -1."""
    return _find_failure_kernel(failures, posts, masked, size, number)


@njit(nogil=True, cache=True)
def _find_ahead_kernel(marks, limits, masked, rank, awaited, number, failures, failed_number):
    skip, wanted = pointer(masked, INT64), pointer(awaited, INT64)
    failed = pointer(failures, INT64)
    size, width = marks.shape
    for r in range(size):
        if r == rank or skip[r] != 0:
            continue
        for i in range(width):
            # In this order: what a rank did before that mark can be seen once the mark is.
            if load_acquire(marks[r, i]) > limits[i]:
                late = load_acquire(wanted[r]) < number
                if late and (failures == 0 or load_acquire(failed[r]) < failed_number):
                    return r * width + i
                break
    return -1


def find_ahead(
    marks_RM: np.ndarray,
    limits_M: np.ndarray,
    masked: int,
    rank: int,
    awaited: int,
    number: int,
    failures: int,
    failed_number: int,
) -> int:
    """A rank one of whose marks is past its limit, though its awaited word is below the number, and
    its failure, unless `failures` is 0, below that number: rank * M + mark, or -1.

    `marks_RM` are addresses, `limits_M` numbers.
    """
    return _find_ahead_kernel(
        marks_RM, limits_M, masked, rank, awaited, number, failures, failed_number
    )
