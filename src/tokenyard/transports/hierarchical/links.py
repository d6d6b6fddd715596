"""Links between nodes: ranks of one rail send to each other what other ranks of their nodes need.

`Topology` says which rails there are. A rank sends on its own rail only, to one rank of each other
node. It receives on every rail that it is on, for all ranks of its node. Every rail has two
communicators, made when the Buffer is opened, so that messages and rows may travel at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Exchange, Move
from tokenyard.runtime import memory
from tokenyard.topology import Topology

_IN_FLIGHT = 2  # chunks of a rail on their way at once: as many as gloo has threads


class ChunkStream(Protocol):
    """Rows that travel between nodes in chunks: what one rank sends and receives of them."""

    width: int  # bytes of a row

    def num_chunks(self, rail: int) -> int:
        """The number of chunks: the same on all ranks of a rail."""

    def counts(self, rail: int, chunk: int) -> tuple[list[int], list[int]]:
        """How many rows of a chunk go to each node, and how many come from each node."""

    def fill(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        """Write the rows to send, by node."""

    def meanwhile(self, chunk: int) -> None:
        """Do other work while a chunk is on its way."""

    def take(self, rail: int, chunk: int, rows_NB: Tensor) -> None:
        """Read the rows that came, by node."""


class Links:
    def __init__(
        self,
        communicator: Communicator,
        topology: Topology,
        name: str,
        look: Callable[[str], None],
    ) -> None:
        """All ranks together. `name` is new for every Buffer of the group. `look`, which long waits
        call, raises the failures that other ranks of the node have noticed.
        """
        self.own = topology.place(communicator.rank)
        self.numbers = topology.rails_of(communicator.rank)
        self._messages: dict[int, Communicator] = {}
        self._rows: dict[int, Communicator] = {}
        if topology.num_nodes == 1:
            return
        for rail in self.numbers:
            members = topology.rail(rail)
            self._messages[rail] = communicator.part(members, f"{name}/rail-{rail}/messages")
            self._rows[rail] = communicator.part(members, f"{name}/rail-{rail}/rows")
            self._messages[rail].watch(look)
            self._rows[rail].watch(look)

    def exchange(
        self, parcels: Sequence[np.ndarray], sizes: dict[int, list[int]], stage: str
    ) -> dict[int, list[np.ndarray]]:
        """Send bytes to each node, on this rank's own rail. Returns what came, by rail and node;
        `sizes` says how many bytes come from each node on each rail.
        """
        answer = {}
        for rail in self.numbers:
            out = torch.zeros(sum(sizes[rail]), 1, dtype=torch.uint8, device="cpu")
            sent, counts = out[:0], [0] * len(parcels)
            if rail == self.own:
                sent = torch.from_numpy(np.concatenate(parcels))[:, None]
                counts = [len(parcel) for parcel in parcels]
            if rail in self._messages:
                self._messages[rail].all_to_all(Exchange(out, sent, sizes[rail], counts, stage))
            answer[rail] = np.split(out.numpy()[:, 0], np.cumsum(sizes[rail])[:-1])
        return answer

    def start(self, rail: int, exchange: Exchange) -> Move:
        """Begin to exchange messages on a rail. What this returns waits for the end."""
        return self._messages[rail].start(exchange)

    def stream(self, stream: ChunkStream, stage: str) -> None:
        """Send and receive all chunks. A few are on their way while this rank fills and takes
        others, so that the network always has work.
        """
        ends: deque[Move] = deque()
        for chunk in range(max(map(stream.num_chunks, self.numbers))):
            for rail in self.numbers:
                if chunk < stream.num_chunks(rail):
                    ends.append(self._start(stream, rail, chunk, stage))
            stream.meanwhile(chunk)
            while len(ends) > _IN_FLIGHT * len(self.numbers):
                ends.popleft()()
        while ends:
            ends.popleft()()

    def _start(self, stream: ChunkStream, rail: int, chunk: int, stage: str) -> Move:
        counts, out_counts = stream.counts(rail, chunk)
        sent = memory.empty(sum(counts), stream.width)
        out = memory.empty(sum(out_counts), stream.width)
        stream.fill(rail, chunk, sent)
        arrive: Move | None = None
        if rail in self._rows:
            arrive = self._rows[rail].start(Exchange(out, sent, out_counts, counts, stage))

        def end() -> None:
            if arrive is not None:
                arrive()
            stream.take(rail, chunk, out)

        return end

    def close(self) -> None:
        for communicator in (*self._messages.values(), *self._rows.values()):
            communicator.close()
