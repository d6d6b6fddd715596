"""Which ranks of this machine still live, as its process table says.

A broken connection does not say whose end it was, and a rank that is silent may be busy. Ranks that
see each other's processes need not guess: each tells the others its number, and when it began, so
that a number which is used again is not taken for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple


class Who(NamedTuple):
    """A process, as it tells others of itself."""

    processes: int  # the table of processes that it is in: containers have their own
    pid: int
    begun: int  # in the clock ticks of its machine; -1 where there is no such table


def who_am_i() -> Who:
    try:
        table = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return Who(-os.getpid(), os.getpid(), -1)  # a table of its own
    begun = _begun(os.getpid())
    return Who(table, os.getpid(), -1 if begun is None else begun)


class Watch:
    def __init__(self, rank: int, machines: Sequence[int], whos: Sequence[Who]) -> None:
        """The machine and the process of every rank, of which this is one; or nobody's."""
        self._tables = [(machine, who.processes) for machine, who in zip(machines, whos)]
        near = {who.pid for who, table in zip(whos, self._tables) if table == self._tables[rank]}
        begun = {pid: _begun(pid) for pid in near}  # once: virtual ranks are one process
        self._whos = {
            other: who
            for other, who in enumerate(whos)
            if self._tables[other] == self._tables[rank]
            if who.begun != -1 and begun[who.pid] is not None
        }

    def sees(self, rank: int) -> bool:
        return rank in self._whos

    def dead_ranks(self) -> tuple[int, ...]:
        return tuple(
            rank for rank, who in self._whos.items() if _begun(who.pid) not in (who.begun, None)
        )

    def neighbours(self, rank: int) -> list[int]:
        """The ranks that see each other's processes as this one does, and itself."""
        if not self._tables:
            return [rank]
        return [other for other, one in enumerate(self._tables) if one == self._tables[rank]]


def _begun(pid: int) -> int | None:
    """When a process began; -1 if it is dead, whether or not anybody has buried it. None where
    others' processes are hidden, as with hidepid.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rsplit(")", 1)[1].split()
    except (OSError, IndexError, ValueError):
        return None if _is_there(pid) else -1
    return -1 if state in "ZX" else int(fields[18])


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True
