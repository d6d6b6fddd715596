"""Ranks on several nodes: each row crosses the network once per node, then goes on in memory.

A dispatch has two steps. Between nodes a rank sends to its partners on a rail (`links`); inside a
node ranks write into each other's memory, as `direct` does. On the way back the rank that passed a
token on sums the rows that its node has for it, rounds the sum to the rows' dtype, and sends one
row. Rows travel in chunks, so that the network has work while rows move in memory.

It is the default where ranks are on several nodes and those of each node share memory. It takes
memory for every result in full, and for a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from tokenyard.comm.base import Communicator, Move
from tokenyard.errors import PeerError, name_ranks
from tokenyard.results import Handle
from tokenyard.shm import shared_rows
from tokenyard.shm.node import SharedNode
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.topology import Topology
from tokenyard.transports.base import Offer, RowsBack, RowsOut, SharedMemoryTransport, Sum
from tokenyard.transports.hierarchical import by_nodes
from tokenyard.transports.hierarchical.enclosed import Enclosures, ParcelKernels
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.route import (
    KnownMarks,
    TwoLevelRoute,
    pack_marks,
)
from tokenyard.transports.hierarchical.stream import CombineStream, DispatchStream
from tokenyard.types import Flow
from tokenyard.wire.columns import column_offsets, row_widths
from tokenyard.wire.message import NO_MEMORY
from tokenyard.wire.nodes_table import (
    CAME_BITS,
    CAME_RECORDS,
    CAME_ROWS,
    CAME_TOKENS,
    FACTS,
    SMALL,
    WIDTH,
)
from tokenyard.wire.signals import READ, ROWS

# int64s that ranks of a node pass on at once: the agreement's message of each partner, if they fit.
_MOST_AT_ONCE = 4096
# Seconds that ranks of a node wait longer for each other than for other nodes: a rank that waits
# for another node needs the time to find out who is at fault, and to tell its own node.
_LATER = 1.0


def box_of(topology: Topology, rank: int) -> int:
    """int64s of a message that go at once between ranks of this rank's node."""
    node = topology.ranks_of_node[topology.node_of_rank[rank]]
    most = 1 + max(map(topology.num_upstream, node))
    return min(WIDTH * most, _MOST_AT_ONCE)


class HierarchicalTransport(SharedMemoryTransport):
    name = "hierarchical"
    offers_memory = True

    def __init__(
        self,
        communicator: Communicator,
        kernels: ParcelKernels,
        topology: Topology,
        timeout: float,
        name: str,
    ) -> None:
        """All ranks together. `name` is new for every Buffer of the group. Raises OSError on all
        ranks if those of a node cannot attach each other's memory.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._kernels, self._topology = kernels, topology
        self._home = topology.node_of_rank[self.rank]  # the number of this rank's node
        self._locals = topology.ranks_of_node[self._home]
        self._upstream = [topology.upstream(rank) for rank in self._locals]
        self._mine = topology.upstream(self.rank)
        self._most = 1 + max(map(len, self._upstream))
        with ExitStack() as opened:
            neighbours = communicator.part(self._locals, f"{name}/node-{self._home}")
            opened.callback(neighbours.close)
            failure = None
            try:
                box = box_of(topology, self.rank)
                node = SharedNode(neighbours, kernels, timeout + _LATER, box)
                self._node = opened.enter_context(node)
            except OSError as error:
                failure = error
            failed = communicator.gather([int(failure is not None)], "Buffer (attach)")[0]
            if any(failed):
                culprits = name_ranks([rank for rank, one in enumerate(failed) if one])
                raise failure or OSError(f"{culprits} cannot attach memory of their node")
            self._links = Links(communicator, topology, name, self._node.liveness.raise_told)
            opened.callback(self._links.close)
            self.agrees_by_nodes = by_nodes.takes(topology)
            self.encloses = topology.num_nodes > 1 and not self.agrees_by_nodes
            beside = self._node, self._links, topology
            if self.agrees_by_nodes:
                self._agreement = by_nodes.NodeAgreement(communicator, *beside)
            else:
                self.enclosures = Enclosures(*beside, self.rank, kernels)
            self.partners = [source for _, source in self._mine]
            self.mark_bytes = -(-len(self._locals) // 8)  # of a token, in a parcel for this node
            self._opened = opened.pop_all()

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        """Send what is for the ranks of a node to the partner there, which passes it on."""
        width = message_RM.shape[1]
        nodes = self._topology.ranks_of_node
        parcels = [
            np.ascontiguousarray(message_RM[list(ranks) if node != self._home else []])
            for node, ranks in enumerate(nodes)
        ]
        row_bytes = 8 * width * len(self._locals)
        with self.telling():
            came = self._swap(parcels, dict.fromkeys(range(self.size), row_bytes), stage)
        return self._pass_on(message_RM, came, stage)

    def meet(
        self, message_RM: np.ndarray, offer: Offer, stage: str, width: int
    ) -> tuple[np.ndarray, Offer]:
        with self.telling():
            if self.agrees_by_nodes:
                return self._agreement.meet(message_RM, width, stage), offer
            if self.encloses:
                return self.enclosures.meet(message_RM, offer, stage)
        return self.exchange(message_RM, stage), offer

    def _pass_on(
        self, message_RM: np.ndarray, came: Sequence[np.ndarray], stage: str
    ) -> np.ndarray:
        """Give what partners sent for ranks of the node to these. Returns all ranks' messages."""
        width = message_RM.shape[1]
        if len(self._locals) == 1:
            answer_RM = message_RM.copy()
            for (_, source), part in zip(self._mine, came):
                answer_RM[source] = part.view(np.int64)
            return answer_RM
        relayed_LPM = np.zeros((len(self._locals), self._most, width), np.int64)
        relayed_LPM[:, 0] = message_RM[list(self._locals)]
        for place, part in enumerate(came, start=1):
            relayed_LPM[:, place] = part.view(np.int64).reshape(len(self._locals), width)
        heard = self._node.mailbox.exchange(relayed_LPM.reshape(len(self._locals), -1), stage)
        heard = heard.reshape(relayed_LPM.shape)
        answer_RM = np.empty_like(message_RM)
        for local, upstream in enumerate(self._upstream):
            answer_RM[self._locals[local]] = heard[local, 0]
            for place, (_, source) in enumerate(upstream, start=1):
                answer_RM[source] = heard[local, place]
        return answer_RM

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Offer:
        if flow is None:
            return Offer()  # `learn_route` takes memory, once counts are known
        block = self._take(flow, tuple(widths))
        return Offer((*block.told, flow.num_rows), (block,))

    def enclose_rows(
        self, columns: Sequence[Tensor], is_token_in_rank_TR: Tensor, ready: bool
    ) -> Offer | None:
        if not self.encloses or not ready:
            return None
        return self.enclosures.of_rows(columns, is_token_in_rank_TR)

    def learn_route(self, rows: RowsOut, is_token_in_rank_TR: Tensor) -> RowsOut:
        flow, stage, came = rows.flow, rows.stage, rows.offer.came
        if came is not None and _is_small(flow, rows.columns):
            arrived, tally_FR, bits = self.enclosures.take_rows(rows)
            marks_TR = is_token_in_rank_TR.numpy()
            known = KnownMarks(marks_TR, tally_FR, bits, self._topology, self.rank)
            offer = replace(rows.offer, came=came._replace(arrived=arrived))
            return rows._replace(flow=flow._replace(two_level=known), offer=offer)
        block = self._take(flow, row_widths(rows.columns))
        told = self._tell_neighbours(block, flow, stage)
        told_RW = np.zeros((self.size, 4), np.int64)  # of other nodes nothing is needed
        told_RW[list(self._locals)] = told[:, :4]
        without = [rank for rank in self._locals if told_RW[rank, 0] == NO_MEMORY]
        tokens, marks_TR = flow.tokens_R.tolist(), is_token_in_rank_TR.numpy()
        said = self._tell_partners(marks_TR, tokens, 1 + without[0] if without else 0, stage)
        self._check_all([1 + rank for rank in without] + [one for one, _ in said], block, stage)
        tally_FR = np.zeros((FACTS + len(self._locals), self.size), np.int64)
        tally_FR[CAME_TOKENS], tally_FR[CAME_ROWS] = tokens, flow.recv_counts
        tally_FR[FACTS:, [self.rank, *self.partners]] = told[:, 4 : 5 + len(self.partners)]
        parts = [bits for _, bits in said]
        for source, bits, end in zip(self.partners, parts, accumulate(map(len, parts))):
            tally_FR[CAME_BITS, source] = end - len(bits)
            tally_FR[CAME_RECORDS, source] = bits.reshape(-1, self.mark_bytes).any(1).sum()
        bits = np.concatenate([*parts, np.zeros(0, np.uint8)])
        known = KnownMarks(marks_TR, tally_FR, bits, self._topology, self.rank)
        flow = flow._replace(two_level=known)
        offer = Offer(told_RW[self.rank], (block,))
        return rows._replace(flow=flow, offer=offer, told_RW=told_RW)

    def send(self, rows: RowsOut) -> tuple[list[Tensor], Move]:
        columns, flow, offer, told_RW, _, stage = rows
        if offer.came is not None and _is_small(flow, columns):
            arrived = offer.came.arrived
            return self.enclosures.take_rows(rows)[0] if arrived is None else arrived, _nothing
        if offer.came is not None or offer.is_mixed:
            offer = offer if offer.blocks else self.offer_rows(flow, row_widths(columns))
            told_RW = self._offer_again(offer, stage)
        (block,) = offer.blocks
        shared_rows.check(told_RW[:, :1], [block.error], stage, self.rank)
        node = self._node
        mapped = [
            node.attached.memory(local, told, stage) if local != node.rank else None
            for local, told in enumerate(told_RW[list(self._locals), :3].tolist())
        ]
        blocks_L = np.array([one.address if one else block.address for one in mapped], np.int64)
        rows_L, path = told_RW[list(self._locals), 3].copy(), self._path(flow)

        def move(held: Any = (block, mapped)) -> None:
            # `held` lives until all ranks have written, even if nobody wants the result any more.
            stream = DispatchStream(
                path, columns, blocks_L, rows_L, self._kernels, node.liveness.beat
            )
            with self.telling():
                self._links.stream(stream, stage)
            node.mailbox.meet(ROWS, stage)

        offsets = column_offsets(flow.num_rows, row_widths(columns))
        return shared_rows.views(block, offsets, flow.num_rows, columns), move

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> Offer:
        blocks, words = shared_rows.offer(self._node.pool, columns, flow.num_received, ready)
        return Offer(words, blocks)

    def enclose_back(self, sums: Sequence[Sum], handle: Handle, ready: bool) -> Offer | None:
        if not self.encloses or not ready:
            return None
        return self.enclosures.of_sums(sums, handle)

    def sum_back(self, back: RowsBack) -> Move:
        sums, stage = back.sums, back.stage
        if back.offer.came is not None:
            self.enclosures.add_up(back.offer.came, sums)
            return _nothing
        if back.offer.is_mixed:
            columns, flow = [one.rows_ND for one in sums], back.handle.flow
            offer = back.offer if back.offer.blocks else self.offer_back(columns, flow, True)
            back = back._replace(offer=offer, told_RW=self._offer_again(offer, stage))
        node, path = self._node, self._path(back.handle.flow)
        shared_rows.check_offers(back.told_RW, back.offer.blocks, stage, self.rank)
        told_LW = back.told_RW[list(self._locals)]
        bases, held = [], []
        for place, one in enumerate(sums):
            addresses = [one.rows_ND.data_ptr()] * len(self._locals)
            told_L4 = told_LW[:, 1 + 4 * place : 5 + 4 * place].tolist()
            for local, (*told, begin) in enumerate(told_L4):
                if local != node.rank:
                    mapped = node.attached.memory_at(local, told, begin, 0, stage)
                    held.append(mapped)
                    addresses[local] = mapped.address
            bases.append(np.array(addresses, np.int64))
        all_ready = all(told_LW[:, 0].tolist())

        def move(held: Any = held) -> None:
            self._publish(back, all_ready, self._kernels)
            for one, bases_L in zip(sums, bases):
                stream = CombineStream(path, one, bases_L, self._kernels, node.liveness.beat)
                with self.telling():
                    self._links.stream(stream, stage)
            # The rows are the user's again after this, so all must have read them.
            node.mailbox.meet(READ, stage)

        return move

    def close(self) -> None:
        self._opened.close()

    def _offer_again(self, offer: Offer, stage: str) -> np.ndarray:
        """Offers of all ranks, after some have enclosed their rows in vain instead."""
        words_RW = np.empty((self.size, len(offer.words)), np.int64)
        words_RW[:] = offer.words
        return self.exchange(words_RW, stage)

    def _path(self, flow: Flow) -> TwoLevelRoute:
        known: KnownMarks = flow.two_level
        return known.path(self._kernels)

    def _take(self, flow: Flow, widths: tuple[int, ...]) -> SharedRows:
        """A block for the rows that a dispatch along this flow brings."""
        return shared_rows.take(self._node.pool, column_offsets(flow.num_rows, widths)[-1])

    def _tell_neighbours(self, block: SharedRows, flow: Flow, stage: str) -> np.ndarray:
        """Tell each rank of the node this rank's block, how many rows it holds, and where the rows
        of that rank, and of each of its partners, begin in it. Returns what they tell, by rank.
        """
        firsts = list(accumulate(flow.recv_counts, initial=0))
        message = np.zeros((len(self._locals), 4 + self._most), np.int64)
        message[:, :4] = *block.told, flow.num_rows
        for place, upstream in enumerate(self._upstream):
            sources = [self._locals[place], *(source for _, source in upstream)]
            message[place, 4 : 4 + len(sources)] = [firsts[source] for source in sources]
        return self._node.mailbox.exchange(message, stage)

    def _tell_partners(
        self, marks_TR: np.ndarray, tokens_R: Sequence[int], failed: int, stage: str
    ) -> list[tuple[int, np.ndarray]]:
        """Tell each other node which of its ranks get each token, after a number that says whether
        this node can go on. Returns what the partners tell, in their order.
        """
        head = np.array([failed], np.int32).view(np.uint8)
        parcels = [
            np.concatenate([head, pack_marks(marks_TR, ranks)]) if node != self._home else head[:0]
            for node, ranks in enumerate(self._topology.ranks_of_node)
        ]
        sizes = {rank: len(head) + self.mark_bytes * num for rank, num in enumerate(tokens_R)}
        with self.telling():
            came = self._swap(parcels, sizes, stage)
        return [(int(one[: len(head)].view(np.int32)[0]), one[len(head) :]) for one in came]

    def _swap(
        self, parcels: Sequence[np.ndarray], sizes_R: dict[int, int], stage: str
    ) -> list[np.ndarray]:
        """Send bytes to each other node. Returns what came from each partner, in their order;
        `sizes_R` says how many bytes rank r sends to this rank's node.
        """
        nodes = range(self._topology.num_nodes)
        sizes = {rail: [0] * len(nodes) for rail in self._links.numbers}
        homes = [self._topology.node_of_rank[source] for _, source in self._mine]
        for (rail, source), home in zip(self._mine, homes):
            sizes[rail][home] = sizes_R[source]
        flat = [parcel.reshape(-1).view(np.uint8) for parcel in parcels]
        answer = self._links.exchange(flat, sizes, stage)
        return [answer[rail][home] for (rail, _), home in zip(self._mine, homes)]

    def _check_all(self, failed: Sequence[int], block: SharedRows, stage: str) -> None:
        """If a rank of any node has no memory for its rows, all ranks of all nodes raise. Numbers
        above 0 in `failed` are such ranks, plus 1.
        """
        worst = max(failed, default=0)
        told = self._node.mailbox.exchange(np.full((len(self._locals), 1), worst, np.int64), stage)
        if told.any():
            raise shared_rows.no_memory([int(told.max()) - 1], block.error, stage, self.rank)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the ranks of the node, which wait for this one, why it does not come."""
        try:
            yield
        except PeerError as error:
            self._node.liveness.tell(error)
            raise


def _is_small(flow: Flow, columns: Sequence[Tensor]) -> bool:
    """Whether no rank has a large result: all ranks see the same."""
    return flow.most_rows * sum(row_widths(columns)) < SMALL


def _nothing() -> None:
    """The move of rows that have moved already."""
