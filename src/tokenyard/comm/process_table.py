"""Which ranks of this machine still live, as its process table says.

A broken connection does not say which end broke, and a rank that is silent may be busy. Ranks that
see each other's processes need not guess: each tells the others its process number and when the
process began, so that a number that is used again is not taken for the old process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process, as it tells others of itself."""

    table: int  # the process table that it is in: containers have their own
    pid: int
    begun: int  # in the clock ticks of its machine; -1 where there is no such table


def this_process() -> ProcessId:
    try:
        table = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ProcessId(-os.getpid(), os.getpid(), -1)  # a table of its own
    begun = _begun(os.getpid())
    return ProcessId(table, os.getpid(), -1 if begun is None else begun)


class ProcessWatch:
    def __init__(self, rank: int, machines: Sequence[int], processes: Sequence[ProcessId]) -> None:
        """`rank` watches the others, given the machine and the process of every rank. Without
        processes nobody is watched.
        """
        self._tables = [(machine, one.table) for machine, one in zip(machines, processes)]
        near = {one.pid for one, table in zip(processes, self._tables) if self._near(table, rank)}
        begun = {pid: _begun(pid) for pid in near}  # once: virtual ranks are one process
        self._watched = {
            other: one
            for other, one in enumerate(processes)
            if self._near(self._tables[other], rank)
            if one.begun != -1 and begun[one.pid] is not None
        }

    def sees(self, rank: int) -> bool:
        return rank in self._watched

    def dead_ranks(self) -> tuple[int, ...]:
        return tuple(
            rank for rank, one in self._watched.items() if _begun(one.pid) not in (one.begun, None)
        )

    def neighbours(self, rank: int) -> list[int]:
        """The ranks that see the same processes as this rank, itself included."""
        if not self._tables:
            return [rank]
        return [other for other, table in enumerate(self._tables) if self._near(table, rank)]

    def _near(self, table: tuple[int, int], rank: int) -> bool:
        return table == self._tables[rank]


def _begun(pid: int) -> int | None:
    """When a process began; -1 if it is dead, whether or not its parent has waited for it. None
    where the processes of others are hidden, as with hidepid.
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
        return True  # a process of another user
    return True
