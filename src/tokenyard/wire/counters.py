"""What a Buffer counts: words of int64, which compiled calls and the engine both write.

Counters of a stage are CALLS, NANOSECONDS and MOVING, and then, for each of R ranks, the rows that
went there, the rows that came from there, and the bytes that went there: word
HEAD + TO * R + rank, and so on. A call that is given the address 0 counts nothing.

Waits are, for each of R ranks, the nanoseconds that this rank waited for it, and how often it came
last; then how many waits there were, and a log of the last LOG of them: whom for, begin, end.
"""

from __future__ import annotations

CALLS = 0
NANOSECONDS = 1  # from a call's begin to its end
MOVING = 2  # nanoseconds on the Buffer's thread, after the call has returned
HEAD = 3
TO, FROM, BYTES = range(3)

LOG = 256
LOG_WORDS = 3  # whom for, begin, end


def counter_words(num_ranks: int) -> int:
    return HEAD + 3 * num_ranks


def wait_words(num_ranks: int) -> int:
    return 2 * num_ranks + 1 + LOG * LOG_WORDS
