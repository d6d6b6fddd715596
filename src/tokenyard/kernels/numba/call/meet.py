"""Messages and signals of a call: every rank posts one message, and hears those of all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokenyard.kernels.numba.caching import njit
from tokenyard.kernels.numba.counters import count_call, count_received, count_sent
from tokenyard.kernels.numba.llvm.atomics import load_acquire
from tokenyard.kernels.numba.llvm.pointers import INT64, copy_bytes, pointer
from tokenyard.kernels.numba.signals import await_all, raise_signals, verdict
from tokenyard.wire import call as at
from tokenyard.wire import message as say
from tokenyard.wire.signals import MAIL, READ
from tokenyard.wire.verdicts import DIFFERS, DONE, LATE, MASKED, MORE_MEMORY, NO_MEMORY, STRAY

Call = Callable[[], int]


@njit(nogil=True, cache=True)
def signal(table, kind):
    """Raise this rank's next signal of a kind."""
    words = pointer(table, INT64)
    epochs = pointer(words[at.EPOCHS], INT64)
    epochs[kind] += 1
    raise_signals(pointer(words[at.OUT_LINES], INT64)[kind], words[at.SIZE], epochs[kind])


@njit(nogil=True, cache=True)
def passes(table, phase, kind):
    """Whether a call is past a phase, in which it waits for the others' signals of a kind."""
    words = pointer(table, INT64)
    if words[at.PHASE] == phase:
        epoch = pointer(words[at.EPOCHS], INT64)[kind]
        lines, size = pointer(words[at.IN_LINES], INT64)[kind], words[at.SIZE]
        patience, yields, waits = words[at.PATIENCE], words[at.YIELDS], words[at.WAITS]
        masked = words[at.MASKED]
        if await_all(lines, size, epoch, 0, patience, yields, waits, -1, masked) == size:
            words[at.PHASE] = phase + 1
    return words[at.PHASE] > phase


@njit(nogil=True, cache=True)
def leaves_out(table, rank):
    """Whether this rank goes on without a rank."""
    masked = pointer(table, INT64)[at.MASKED]
    return masked != 0 and pointer(masked, INT64)[rank] != 0


@njit(nogil=True, cache=True)
def left_out_or(what, table, rank):
    """MASKED if a rank leaves this one out, and may have written over what this one reads. Else
    the verdict that says `what`.
    """
    flags = pointer(table, INT64)[at.FLAGS]
    if flags != 0 and load_acquire(pointer(flags, INT64)[rank]) != 0:
        return verdict(MASKED, rank)
    return np.int64(DONE) if what == DONE else verdict(what, rank)


@njit(nogil=True, cache=True)
def box_from(table, rank):
    """The address of the last message that came from a rank."""
    words = pointer(table, INT64)
    turn = pointer(words[at.EPOCHS], INT64)[MAIL] & 1
    return pointer(words[at.IN_BOXES], INT64)[turn] + rank * words[at.BOX_BYTES]


@njit(nogil=True, cache=True)
def post(table, first, count):
    """Send HEAD to every rank, and behind it `count` of the words that TOLD has for that rank."""
    words = pointer(table, INT64)
    # Not the boxes of the last message, which some rank may still read. Nobody reads these: every
    # rank has posted since it read them.
    turn = (pointer(words[at.EPOCHS], INT64)[MAIL] + 1) & 1
    boxes, head = pointer(pointer(words[at.OUT_BOXES], INT64)[turn], INT64), words[at.HEAD]
    told = words[at.TOLD] + 8 * first
    for r in range(words[at.SIZE]):
        copy_bytes(boxes[r], head, 8 * say.PAYLOAD)
        copy_bytes(boxes[r] + 8 * say.PAYLOAD, told + 8 * r * words[at.TOLD_WORDS], 8 * count)
    signal(table, MAIL)


@njit(nogil=True, cache=True)
def same_call(theirs, mine):
    """Whether the messages at two addresses are of one call, theirs with good input."""
    told, own = pointer(theirs, INT64), pointer(mine, INT64)
    for i in range(say.TOKENS):  # noqa: SIM110 - Numba compiles no generator here
        if told[i] != own[i]:
            return False
    return True


@njit(nogil=True, cache=True)
def meet(table):
    """Post the message, and hear all others: DONE once all ranks make the call that this one makes,
    and HEARD has what they told. What does not fit a message follows in others, since ranks must
    know first that they mean the same.
    """
    words = pointer(table, INT64)
    size, width = words[at.SIZE], words[at.TOLD_WORDS]
    room = words[at.BOX_BYTES] // 8 - say.PAYLOAD
    while words[at.PHASE] < at.MET:
        first = words[at.PART] * room
        count = min(room, width - first)
        if words[at.PHASE] == at.START:
            post(table, first, count)
            words[at.PHASE] = at.POSTED
        if not passes(table, at.POSTED, MAIL):
            return verdict(LATE, MAIL)
        for r in range(size):
            if leaves_out(table, r):
                continue
            box = box_from(table, r)
            if first == 0 and not same_call(box, words[at.HEAD]):
                words[at.PHASE] = at.POSTED  # it may go on without the rank
                return left_out_or(DIFFERS, table, r)
            copy_bytes(words[at.HEARD] + 8 * (r * width + first), box + 8 * say.PAYLOAD, 8 * count)
        if first + count < width:
            words[at.PART] += 1
            words[at.PHASE] = at.START
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def settle_memory(table):
    """Where ranks have met and some LACKS memory, which all see: let it take more, and hear of all
    what they have. NO_MEMORY if one has none then, else DONE.
    """
    words = pointer(table, INT64)
    size, lacks = words[at.SIZE], pointer(words[at.LACKS], INT64)
    if words[at.PHASE] == at.MET:
        total = np.int64(0)
        for r in range(size):
            total += lacks[r]
        if total == 0:
            return np.int64(DONE)
        words[at.PHASE] = at.ASKED
        if lacks[words[at.RANK]] != 0:
            return verdict(MORE_MEMORY, 0)
    if words[at.PHASE] == at.ASKED:
        post(table, 0, 0)
        words[at.PHASE] = at.OFFERED
    if not passes(table, at.OFFERED, MAIL):
        return verdict(LATE, MAIL)
    for r in range(size):
        # All ranks have met in this call: no correct rank posts another one now.
        if not same_call(box_from(table, r), words[at.HEAD]):
            return verdict(STRAY, r)
        if pointer(box_from(table, r), INT64)[say.ROOM] == say.NO_MEMORY:
            return verdict(NO_MEMORY, r)
    return np.int64(DONE)


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
def tell_read(table, num_columns, back):
    """Count a call that has read its rows, and tell the ranks that wait until it has."""
    count_rows(table, num_columns, back)
    signal(table, READ)
    pointer(table, INT64)[at.PHASE] = at.READ


@njit(nogil=True, cache=True)
def end_read(table):
    """End a call once all ranks have read what this one awaits: DONE, or LATE."""
    words = pointer(table, INT64)
    if words[at.AWAITS] != 0 and not passes(table, at.READ, READ):
        return verdict(LATE, READ)
    words[at.PHASE] = at.OVER
    return np.int64(DONE)


@njit(nogil=True, cache=True)
def count_rows(table, num_columns, back):
    """Count a call that has ended. Its rows are those of the ledger, which a combine sends back."""
    words = pointer(table, INT64)
    rank, size, counters = words[at.RANK], words[at.SIZE], words[at.COUNTERS]
    if counters == 0:
        return
    row_bytes = np.int64(0)
    for c in range(num_columns):
        row_bytes += words[at.WIDTHS + c]
    sent = pointer(words[at.LEDGER], INT64)
    count_call(counters, words[at.BEGAN])
    for r in range(size):
        there, here = sent[rank * size + r], sent[r * size + rank]
        if back:
            there, here = here, there
        count_sent(counters, size, r, there, there * row_bytes)
        count_received(counters, size, r, here)
