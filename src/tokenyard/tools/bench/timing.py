"""Rounds in which all ways take turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tokenyard.tools.bench.case import Way

TURN = 0.004  # seconds: ranks leave a barrier up to 0.3 ms apart, so short calls are repeated
MOST_CALLS = 200
WARM_UP = 2  # calls of each way before the first round


class Alone:
    """Measures in this process, for itself."""

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def most(self, value: float) -> float:
        return value


class Together(Alone):
    """Measures on all ranks at once. A turn takes as long as its slowest rank."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def barrier(self) -> None:
        dist.barrier(self.group)

    def most(self, value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.item()


@dataclass(frozen=True)
class Timed:
    """Seconds of a call: the median of the rounds, and the quartiles around it."""

    median: float
    low: float
    high: float
    rounds: int
    calls: int  # of a round

    @classmethod
    def of(cls, seconds: list[float], calls: int) -> Timed:
        """
        >>> Timed.of([1.0, 2.0, 3.0, 4.0, 5.0], calls=1)
        Timed(median=3.0, low=2.0, high=4.0, rounds=5, calls=1)
        """
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds), calls)


def _turn(way: Way, peers: Alone, calls: int) -> float:
    """Seconds of a call, on the slowest rank."""
    peers.barrier()
    if way.after is None:
        begin = time.perf_counter()
        for _ in range(calls):
            way.call()
        return peers.most((time.perf_counter() - begin) / calls)
    begin = time.perf_counter()
    got = way.call()
    seconds = time.perf_counter() - begin
    way.after(got)
    return peers.most(seconds)


def measure(ways: Mapping[str, Way], peers: Alone, rounds: int) -> dict[str, Timed]:
    """Every way in every round, forwards and backwards by turns."""
    calls = {}
    for name, way in ways.items():
        shortest = min(_turn(way, peers, 1) for _ in range(WARM_UP))
        several = min(MOST_CALLS, int(TURN / max(shortest, 1e-9)))
        calls[name] = max(1, several if way.after is None else 1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in ways if number % 2 == 0 else reversed(list(ways)):
            seconds[name].append(_turn(ways[name], peers, calls[name]))
    return {name: Timed.of(taken, calls[name]) for name, taken in seconds.items()}
