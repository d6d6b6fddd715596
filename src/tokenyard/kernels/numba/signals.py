"""Raising signals in other ranks' memory, and waiting for theirs, never for ever.

A signal is an int64 that only grows. `raise_signal` and `raise_signals` are the only ways to raise
one: they fence, so that a rank that sees the signal also sees all that this thread wrote before,
streaming stores included. (The counters of a ring are no signals: see `ring.protocol`.)

The launchers take the addresses of tables of R addresses: where this rank's signals go, and where
the others' come in. They return the place of the first signal that has not come, or R; the caller
decides whether to go on waiting.
"""

from __future__ import annotations

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.counters import note_patience, note_wait
from tokenyard.kernels.numba.llvm.atomics import (
    fence_stores,
    load_acquire,
    pause,
    store_release,
    yield_core,
)
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import INT64, copy_bytes, pointer


@njit(nogil=True, cache=True)
def verdict(what, which):
    """How a compiled call ends (`wire.verdicts`)."""
    return np.int64(what) << 32 | np.int64(which)


@njit(nogil=True, cache=True)
def raise_signal(address, value):
    # A release does not order streaming stores: the fence does.
    fence_stores()
    store_release(address, value)


@njit(nogil=True, cache=True)
def raise_signals(outgoing, size, epoch):
    """Raise all signals of a table, after a single fence."""
    fence_stores()
    signals = pointer(outgoing, INT64)
    for i in range(size):
        store_release(signals[i], epoch)


@njit(nogil=True, cache=True)
def reaches(signal, epoch, patience):
    """Whether the word at this address reaches the epoch within `patience` pauses."""
    for _ in range(patience):
        if load_acquire(signal) >= epoch:
            return True
        pause()
    return False


@njit(nogil=True, cache=True)
def await_all(signals, size, epoch, first, patience, yields, waits, rank, masked):
    """Wait for signals first.. to reach the epoch: each for at most `patience` pauses, and then all
    of them for `yields` turns of this core. The first that has not, or `size`.

    With `masked`, the address of words, it waits neither for ranks whose word is not 0 nor for
    `rank` itself. `waits` is as in `meet`.
    """
    addresses, skip = pointer(signals, INT64), pointer(masked, INT64)
    last, begin = np.int64(-1), np.int64(0)
    for r in range(first, size):
        if masked != 0 and (r == rank or skip[r] != 0):
            continue
        if load_acquire(addresses[r]) >= epoch:
            continue  # no wait: the clock is not read, and nothing is counted
        if waits != 0 and last < 0:
            begin = now()
        last = np.int64(r)
        came = reaches(addresses[r], epoch, patience)
        while yields > 0 and not came:
            yields -= 1
            yield_core()
            came = load_acquire(addresses[r]) >= epoch
        if not came:
            note_patience(waits, last, begin)
            return r
    if last >= 0:
        note_wait(waits, size, last, begin)
    return size


@njit(nogil=True, cache=True)
def _meet_kernel(outgoing, incoming, size, epoch, patience, waits):
    raise_signals(outgoing, size, epoch)
    return await_all(incoming, size, epoch, 0, patience, 0, waits, -1, 0)


@njit(nogil=True, cache=True)
def _post_kernel(message, outboxes, outgoing, incoming, size, epoch, patience, waits):
    boxes = pointer(outboxes, INT64)
    num_bytes = message.shape[1] * np.int64(8)
    for r in range(size):
        copy_bytes(boxes[r], message.ctypes.data + r * message.strides[0], num_bytes)
    return _meet_kernel(outgoing, incoming, size, epoch, patience, waits)


def meet(outgoing: int, incoming: int, size: int, epoch: int, patience: int, waits: int = 0) -> int:
    """Signal, and wait for all others' signals, each for at most `patience` pauses.

    All that this thread wrote comes before its signals, streaming stores included. `waits`, if not
    0, is the address of words that say whom this rank waits for (`wire.counters`).
    """
    return _meet_kernel(outgoing, incoming, size, epoch, patience, waits)


def post(
    message_RM: np.ndarray,
    outboxes: int,
    outgoing: int,
    incoming: int,
    size: int,
    epoch: int,
    patience: int,
    waits: int = 0,
) -> int:
    """Copy row r of an int64 message to the r-th of a table of boxes, and then `meet`."""
    return _post_kernel(message_RM, outboxes, outgoing, incoming, size, epoch, patience, waits)


def await_signals(
    incoming: int,
    size: int,
    epoch: int,
    first: int,
    patience: int,
    rank: int = -1,
    masked: int = 0,
) -> int:
    """Wait for signals first.. to reach the epoch, each for at most `patience` pauses; with the
    address of R words, but for ranks whose word is not 0, and for `rank`.
    """
    return await_all(incoming, size, epoch, first, patience, 0, 0, rank, masked)
