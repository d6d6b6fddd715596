"""What the steps of a call of few rows between nodes read, and the exchange between two of them.

`EnclosedSteps` keeps the words of `wire.nodes_table` that a Buffer has, its staging, and whose turn
it is there. The messages are those of `enclosed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor

from tokenyard.comm.base import Exchange
from tokenyard.kernels.base import Step, SumSteps
from tokenyard.shm.node import SharedNode
from tokenyard.topology import Topology
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.staging import Staging
from tokenyard.types import round_up
from tokenyard.wire import int64s
from tokenyard.wire import nodes_table as at
from tokenyard.wire.columns import LINE
from tokenyard.wire.signals import STAGED


class EnclosedSteps:
    def __init__(self, node: SharedNode, links: Links, topology: Topology, rank: int) -> None:
        self._node, self._links = node, links
        self._topology, self._home, self._rank = topology, topology.node_of_rank[rank], rank
        nodes, self._mine = topology.ranks_of_node, topology.upstream(rank)
        self._locals = nodes[self._home]
        # By node: bytes of the words of a message to it.
        self._bytes_of_words = [round_up(8 * at.WIDTH * len(ranks), LINE) for ranks in nodes]
        self.calls = 0
        self.wanted = (0, 0)  # bytes that this rank would like to enclose, and to stage
        upstream = [topology.upstream(one) for one in self._locals]
        places = 1 + max(map(len, upstream))
        self.slots_R = np.zeros(topology.num_ranks, np.int64)
        for local, sources in enumerate(upstream):
            first = local * places
            self.slots_R[self._locals[local]] = first
            for place, (_, source) in enumerate(sources, start=1):
                self.slots_R[source] = first + place
        self._relayed_LPW = np.zeros((len(self._locals), places, at.WIDTH), np.int64)
        self.told_RW = np.zeros((topology.num_ranks, at.WIDTH), np.int64)
        relays = np.full((len(links.numbers), len(nodes)), -1, np.int64)
        for rail, source in self._mine:
            relays[links.numbers.index(rail), topology.node_of_rank[source]] = source
        self._counts, self._rows = np.zeros_like(relays), np.zeros_like(relays)
        firsts = np.cumsum([0, *map(len, nodes)])
        self._kept: list[np.ndarray] = []
        words = self._words = int64s.new(at.TABLE_WORDS)
        words[at.RANK], words[at.SIZE] = rank, topology.num_ranks
        words[at.HOME], words[at.NUM_NODES] = self._home, len(nodes)
        words[at.NUM_RANKS], words[at.PLACE] = len(self._locals), topology.place(rank)
        words[at.NUM_PARTNERS], words[at.NUM_PLACES] = len(self._mine), places
        words[at.RANKS] = self._keep(self._kept, [one for ranks in nodes for one in ranks])
        words[at.FIRSTS] = self._keep(self._kept, firsts)
        words[at.WORDS] = self._keep(self._kept, self._bytes_of_words)
        words[at.SLOTS] = self.slots_R.ctypes.data
        words[at.RELAYS] = self._keep(self._kept, relays)
        words[at.NUM_RAILS] = len(links.numbers)
        words[at.RELAYED] = self._relayed_LPW.ctypes.data
        words[at.TOLD] = self.told_RW.ctypes.data
        self._turns: list[array[int]] = []
        self._of_staging: list[np.ndarray] = []
        self.share(0, 0, "Buffer")

    def share(self, enclosed: int, staged: int, stage: str) -> None:
        """Take a staging for so many bytes: all ranks of all nodes together."""
        now = Staging(
            self._node, self._topology, self._rank, self._bytes_of_words, enclosed, staged, stage
        )
        kept: list[np.ndarray] = []
        self.staging, own = now, self._links.numbers.index(self._links.own)
        self._turns.clear()
        for turn in range(2):
            begin = now.received[turn][own].data_ptr() + self._bytes_of_words[self._home]
            outgoing = [space.data_ptr() for space in now.sent]
            words = {
                at.STAGED: self._keep(kept, now.staged_at[turn]),
                at.PARCELS: self._keep(kept, now.parcels[turn]),
                at.PARTS: self._keep(kept, [one.ctypes.data for one in now.words[turn]]),
                at.RECEIVED: self._keep(kept, [begin + one for one in now.begin_of_node]),
                at.OUTGOING: self._keep(kept, outgoing),
                at.COUNTS: self._counts.ctypes.data,
                at.ROWS: self._rows.ctypes.data,
                at.ENCLOSED: enclosed,
                at.MOST_STAGED: staged,
            }
            self._turns.append(array("q", [words[one] for one in sorted(words)]))
        self._of_staging = kept

    def table(self, num_experts: int) -> tuple[array[int], array[int]]:
        """A table with the words of this Buffer, and the scratch memory that it names."""
        table = int64s.new(at.TABLE_WORDS)
        table[:] = self._words
        num_ranks = self._topology.num_ranks
        scratch = int64s.new(at.scratch_words(num_ranks, len(self._locals), num_experts))
        table[at.SCRATCH] = int64s.address(scratch)
        return table, scratch

    def begin(self, table: array[int]) -> None:
        """Tell a table where the staging of the next call is, and what this rank wants of it."""
        table[at.STAGED : at.MOST_STAGED + 1] = self._turns[self.calls % 2]
        table[at.WANTS], table[at.WANTS_STAGED] = self.wanted

    def stage(self, steps: SumSteps) -> bool:
        """Stage the rows of the next call, and find those of the neighbours: whether they stage
        theirs soon.
        """
        steps.stage()
        if len(self._locals) > 1 and not self._node.mailbox.meet_soon(
            STAGED, self.calls + 1, self.staging.soon
        ):
            return False
        return not steps.find()

    def stage_nothing(self) -> None:
        """Let no neighbour wait for rows of this rank in the next call."""
        if not self.staging.is_shared:
            return
        self.staging.refuse(self.calls % 2)
        if len(self._locals) > 1:
            self._node.mailbox.meet_soon(STAGED, self.calls + 1, 0)

    def exchange(
        self,
        table: array[int],
        relay: Step,
        meanwhile: Step | None,
        stage: str,
    ) -> np.ndarray:
        """Exchange the messages that a step has packed. Returns [slots, W]: what ranks told."""
        turn, now = self.calls % 2, self.staging
        self.calls += 1
        self.wanted = (0, 0)
        counts, rows, ends = self._counts.tolist(), self._rows.tolist(), []
        for place, (rail, space, out) in enumerate(
            zip(self._links.numbers, now.sent, now.received[turn])
        ):
            sent, each = space[: sum(counts[place]), None], counts[place]
            exchange = Exchange(out, sent, now.rooms, each, stage, True, rows[place])
            ends.append(self._links.start(rail, exchange))
        try:
            if meanwhile is not None:
                meanwhile()
            for end in ends:
                end()
        except BaseException:
            self._withdraw(now.sent[0], counts[0])
            raise
        relay()
        heard = self._relayed_LPW
        if len(self._locals) > 1:
            heard = self._node.mailbox.exchange(heard.reshape(len(self._locals), -1), stage)
        table[at.HEARD] = heard.ctypes.data
        return heard.reshape(-1, at.WIDTH)

    def _withdraw(self, sent: Tensor, counts: Sequence[int]) -> None:
        """Say in messages that still wait for their receivers that this rank has given up. Gloo
        reads a message when its receiver is there, so a rank that comes later hears it.
        """
        begins = accumulate(counts, initial=0)
        for begin, count, ranks in zip(begins, counts, self._topology.ranks_of_node):
            if count:
                words = sent.numpy()[begin : begin + 8 * at.WIDTH * len(ranks)].view(np.int64)
                words.reshape(len(ranks), at.WIDTH)[:, at.STATE] = at.WITHDRAWN

    @staticmethod
    def _keep(kept: list[np.ndarray], numbers: Sequence[int] | np.ndarray) -> int:
        """The address of an array of these numbers, which `kept` keeps."""
        kept.append(np.array(numbers, np.int64))
        return int(kept[-1].ctypes.data)
