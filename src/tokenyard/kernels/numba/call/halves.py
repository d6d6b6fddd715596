"""What calls in slots have in common: two halves, to send and to receive.

Their mailbox is their own, so a block is written again only when all ranks have said that they have
read it. A rank that another one leaves out may read what is being written again. So it looks at the
other's flag once it has read (`left_out_or`).
"""

from __future__ import annotations

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.call.meet import box_from, leaves_out, left_out_or, post, signal
from tokenyard.kernels.numba.counters import count_call, count_received, count_sent
from tokenyard.kernels.numba.llvm.atomics import fence_stores
from tokenyard.kernels.numba.llvm.clock import now
from tokenyard.kernels.numba.llvm.pointers import INT64, pointer
from tokenyard.kernels.numba.signals import await_all, verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.counters import NANOSECONDS
from tokenyard.wire.signals import READ
from tokenyard.wire.verdicts import DONE, LATE

X, SCALES, IDS, WEIGHTS = range(4)  # columns; a block has no weights, a combine no scales
CAME, ROWS, ROOMS, FIRSTS = range(4)  # lists [R] in PLACES


@njit(nogil=True, cache=True)
def ranks_at(table, which):
    words = pointer(table, INT64)
    return pointer(words[at.PLACES] + 8 * which * words[at.SIZE], INT64)


@njit(nogil=True, cache=True)
def others_read(table, skip):
    """Whether all ranks but those that `skip` marks have read what this one has sent."""
    words = pointer(table, INT64)
    lines, epochs = pointer(words[at.IN_LINES], INT64), pointer(words[at.EPOCHS], INT64)
    size, patience, yields = words[at.SIZE], words[at.PATIENCE], words[at.YIELDS]
    waits = words[at.WAITS]
    return await_all(lines[READ], size, epochs[READ], 0, patience, yields, waits, -1, skip) == size


@njit(nogil=True, cache=True)
def send_message(table):
    """Post the message: the first half ends here."""
    words = pointer(table, INT64)
    head = pointer(words[at.HEAD], INT64)
    head[say.NUMBER], head[say.HANDLE] = words[at.NUMBER], words[at.HANDLE]
    head[say.TOKENS] = words[at.NUM_TOKENS]
    post(table, 0, 0)
    words[at.PHASE] = at.POSTED
    if words[at.LATER] != 0 and words[at.COUNTERS] != 0:
        pointer(words[at.COUNTERS], INT64)[NANOSECONDS] += now() - words[at.BEGAN]


@njit(nogil=True, cache=True)
def tell_read_all(table):
    """All rows of others are read: look at their flags, and say so."""
    words = pointer(table, INT64)
    size, skip = words[at.SIZE], pointer(words[at.LACKS], INT64)
    fence_stores()  # of loads too, where the machine needs that
    for r in range(size):
        out = leaves_out(table, r)
        skip[r] = out or pointer(box_from(table, r), INT64)[say.HOW] & say.LATER != 0
        found = left_out_or(DONE, table, r)
        if found != DONE and not out:
            return found
    signal(table, READ)
    words[at.PHASE] = at.READ
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def end_call(table):
    """End a call. One that tells of memory for the first time ends when all ranks have read it, but
    those that receive later: some other call of theirs may wait for this rank.
    """
    words = pointer(table, INT64)
    if words[at.AWAITS] != 0 and not others_read(table, words[at.LACKS]):
        return verdict(LATE, READ)
    words[at.PHASE], counters, size = at.OVER, words[at.COUNTERS], words[at.SIZE]
    if counters != 0:
        sent, came = pointer(words[at.TAKEN], INT64), ranks_at(table, CAME)
        count_call(counters, words[at.BEGAN])
        for r in range(size):
            num_bytes = sent[r] * (words[at.WIDTHS + X] + words[at.WIDTHS + SCALES])
            count_sent(counters, size, r, sent[r], num_bytes)
            count_received(counters, size, r, came[r])
    return np.int64(DONE)
