"""Which rank the others waited for, from what `Buffer.stats()` says on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A rank stands out if others waited for it this many times as long as for any other, and for this
# share of the time that they spent in calls.
TIMES = 2.0
SHARE = 0.1


@dataclass(frozen=True)
class SlowRank:
    rank: int
    waited: float  # seconds, the longest that any other rank waited for it
    share: float  # of the seconds that the waiting rank spent in calls

    def __str__(self) -> str:
        percent = f"{self.share:.0%} of the time of their calls"
        return f"ranks waited most for rank {self.rank}: {self.waited:.3g} s, {percent}"


def find_slow_rank(waited_for: Sequence[Mapping[int, float]], seconds: float) -> SlowRank | None:
    """waited_for[r][s]: how many seconds rank r waited for rank s, of so many seconds in calls.

    >>> find_slow_rank([{1: 0.01}, {0: 0.02}], seconds=1.0) is None
    True
    >>> print(find_slow_rank([{1: 0.01, 2: 0.5}, {0: 0.02, 2: 0.6}, {0: 0.01}], seconds=1.0))
    ranks waited most for rank 2: 0.6 s, 60% of the time of their calls
    """
    longest = [0.0] * len(waited_for)
    for rank, others in enumerate(waited_for):
        for other, waited in others.items():
            if other != rank:
                longest[other] = max(longest[other], waited)
    if len(longest) < 2 or seconds <= 0:
        return None
    second, most = sorted(longest)[-2:]
    if most < TIMES * second or most < SHARE * seconds:
        return None
    return SlowRank(longest.index(most), most, min(1.0, most / seconds))
