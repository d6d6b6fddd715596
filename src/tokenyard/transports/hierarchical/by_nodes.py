"""An agreement by nodes: a block for every two.

    heads     ranks of the node tell each other their heads
    counts    if these agree: what each tells every rank, to the rank that speaks with its node
    blocks    between the two ranks that speak for their nodes, on a rail (`wire.node_blocks`)
    answers   what came, to the ranks of the node that it is for

The rails take turns: nodes a and b use rail (a + b) % rails, so that all ranks of a node have about
as many nodes to speak with. All but the blocks stays in the node's memory. An answer has the heads
of other ranks without what only their node needs, and all numbers of a payload but the first as
sums over each node, in the row of its first rank. The text of an error does not fit: ranks that
hear of one tell each other more in a round of its own.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from tokenyard.comm.base import Communicator, Exchange
from tokenyard.errors import PeerTimeout
from tokenyard.shm.liveness import Stopped
from tokenyard.shm.node import SharedNode
from tokenyard.topology import Topology
from tokenyard.transports.hierarchical.links import Links
from tokenyard.wire import message as at
from tokenyard.wire import node_blocks as block

_LOOK = 0.1  # seconds between two looks at what other nodes say
_NO_CALL = -1  # in the answer, for ranks of a node that do not agree


def takes(topology: Topology) -> bool:
    """Whether ranks agree by nodes: all see the same. Rows never travel with these messages."""
    return topology.num_nodes > 1 and topology.num_ranks >= block.LEAST_RANKS


class NodeAgreement:
    def __init__(
        self, communicator: Communicator, shared: SharedNode, links: Links, topology: Topology
    ) -> None:
        self._communicator, self._links, rank = communicator, links, communicator.rank
        self._mailbox, self._liveness = shared.mailbox, shared.liveness
        self._began = self._looked = 0.0
        nodes, home = topology.ranks_of_node, topology.node_of_rank[rank]
        self._locals = list(nodes[home])
        self._num_locals, self._num_nodes = len(self._locals), len(nodes)
        self._most_ranks = most = topology.num_rails
        others = [node for node in range(len(nodes)) if node != home]
        # By rail that this rank is on: the nodes that it speaks with. They come in this order.
        self._spoken = [
            [node for node in others if (home + node) % most == rail] for rail in links.numbers
        ]
        # By local rank: the nodes that it speaks with; and for whose ranks it needs the counts of
        # its neighbours, after its own. Places of ranks that are not there repeat the rank itself.
        by_speaker = [
            [
                node
                for rail in topology.rails_of(one)
                for node in others
                if (home + node) % most == rail
            ]
            for one in self._locals
        ]
        self._most_nodes = max(map(len, by_speaker))
        self._wanted_LX = np.repeat(
            np.array(self._locals)[:, None], 1 + self._most_nodes * most, axis=1
        )
        # By node, but for this one: who of this node speaks with it, and in which place.
        speaker, place_of = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        for local, spoken in enumerate(by_speaker):
            for place, node in enumerate(spoken):
                speaker[node], place_of[node] = local, place
                begin = 1 + place * most
                self._wanted_LX[local, begin : begin + len(nodes[node])] = nodes[node]
        self._speaker_N, self._place_N = speaker[others], place_of[others]
        self._is_there_NL = np.array(
            [[place < len(nodes[node]) for place in range(most)] for node in others]
        )
        self._ranks = np.array([one for node in others for one in nodes[node]])
        self._first_N = np.array([nodes[node][0] for node in others])

    def meet(self, message_RM: np.ndarray, width: int, stage: str) -> np.ndarray:
        """The answer to a message whose payload is so wide, on ranks whose input is good."""
        self._began, self._mailbox.look = time.monotonic(), self._look
        heads_LW = self._meet_heads(message_RM[0, : at.PAYLOAD], width, stage)
        calls_LW = heads_LW[:, [*range(at.TOKENS), at.PAYLOAD]]
        agrees = bool((calls_LW == calls_LW[0]).all()) and not heads_LW[0, at.FAILED]
        width = width if agrees else 0
        counts_LPX = self._meet_counts(message_RM[:, at.PAYLOAD : at.PAYLOAD + width], stage)
        self._mailbox.look = None
        facts_LF = self._facts(heads_LW)
        blocks_PW = self._blocks(agrees, width, heads_LW[0], facts_LF, counts_LPX)
        came_PW = self._swap(blocks_PW, stage)
        parts_NW = self._pass_on(came_PW, width, stage)
        return self._answer(message_RM, heads_LW, counts_LPX[:, 0], parts_NW)

    def _look(self, stage: str) -> None:
        """Other nodes wait for ranks that wait here for a neighbour: once they have waited in vain
        they must hear whose fault it is.
        """
        now = time.monotonic()
        if now < self._looked + _LOOK:
            return
        self._looked = now
        if self._communicator.hears_of_waits(self._began):
            late = self._mailbox.awaited()
            if late < self._num_locals:
                stopped = Stopped(PeerTimeout, (self._locals[late],))
                raise self._liveness.blame(stopped, stage)

    def _meet_heads(self, head: np.ndarray, width: int, stage: str) -> np.ndarray:
        told = np.append(head, width)
        return self._mailbox.exchange(np.tile(told, (self._num_locals, 1)), stage)

    def _meet_counts(self, payload_RM: np.ndarray, stage: str) -> np.ndarray:
        """[L, 1 + P L', M]: what each local rank tells this one, and the ranks of nodes that this
        one speaks with.
        """
        shape = self._num_locals, self._wanted_LX.shape[1], payload_RM.shape[1]
        if not shape[2]:
            return np.zeros(shape, np.int64)
        told = payload_RM[self._wanted_LX].reshape(self._num_locals, -1)
        return self._mailbox.exchange(told, stage).reshape(shape)

    def _facts(self, heads_LW: np.ndarray) -> np.ndarray:
        offers = heads_LW[:, at.OFFER : at.PAYLOAD]
        facts_LF = np.zeros((self._most_ranks, block.FACTS), np.int64)
        here = facts_LF[: self._num_locals]
        here[:, : block.LACKS] = heads_LW[:, [at.FAILED, at.TOKENS, at.WORST, at.STAMP]]
        here[:, block.LACKS] = (offers == at.NO_MEMORY).any(1)
        return facts_LF

    def _blocks(
        self,
        agrees: bool,
        width: int,
        head: np.ndarray,
        facts_LF: np.ndarray,
        counts_LPX: np.ndarray,
    ) -> np.ndarray:
        """A block for each node that this rank speaks with."""
        most, num_nodes = self._most_ranks, sum(map(len, self._spoken))
        blocks_PW = np.zeros((num_nodes, block.block_words(most, width)), np.int64)
        blocks_PW[:, block.AGREES], blocks_PW[:, block.WIDTH] = agrees, width
        blocks_PW[:, block.CALL : block.RANKS] = head[at.CALL : at.TOKENS]
        begin = block.RANKS + facts_LF.size
        blocks_PW[:, block.RANKS : begin] = facts_LF.ravel()
        if width:
            counts = counts_LPX[:, 1 : 1 + num_nodes * most]
            counts_LPLX = counts.reshape(self._num_locals, num_nodes, most, width)
            firsts = blocks_PW[:, begin : begin + most * most].reshape(-1, most, most)
            firsts[:, : self._num_locals] = counts_LPLX[..., 0].swapaxes(0, 1)
            sums = counts_LPLX[..., 1:].sum(0)
            blocks_PW[:, begin + most * most :] = sums.reshape(num_nodes, most * (width - 1))
        return blocks_PW

    def _swap(self, blocks_PW: np.ndarray, stage: str) -> np.ndarray:
        """The blocks of the nodes that this rank speaks with, with room for the longest."""
        room, each, ends = block.block_words(self._most_ranks), blocks_PW.shape[1], []
        came_PW, begin = np.empty((len(blocks_PW), room), np.int64), 0
        for rail, nodes in zip(self._links.numbers, self._spoken):
            end = begin + len(nodes)
            counts, rooms = [0] * self._num_nodes, [0] * self._num_nodes
            for node in nodes:
                counts[node], rooms[node] = 8 * each, 8 * room
            sent = torch.from_numpy(blocks_PW[begin:end].view(np.uint8).reshape(-1, 1))
            out = torch.from_numpy(came_PW[begin:end].view(np.uint8).reshape(-1, 1))
            exchange = Exchange(out, sent, rooms, counts, stage, at_most=True)
            ends.append(self._links.start(rail, exchange))
            begin = end
        for finish in ends:
            finish()
        return came_PW

    def _pass_on(self, came_PW: np.ndarray, width: int, stage: str) -> np.ndarray:
        """[N, W]: what each other node tells this rank: the words of a block up to the facts, then
        the first numbers, and the sums.
        """
        most, num_locals = self._most_ranks, self._num_locals
        begin = block.RANKS + block.FACTS * most
        length = begin + (most + width - 1 if width else 0)
        told = np.zeros((num_locals, self._most_nodes, length), np.int64)
        num_nodes = len(came_PW)
        told[:, :num_nodes, :begin] = came_PW[:, :begin]
        if width:
            end = begin + most * most
            firsts = came_PW[:, begin:end].reshape(num_nodes, most, most)[..., :num_locals]
            sums = came_PW[:, end : end + most * (width - 1)].reshape(num_nodes, most, width - 1)
            parts = told[:, :num_nodes, begin:]
            parts[..., :most] = firsts.transpose(2, 0, 1)
            parts[..., most:] = sums[:, :num_locals].swapaxes(0, 1)
            parts[:, came_PW[:, block.WIDTH] != width] = 0  # a node that does not agree
        heard = self._mailbox.exchange(told.reshape(num_locals, -1), stage).reshape(told.shape)
        return heard[self._speaker_N, self._place_N]

    def _answer(
        self,
        message_RM: np.ndarray,
        heads_LW: np.ndarray,
        own_LX: np.ndarray,
        parts_NW: np.ndarray,
    ) -> np.ndarray:
        there, ranks, width = self._is_there_NL, self._ranks, own_LX.shape[1]
        calls_NC = parts_NW[:, block.CALL : block.RANKS]
        calls_NC[parts_NW[:, block.AGREES] == 0] = _NO_CALL
        answer_RM = np.zeros_like(message_RM)
        answer_RM[self._locals, : at.PAYLOAD] = heads_LW[:, : at.PAYLOAD]
        answer_RM[self._locals, at.PAYLOAD : at.PAYLOAD + width] = own_LX
        begin = block.RANKS + block.FACTS * self._most_ranks
        facts = parts_NW[:, block.RANKS : begin].reshape(len(parts_NW), -1, block.FACTS)[there]
        answer_RM[ranks, at.CALL : at.TOKENS] = np.repeat(calls_NC, there.sum(1), axis=0)
        answer_RM[ranks, at.FAILED] = facts[:, block.FAILED]
        answer_RM[ranks, at.TOKENS : at.OFFER] = facts[:, block.TOKENS : block.LACKS]
        # Of memory in other nodes this rank needs to know only that some lack it.
        answer_RM[ranks, at.OFFER : at.OFFER + 2] = facts[:, block.LACKS :] * at.NO_MEMORY
        if width:
            end = begin + self._most_ranks
            answer_RM[ranks, at.PAYLOAD] = parts_NW[:, begin:end][there]
            answer_RM[self._first_N, at.PAYLOAD + 1 : at.PAYLOAD + width] = parts_NW[:, end:]
        return answer_RM
