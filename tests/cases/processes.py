"""Processes that all tests of a run share: starting them takes longer than most tests do.

Tests that kill ranks, or that measure a process from its start, make `Processes` of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cases.clock import scaled
from tokenyard.testing import Exited, Processes

MOST = 16  # processes that wait for work, each with torch in memory


class Pool(Processes):
    """Processes that know whether they can take another job."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.is_usable = True

    def run(self, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        self.is_usable = False  # unless all ranks end their job as they should
        results = super().run(job, *args, **options)
        self.is_usable = not any(isinstance(one, Exited) for one in results)
        return results


class Pools:
    """processes(3): three processes, those of an earlier test if they can be used."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}  # the last one used at the end

    def __call__(self, num_ranks: int, timeout: float = 240.0) -> Processes:
        """A job on them may take `timeout` seconds on an idle machine."""
        pool = self._pools.pop(num_ranks, None)
        if pool is not None and not pool.is_usable:
            pool.close()
            pool = None
        if pool is None:
            self._make_room(num_ranks)
            pool = Pool(num_ranks)
        self._pools[num_ranks] = pool
        pool.timeout = scaled(timeout)
        return pool

    def _make_room(self, num_ranks: int) -> None:
        """End the processes that were not used for longest."""
        while self._pools and sum(self._pools) + num_ranks > MOST:
            self._pools.pop(next(iter(self._pools))).close()

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()
