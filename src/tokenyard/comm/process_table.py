"""Which ranks of this machine still live, as its process table says.

A broken connection does not say which end broke, and a rank that is silent may be busy. Ranks that
see each other's processes need not guess: each tells the others its process number and when the
process began, so that a number that is used again is not taken for the old process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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
    def __init__(
        self,
        rank: int,
        machines: Sequence[int] | np.ndarray,
        processes: Sequence[ProcessId] | np.ndarray,
    ) -> None:
        """`rank` watches the others, given the machine and the process of every rank. Without
        processes nobody is watched.
        """
        ids = np.array(processes, np.int64).reshape(-1, len(ProcessId._fields))
        tables, self._pids, self._begun = ids.T
        self._tables = np.stack([np.array(machines, np.int64)[: len(ids)], tables], axis=1)
        self._watched = np.zeros(len(ids), bool)
        if len(ids):
            self._watched = self._near(rank) & (self._begun != -1)
        for pid in self._watched_pids():
            if _begun(pid) is None:
                self._watched &= self._pids != pid

    def _watched_pids(self) -> list[int]:
        """Each watched process once: virtual ranks are one process."""
        return np.unique(self._pids[self._watched]).tolist()

    def sees(self, rank: int) -> bool:
        return rank < len(self._watched) and bool(self._watched[rank])

    def dead_ranks(self) -> tuple[int, ...]:
        is_dead = np.zeros(len(self._watched), bool)
        for pid in self._watched_pids():
            begun = _begun(pid)
            if begun is not None:
                is_dead |= self._watched & (self._pids == pid) & (self._begun != begun)
        return tuple(np.flatnonzero(is_dead).tolist())

    def neighbours(self, rank: int) -> list[int]:
        """The ranks that see the same processes as this rank, itself included."""
        return np.flatnonzero(self._near(rank)).tolist() if len(self._tables) else [rank]

    def _near(self, rank: int) -> np.ndarray:
        """[R] bool."""
        return (self._tables == self._tables[rank]).all(1)


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
