"""What compiled steps of a call between nodes read, and the exchange between two of them.

`EnclosedSteps` keeps the words of `wire.nodes_table` that a Buffer has, and those of its staging.
The messages are those of `enclosed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from tokenyard.shm.node import SharedNode
from tokenyard.topology import Topology
from tokenyard.transports.hierarchical.enclosed import Enclosures
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.messages import WIDTH, Message, swap
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.wire import int64s
from tokenyard.wire import nodes_table as at
from tokenyard.wire.signals import STAGED


class EnclosedSteps:
    def __init__(
        self,
        node: SharedNode,
        links: Links,
        enclosures: Enclosures,
        topology: Topology,
        rank: int,
    ) -> None:
        self._node, self._links, self.enclosures = node, links, enclosures
        self._topology, self._home = topology, topology.node_of_rank[rank]
        nodes, self._mine = topology.ranks_of_node, topology.upstream(rank)
        self._locals = nodes[self._home]
        upstream = [topology.upstream(one) for one in self._locals]
        places = 1 + max(map(len, upstream))
        self.slots_R = np.zeros(topology.num_ranks, np.int64)
        for local, sources in enumerate(upstream):
            first = local * places
            self.slots_R[self._locals[local]] = first
            for place, (_, source) in enumerate(sources, start=1):
                self.slots_R[source] = first + place
        self._relayed_LPW = np.zeros((len(self._locals), places, WIDTH), np.int64)
        relays = np.full((len(links.numbers), len(nodes)), -1, np.int64)
        for rail, source in self._mine:
            relays[links.numbers.index(rail), topology.node_of_rank[source]] = source
        self._counts, self._rows = np.zeros_like(relays), np.zeros_like(relays)
        firsts = np.cumsum([0, *map(len, nodes)])
        self._kept: list[np.ndarray] = []
        words = self.words = int64s.new(at.TABLE_WORDS)
        words[at.RANK], words[at.SIZE] = rank, topology.num_ranks
        words[at.HOME], words[at.NUM_NODES] = self._home, len(nodes)
        words[at.NUM_RANKS], words[at.PLACE] = len(self._locals), topology.place(rank)
        words[at.NUM_PARTNERS], words[at.NUM_PLACES] = len(self._mine), places
        words[at.RANKS] = self._keep(self._kept, [one for ranks in nodes for one in ranks])
        words[at.FIRSTS] = self._keep(self._kept, firsts)
        words[at.WORDS] = self._keep(self._kept, enclosures.words)
        words[at.SLOTS] = self.slots_R.ctypes.data
        words[at.RELAYS] = self._keep(self._kept, relays)
        words[at.NUM_RAILS] = len(links.numbers)
        words[at.RELAYED] = self._relayed_LPW.ctypes.data
        self._staging: Staging | None = None  # that the next two are of
        self._turns: list[array[int]] = []
        self._of_staging: list[np.ndarray] = []

    def begin(self, table: array[int]) -> None:
        """Tell a table where the staging of the next call is, and what this rank wants of it."""
        enclosures = self.enclosures
        if enclosures.staging is not self._staging:
            self._read_staging(enclosures.staging)
        table[at.STAGED : at.ENCLOSED + 1] = self._turns[enclosures.calls % 2]
        table[at.WANTS], table[at.WANTS_STAGED] = enclosures.wanted

    def neighbours_staged(self) -> bool:
        """Whether the ranks of the node stage rows for the next call soon, as this one has done."""
        if len(self._locals) == 1:
            return True
        enclosures = self.enclosures
        return self._node.mailbox.meet_soon(STAGED, enclosures.calls + 1, enclosures.staging.soon)

    def exchange(
        self,
        table: array[int],
        relay: Callable[[], int],
        meanwhile: Callable[[], object],
        stage: str,
    ) -> np.ndarray:
        """Exchange the messages that a step has written. Returns [slots, W]: what ranks told."""
        enclosures = self.enclosures
        turn, now = enclosures.calls % 2, enclosures.staging
        enclosures.calls += 1
        enclosures.wanted = (0, 0)
        counts, rows = self._counts.tolist(), self._rows.tolist()
        messages = [
            Message(space[: sum(count), None], count, row)
            for space, count, row in zip(now.sent, counts, rows)
        ]
        swap(self._links, now, messages, turn, stage, meanwhile)
        relay()
        heard = self._relayed_LPW
        if len(self._locals) > 1:
            heard = self._node.mailbox.exchange(heard.reshape(len(self._locals), -1), stage)
        table[at.HEARD] = heard.ctypes.data
        return heard.reshape(-1, WIDTH)

    def _read_staging(self, now: Staging) -> None:
        kept: list[np.ndarray] = []
        self._staging, own = now, self._links.numbers.index(self._links.own)
        self._turns.clear()
        for turn in range(2):
            begin = now.received[turn][own].data_ptr() + self.enclosures.words[self._home]
            outgoing = [space.data_ptr() for space in now.sent]
            words = {
                at.STAGED: self._keep(kept, now.staged_at[turn]),
                at.PARCELS: self._keep(kept, now.parcels[turn]),
                at.PARTS: self._keep(kept, [one.ctypes.data for one in now.words[turn]]),
                at.RECEIVED: self._keep(kept, [begin + one for one in now.begin_of_node]),
                at.OUTGOING: self._keep(kept, outgoing),
                at.COUNTS: self._counts.ctypes.data,
                at.ROWS: self._rows.ctypes.data,
                at.ENCLOSED: now.enclosed,
            }
            self._turns.append(array("q", [words[one] for one in sorted(words)]))
        self._of_staging = kept

    @staticmethod
    def _keep(kept: list[np.ndarray], numbers: Sequence[int] | np.ndarray) -> int:
        """The address of an array of these numbers, which `kept` keeps."""
        kept.append(np.array(numbers, np.int64))
        return int(kept[-1].ctypes.data)
