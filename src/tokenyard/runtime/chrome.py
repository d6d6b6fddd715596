"""A trace as Chrome and Perfetto read it: JSON, with a process for each rank.

A *part* is what one process of the run has recorded, in plain values:

    {"machine": 123, "pid": 7, "host": "a", "tracks": [{"buffer": 9, "rank": 0, "num_ranks": 2,
      "ahead": 0, "calls": [[stage, begin, end, number, rows to, rows from, bytes to], ...],
      "moves": [[stage, begin, end], ...], "waits": [[rank, begin, end], ...]}, ...]}

Times are nanoseconds of the process's own clock, and `ahead` is by how many of them the clock of
the Buffer's rank 0 is ahead of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

CALLS, MOVES, WAITS = range(3)  # threads of a rank: calls, moves of the Buffer's thread, waits
_NAMES = ("calls", "moves", "waits outside calls")
_THREADS = 16  # of one Buffer: the last are lanes of waits that overlap


def chrome_trace(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One timeline of all parts."""
    parts = list(parts)
    ranks = sorted(
        (track["rank"], part["machine"], part["pid"], place)
        for place, part in enumerate(parts)
        for track in part["tracks"]
    )
    number_of = {key: number for number, key in enumerate(dict.fromkeys(ranks))}
    buffers = {
        buffer: number
        for number, buffer in enumerate(
            sorted({track["buffer"] for part in parts for track in part["tracks"]})
        )
    }
    events: list[dict[str, Any]] = []
    sends: dict[tuple[Any, ...], dict[str, Any]] = {}
    receives: dict[tuple[Any, ...], dict[str, Any]] = {}
    named: set[tuple[int, int]] = set()
    for place, part in enumerate(parts):
        for track in part["tracks"]:
            pid = number_of[track["rank"], part["machine"], part["pid"], place]
            base = _THREADS * buffers[track["buffer"]]
            made = _events_of(track, pid, base)
            for one in made:
                if (pid, one["tid"]) not in named:
                    named.add((pid, one["tid"]))
                    events += _names(part, track, pid, one["tid"], len(buffers) > 1)
            events += made
            _find_flows(track, pid, base, sends, receives)
    for number, key in enumerate(sorted(sends.keys() & receives.keys())):
        for one in (sends[key], receives[key]):
            events.append({**one, "name": "rows", "cat": "rows", "id": number})
    begin = min((one["ts"] for one in events if "ts" in one), default=0.0)
    for one in events:
        if "ts" in one:
            one["ts"] = round(one["ts"] - begin, 3)
    events.sort(key=lambda one: (one["ph"] != "M", one.get("ts", 0), -one.get("dur", 0)))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events_of(track: dict[str, Any], pid: int, base: int) -> list[dict[str, Any]]:
    ahead, made = track["ahead"], []

    def slice_of(name: str, thread: int, begin: int, end: int, **args: Any) -> None:
        made.append(
            {
                "name": name,
                "cat": "tokenyard",
                "ph": "X",
                "ts": (begin + ahead) / 1e3,
                "dur": (end - begin) / 1e3,
                "pid": pid,
                "tid": base + thread,
                "args": args,
            }
        )

    for stage, begin, end, number, to, come, sent in track["calls"]:
        told = {"number": number} if number >= 0 else {}
        rows = {"rows_sent": sum(to), "rows_received": sum(come), "bytes_sent": sum(sent)}
        if any(to) or any(come):
            told |= rows | {"rows_to": to, "rows_from": come}
        slice_of(stage, CALLS, begin, end, **told)
    for stage, begin, end in track["moves"]:
        slice_of(stage, MOVES, begin, end)
    begins = [call[1] for call in track["calls"]]
    free = [0] * (_THREADS - WAITS)  # when each lane of waits is free again
    for rank, begin, end in sorted(track["waits"], key=lambda wait: wait[1]):
        thread, inside = CALLS, bisect_right(begins, begin) - 1
        if inside < 0 or end > track["calls"][inside][2]:
            lane = next((i for i, until in enumerate(free) if until <= begin), len(free) - 1)
            thread, free[lane] = WAITS + lane, end
        slice_of(f"wait for rank {rank}", thread, begin, end, rank=rank)
    return made


def _find_flows(
    track: dict[str, Any],
    pid: int,
    base: int,
    sends: dict[tuple[Any, ...], dict[str, Any]],
    receives: dict[tuple[Any, ...], dict[str, Any]],
) -> None:
    """Where rows leave this rank, and where they reach it, by Buffer, call, sender and receiver."""
    mine, ahead = track["rank"], track["ahead"]
    for stage, begin, end, number, to, come, _ in track["calls"]:
        if number < 0:
            continue
        where = {"pid": pid, "tid": base + CALLS}
        for rank, count in enumerate(to):
            if count and rank != mine:
                key = track["buffer"], stage, number, mine, rank
                sends[key] = {"ph": "s", "ts": (begin + ahead) / 1e3, **where}
        for rank, count in enumerate(come):
            if count and rank != mine:
                key = track["buffer"], stage, number, rank, mine
                receives[key] = {"ph": "f", "bp": "e", "ts": (end - 1 + ahead) / 1e3, **where}


def _names(
    part: dict[str, Any], track: dict[str, Any], pid: int, tid: int, several: bool
) -> list[dict[str, Any]]:
    """What a rank and one of its threads are called."""
    buffer, thread = divmod(tid, _THREADS)
    what = _NAMES[min(thread, WAITS)] + (f" of Buffer {buffer}" if several else "")
    rank = {"name": f"rank {track['rank']} ({part['host']}, process {part['pid']})"}
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": tid, "args": rank},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": pid},
        },
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": what}},
    ]


def rows_between(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> list[list[int]]:
    """By how much counters have grown; from 0 where somebody has reset them meanwhile."""
    return [
        [new - old if new >= old else new for old, new in zip(*both)] for both in zip(before, after)
    ]
