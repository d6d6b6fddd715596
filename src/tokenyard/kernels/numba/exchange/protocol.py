"""Steps that a compiled dispatch and a compiled combine share: messages, signals, verdicts.

A call does what the engine and the direct transport do, on the same messages and signals, so that a
rank may make a call this way while another makes it that way. It takes the address of a table
(`wire.exchange_table`) and returns a verdict (`wire.verdicts`). It never waits for ever and never
raises: whatever is unusual is left to the engine. What another rank wrote is compared with what it
may be before it becomes an address, a place or a count.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.counters import count_call, count_received, count_sent
from tokenyard.kernels.numba.llvm.atomics import load_acquire
from tokenyard.kernels.numba.llvm.pointers import INT64, pointer
from tokenyard.kernels.numba.signals import await_all, raise_signals
from tokenyard.wire import exchange_table as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import MAIL

Call = Callable[[], int]


@njit(nogil=True, cache=True)
def signal(table, kind):
    """Raise this rank's next signal of a kind."""
    words = pointer(table, INT64)
    epochs = pointer(words[at.EPOCHS], INT64)
    epochs[kind] += 1
    raise_signals(pointer(words[at.OUT_LINES], INT64)[kind], words[at.SIZE], epochs[kind])


@njit(nogil=True, cache=True)
def _all_signalled(table, kind):
    """Whether the others' signals of a kind come soon."""
    words = pointer(table, INT64)
    epoch = pointer(words[at.EPOCHS], INT64)[kind]
    lines, size = pointer(words[at.IN_LINES], INT64)[kind], words[at.SIZE]
    patience, yields, waits = words[at.PATIENCE], words[at.YIELDS], words[at.WAITS]
    return await_all(lines, size, epoch, 0, patience, yields, waits, -1, 0) == size


@njit(nogil=True, cache=True)
def count_rows(table, row_bytes, back):
    """Count a call that has ended. Its rows are those of the ledger, which a combine sends back."""
    words = pointer(table, INT64)
    rank, size, counters = words[at.RANK], words[at.SIZE], words[at.COUNTERS]
    if counters == 0:
        return
    sent = pointer(words[at.LEDGER], INT64)
    count_call(counters, words[at.BEGAN])
    for r in range(size):
        there, here = sent[rank * size + r], sent[r * size + rank]
        if back:
            there, here = here, there
        count_sent(counters, size, r, there, there * row_bytes)
        count_received(counters, size, r, here)


@njit(nogil=True, cache=True)
def passes(table, phase, kind):
    """Whether a call is past a phase, in which it waits for the others' signals of a kind."""
    words = pointer(table, INT64)
    if words[at.PHASE] == phase and _all_signalled(table, kind):
        words[at.PHASE] = phase + 1
    return words[at.PHASE] > phase


@njit(nogil=True, cache=True)
def box_to(table, rank):
    """The address of the box of a rank that this rank's next message goes to."""
    words = pointer(table, INT64)
    turn = (pointer(words[at.EPOCHS], INT64)[MAIL] + 1) & 1
    return pointer(pointer(words[at.OUT_BOXES], INT64)[turn], INT64)[rank]


@njit(nogil=True, cache=True)
def box_from(table, rank):
    """The address of the last message that came from a rank."""
    words = pointer(table, INT64)
    turn = pointer(words[at.EPOCHS], INT64)[MAIL] & 1
    return pointer(words[at.IN_BOXES], INT64)[turn] + rank * words[at.BOX_BYTES]


@njit(nogil=True, cache=True)
def same_call(theirs, mine):
    """Whether the messages at two addresses are of one call, theirs with good input."""
    told, own = pointer(theirs, INT64), pointer(mine, INT64)
    for i in range(say.TOKENS):
        if told[i] != own[i]:
            return False
    return told[say.WORST] == 0


@njit(nogil=True, cache=True)
def same_calls(table):
    """Whether all ranks make the call that this one makes, with good input."""
    words = pointer(table, INT64)
    for r in range(words[at.SIZE]):  # noqa: SIM110 - Numba compiles no generator here
        if not same_call(box_from(table, r), words[at.HEAD]):
            return False
    return True


@njit(nogil=True, cache=True)
def find_segment(table, rank, identity):
    """The address of what is known of a rank's segment: identity, address, size. 0 if nothing is,
    or if the rank has given back segments that this rank is yet to unmap.
    """
    words = pointer(table, INT64)
    drops = pointer(words[at.DROPS], INT64)[rank]
    if load_acquire(drops) != pointer(words[at.SEEN_DROPS], INT64)[rank]:
        return np.int64(0)
    entry = words[at.KNOWN] + rank * (at.NUM_KNOWN * at.KNOWN_WORDS * 8)
    for _ in range(at.NUM_KNOWN):
        if pointer(entry, INT64)[0] == identity:
            return entry
        entry += at.KNOWN_WORDS * 8
    return np.int64(0)


@njit(nogil=True, cache=True)
def open_ledger(table):
    """Find the parts of the ledger: after [R, R] and [R] words come lists of int32."""
    words = pointer(table, INT64)
    size = words[at.SIZE]
    words[at.STARTS] = words[at.LEDGER] + 8 * size * (size + 1)
    words[at.COPY_RANKS] = words[at.STARTS] + 4 * (words[at.NUM_TOKENS] + 1)
    words[at.COPY_SLOTS] = words[at.COPY_RANKS] + 4 * words[at.ROOM]
    words[at.SRC_IDX] = words[at.COPY_SLOTS] + 4 * words[at.ROOM]
