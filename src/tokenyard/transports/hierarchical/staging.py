"""Memory of a node for rows that travel with the words of the agreement (see `enclosed`).

Each rank of the node has a segment, which all of them map. For each of two turns it holds:

    staged    rows of this rank for its node: the parcel of a dispatch, or the rows of a combine
              after a header of `nodes_table.HEADER` int64s
    received  for each rail that this rank is on and each other node: a message, then what it
              encloses
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.runtime import memory
from tokenyard.shm.node import SharedNode
from tokenyard.topology import Topology
from tokenyard.wire.columns import LINE


class Staging:
    soon = 0.1  # seconds that a combine waits for its neighbours' rows before the agreement

    def __init__(
        self,
        node: SharedNode,
        topology: Topology,
        rank: int,
        words_of_node: Sequence[int],
        enclosed: int,
        staged: int,
        stage: str,
    ) -> None:
        """All ranks of the node together. A message to a node has so many bytes of words, and may
        enclose `enclosed` bytes; a rank may stage `staged` bytes. A node that has no memory to
        share, or needs none, takes messages in memory of its own.
        """
        self.enclosed, self.staged = enclosed, staged
        home = topology.node_of_rank[rank]
        members, words = topology.ranks_of_node[home], words_of_node[home]
        # By node: how many bytes may come from it on a rail.
        self.rooms = [words + enclosed] * topology.num_nodes
        self.rooms[home] = 0
        self.begin_of_node = list(accumulate(self.rooms, initial=0))
        rail_bytes = self.begin_of_node[-1]
        most_rails = max(len(topology.rails_of(one)) for one in members)
        turn_bytes = staged + most_rails * rail_bytes
        begins_L, arrays = np.zeros(len(members), np.int64), []
        if enclosed:
            with suppress(SharedMemoryError):
                arrays = node.share_arrays(2 * turn_bytes, stage, "staging")
                begins_L[:] = [array.ctypes.data for array in arrays]
        self.is_shared = bool(arrays)
        self._place = place = topology.place(rank)
        own = arrays[place] if arrays else memory.empty_array(2 * turn_bytes, np.uint8)
        begins_L[place] = own.ctypes.data
        self._own = own
        # By turn: [L] where each local rank's staged rows are, [R] where the parcel of each rank
        # is, and, by rail, where messages to this rank land.
        self.staged_at = [begins_L, begins_L + turn_bytes]
        self.parcels = [np.zeros(topology.num_ranks, np.int64) for _ in range(2)]
        self.received: list[list[Tensor]] = []
        for turn, (at_L, parcels_R) in enumerate(zip(self.staged_at, self.parcels)):
            for member, at in zip(members, at_L.tolist()):
                parcels_R[member] = at
                rails = topology.rails_of(member)
                for rail, source in topology.upstream(member):
                    message = self.begin_of_node[topology.node_of_rank[source]]
                    before = staged + rails.index(rail) * rail_bytes + message
                    parcels_R[source] = at + before + words
            # Slices, which keep the memory: after a failure gloo may receive into it long after
            # the Buffer is closed.
            begin = turn * turn_bytes + staged
            num_rails = len(topology.rails_of(rank))
            messages = torch.from_numpy(own[begin : begin + num_rails * rail_bytes])
            self.received.append(list(messages.view(num_rails, rail_bytes, 1)))
        self.words = self._find_words(topology, rank, words_of_node)
        # The messages of this rank, by rail, each to the end of its line.
        most_sent = sum(words_of_node) + topology.num_nodes * (enclosed + LINE)
        self.sent = [memory.empty(most_sent) for _ in topology.rails_of(rank)]

    def _find_words(
        self, topology: Topology, rank: int, words_of_node: Sequence[int]
    ) -> list[list[np.ndarray]]:
        """For each turn the words of each partner, for the ranks of this node."""
        rails, words = topology.rails_of(rank), words_of_node[topology.node_of_rank[rank]]
        both: list[list[np.ndarray]] = [[], []]
        for received, found in zip(self.received, both):
            for rail, source in topology.upstream(rank):
                out = received[rails.index(rail)].numpy()[:, 0]
                begin = self.begin_of_node[topology.node_of_rank[source]]
                found.append(out[begin : begin + words])
        return both

    def refuse(self, turn: int) -> None:
        """Say that this rank stages no rows for a combine."""
        ctypes.c_int64.from_address(int(self.staged_at[turn][self._place])).value = -1
