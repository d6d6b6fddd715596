"""By how much the clocks of ranks differ, which are on several machines.

Ranks exchange what their clocks say, a few times. A message arrives after it was sent, whichever
clock says so: each bounds the difference from one side. The narrowest bounds of all rounds hold,
and the middle between them is at most half a round trip wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

_ROUNDS = 5


class Meeting(Protocol):
    rank: int
    size: int

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray: ...


def clocks_ahead(
    meeting: Meeting,
    machines: Sequence[int],
    now: Callable[[], int] = time.monotonic_ns,
) -> np.ndarray:
    """[R] nanoseconds by which each rank's clock is ahead of this one's. All ranks together.

    Ranks of one machine have one clock: where all are on one, nothing is exchanged.
    """
    rank, size = meeting.rank, meeting.size
    ahead_R = np.zeros(size, np.int64)
    if len(set(machines)) == 1:
        return ahead_R
    # clock_r - clock_me is at least `least`, since what r sent has come, and at most `most`, since
    # what this rank sent has come to r.
    least_R, most_R = np.full(size, -(1 << 62)), np.full(size, 1 << 62)
    for _ in range(_ROUNDS):
        sent = now()
        sent_R = meeting.exchange(np.full((size, 1), sent, np.int64), "Buffer (clocks)")[:, 0]
        came = now()
        came_R = meeting.exchange(np.full((size, 1), came, np.int64), "Buffer (clocks)")[:, 0]
        least_R = np.maximum(least_R, sent_R - came)
        most_R = np.minimum(most_R, came_R - sent)
    for other in range(size):
        if machines[other] != machines[rank]:
            ahead_R[other] = (least_R[other] + most_R[other]) // 2
    return ahead_R
