"""What Buffer chooses here, and why: two ranks open one, and tell what it logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from tokenyard import Buffer
from tokenyard.testing import RankFailed, run_processes
from tokenyard.tools.doctor.findings import BAD, OK, WARN, Finding

PART = "choice"
_SECONDS = 120.0
_BETWEEN = (
    "Between machines: hierarchical over gloo, rows once to each machine (docs/guide/multi_node.md)"
)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


def choose(group: Any) -> tuple[str, list[tuple[int, str]]]:
    """On each rank: the transport that Buffer took, and what the library logged."""
    log, heard = logging.getLogger("tokenyard"), _Lines()
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    log.propagate = False
    with Buffer(group, timeout=30.0) as buffer:
        return str(buffer), heard.lines


def look() -> Iterator[Finding]:
    try:
        told = run_processes(choose, 2, timeout=_SECONDS)
    except (RankFailed, TimeoutError, OSError) as error:
        last = str(error).strip().splitlines()[-1]
        advice = "look at the findings above, and run `tokenyard selftest` for the whole error"
        yield Finding(BAD, PART, f"two ranks could not open a Buffer: {last}", advice)
        return
    (way, lines), (_, others) = told
    yield from judge(way, [*lines, *others])


def judge(buffer: str, lines: list[tuple[int, str]]) -> Iterator[Finding]:
    """What it means: the Buffer of rank 0, and the lines of both ranks."""
    way = buffer.split(" on ")[-1].rstrip(">")
    why = next((line for _, line in lines if line.startswith("transport: ")), "")
    because = why.partition("since ")[2]
    what = f"two ranks of this machine take: {way}" + (f", since {because}" if because else "")
    if "direct" in way:
        yield Finding(OK, PART, what)
        yield Finding(OK, PART, _BETWEEN)
        return
    warned = dict.fromkeys(
        line
        for number, line in lines
        if number >= logging.WARNING and not line.startswith("transport: ")
    )
    advice = "; ".join(warned) or "see the findings about shared memory above"
    yield Finding(WARN, PART, f"{what}; direct is several times faster", advice)


def skipped() -> Iterator[Finding]:
    yield Finding(
        WARN,
        PART,
        "not tried, for want of a network: a Buffer of one rank works, of several does not",
        "mend the network first",
    )
