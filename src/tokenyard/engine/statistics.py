"""What a Buffer has done since it was made, or since it was last asked to forget: `Buffer.stats`.

Every stage has counters (`wire.counters`), to which compiled calls add by themselves: a call of few
tokens pays nothing in Python. Other calls are counted by the engine. Sums, and which bytes went by
which link, are made when somebody asks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenyard.runtime.waits import Waits
from tokenyard.topology import Placement, Topology
from tokenyard.transports import Transport
from tokenyard.transports.base import SharedMemoryTransport
from tokenyard.types import Flow
from tokenyard.wire.counters import BYTES, CALLS, FROM, HEAD, MOVING, NANOSECONDS, TO, counter_words

_MOST_STAGES = 32
ITSELF, SHARED_MEMORY, NETWORK = "itself", "shared memory", "network"
# How a call was made: in one compiled call, or step by step, with rows that travelled with the
# words of the agreement, or after them.
COMPILED, ENCLOSED, GENERAL = "compiled", "enclosed", "general"


class Statistics:
    def __init__(self, rank: int, links: Sequence[str], waits: Waits) -> None:
        """`links` says for each rank by what this one reaches it."""
        self.rank, self._size, self._links, self.waits = rank, len(links), links, waits
        self._words = np.zeros((_MOST_STAGES, counter_words(len(links))), np.int64)
        self._stages: dict[str, np.ndarray] = {}  # rows of these
        self._loads: dict[Placement, np.ndarray] = {}  # [L]
        # By stage and way. Compiled calls are not here: they are all others.
        self._step_by_step = Counter[tuple[str, str]]()

    def totals(self) -> np.ndarray:
        """A copy of all counters, one row for each stage that was used."""
        return self._words[: len(self._stages)].copy()

    def counters(self, stage: str) -> np.ndarray:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = self._words[len(self._stages)]
        return found

    def address(self, stage: str) -> int:
        """Where a compiled call of this stage counts."""
        return int(self.counters(stage).ctypes.data)

    def forget_loads(self) -> None:
        """The placement has changed: experts have other places."""
        self._loads.clear()

    def load(self, placement: Placement) -> np.ndarray:
        """[L]: pairs, or rows, that each of this rank's experts has got."""
        found = self._loads.get(placement)
        if found is None:
            num_local = len(placement.experts_of_rank[self.rank])
            found = self._loads[placement] = np.zeros(num_local, np.int64)
        return found

    def count(
        self,
        stage: str,
        begin: int,
        sent_R: Sequence[int] | np.ndarray,
        received_R: Sequence[int] | np.ndarray,
        row_bytes: int,
        way: str = GENERAL,
    ) -> None:
        """Count a call that began at this moment (`time.monotonic_ns`) and ends now."""
        words, size = self.counters(stage), self._size
        if way != COMPILED:
            self._step_by_step[stage, way] += 1
        words[CALLS] += 1
        words[NANOSECONDS] += time.monotonic_ns() - begin
        rows = words[HEAD:].reshape(3, size)
        rows[TO] += sent_R
        rows[FROM] += received_R
        rows[BYTES] += np.asarray(sent_R) * row_bytes

    def count_flow(
        self,
        stage: str,
        begin: int,
        flow: Flow,
        row_bytes: int,
        way: str = GENERAL,
        back: bool = False,
    ) -> None:
        """Count a call whose rows have gone along a flow, or back along it."""
        sent, received = flow.route.send_counts, flow.recv_counts
        if back:
            sent, received = received, sent
        self.count(stage, begin, sent, received, row_bytes, way)

    def moved(self, stage: str, nanoseconds: int) -> None:
        """The Buffer's thread has moved rows of a call for so long."""
        self.counters(stage)[MOVING] += nanoseconds

    def rows_of(self, stage: str) -> np.ndarray:
        """[3, R] of a stage: rows to and from each rank, and bytes to it."""
        return self.counters(stage)[HEAD:].reshape(3, self._size)

    def snapshot(self) -> dict[str, Any]:
        """The counters as plain values. `memory` and names are the Buffer's to add."""
        rows_to, num_bytes = np.zeros((2, self._size), np.int64)
        stages, ways, links = {}, {}, dict.fromkeys((ITSELF, SHARED_MEMORY, NETWORK), 0)
        for stage, words in self._stages.copy().items():  # a call may add one meanwhile
            if not words[CALLS]:
                continue
            rows = self.rows_of(stage)
            stages[stage] = {
                "calls": int(words[CALLS]),
                "seconds": int(words[NANOSECONDS] + words[MOVING]) / 1e9,
                "rows_sent": int(rows[TO].sum()),
                "rows_received": int(rows[FROM].sum()),
                "bytes_sent": int(rows[BYTES].sum()),
            }
            steps = {way: self._step_by_step[stage, way] for way in (ENCLOSED, GENERAL)}
            ways[stage] = {COMPILED: int(words[CALLS]) - sum(steps.values()), **steps}
            rows_to += rows[TO]
            num_bytes += rows[BYTES]
        for link, count in zip(self._links, num_bytes.tolist()):
            links[link] += count
        waited, times = self.waits.nanoseconds_R.tolist(), self.waits.times_R.tolist()
        return {
            "stages": stages,
            "ways": ways,
            "bytes": links,
            "rows_to": rows_to.tolist(),
            "bytes_to": num_bytes.tolist(),
            "waited_for": {rank: one / 1e9 for rank, one in enumerate(waited) if one},
            "came_last": {rank: one for rank, one in enumerate(times) if one},
            "expert_load": _most(self._loads.copy()).tolist(),
        }

    def reset(self) -> None:
        """Count from 0 again."""
        for words in (*self._stages.copy().values(), *self._loads.copy().values()):
            words[:] = 0
        self._step_by_step.clear()
        self.waits.reset()


def _most(loads: Mapping[Placement, np.ndarray]) -> np.ndarray:
    """The load of most rows: a Buffer as a rule serves layers of one number of experts."""
    return max(loads.values(), key=lambda load: int(load.sum()), default=np.zeros(0, np.int64))


def links_of(transport: Transport, topology: Topology) -> list[str]:
    """The link by which this rank reaches each rank."""
    rank, nodes = transport.rank, topology.node_of_rank
    links = [NETWORK] * transport.size
    if transport.node is not None:  # of all ranks
        links = [SHARED_MEMORY] * transport.size
    elif isinstance(transport, SharedMemoryTransport):
        for other in topology.ranks_of_node[nodes[rank]]:
            links[other] = SHARED_MEMORY
    links[rank] = ITSELF
    return links
