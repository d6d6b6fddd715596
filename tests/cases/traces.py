"""Parts of traces, as processes leave them."""

from __future__ import annotations

from typing import Any


def part(rank: int, ahead: int, pid: int) -> dict[str, Any]:
    """Of a rank whose clock is `ahead` behind that of rank 0, in a call at 1000 ns of that one."""
    rows = [[0, 3], [0, 3], [0, 99]] if rank == 0 else [[3, 0], [3, 0], [99, 0]]
    begin = 1000 - ahead
    return {
        "machine": pid,
        "pid": pid,
        "host": f"host{pid}",
        "tracks": [
            {
                "buffer": 5,
                "rank": rank,
                "num_ranks": 2,
                "ahead": ahead,
                "calls": [["dispatch", begin, begin + 500, 1, *rows]],
                "moves": [],
                "waits": [[1 - rank, begin + 100, begin + 200]],
            }
        ],
    }
