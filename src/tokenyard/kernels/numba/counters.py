"""Counting what compiled calls do, and whom they wait for (`wire.counters`).

Two threads of a rank may count at once, and then a number may be lost: figures, not signals.
"""

from __future__ import annotations

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import INT64, pointer
from tokenyard.wire import counters as at


@njit(nogil=True, cache=True)
def note_wait(waits, size, rank, begin):
    """This rank has waited since `begin`, and that rank came last."""
    if waits == 0:
        return
    words, end = pointer(waits, INT64), now()
    words[rank] += end - begin
    words[size + rank] += 1
    count = words[2 * size]
    entry = pointer(waits + 8 * (2 * size + 1 + count % at.LOG * at.LOG_WORDS), INT64)
    entry[0], entry[1], entry[2] = rank, begin, end
    words[2 * size] = count + 1


@njit(nogil=True, cache=True)
def note_patience(waits, rank, begin):
    """Add the time since `begin`; the caller goes on waiting for that rank, and counts the wait."""
    if waits != 0:
        pointer(waits, INT64)[rank] += now() - begin


@njit(nogil=True, cache=True)
def count_call(counters, began):
    """A call has ended that began then."""
    words = pointer(counters, INT64)
    words[at.CALLS] += 1
    words[at.NANOSECONDS] += now() - began


@njit(nogil=True, cache=True)
def count_sent(counters, size, rank, num_rows, num_bytes):
    words = pointer(counters, INT64)
    words[at.HEAD + at.TO * size + rank] += num_rows
    words[at.HEAD + at.BYTES * size + rank] += num_bytes


@njit(nogil=True, cache=True)
def count_received(counters, size, rank, num_rows):
    pointer(counters, INT64)[at.HEAD + at.FROM * size + rank] += num_rows
