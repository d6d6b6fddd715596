"""Few rows travel with the words of the agreement: one round over the network instead of three.

A rank whose rows are few encloses them with its message to each other node, and says so in it. So
all ranks hear which of them did. If all did, every rank takes its rows from what its node got, and
the call is over. If one did not, what came is ignored, and all ranks go on with the general rounds.

What comes from other nodes lands in memory that the node shares, the *staging*, so the ranks of the
node read it there. In a dispatch a message to a node encloses a parcel (`kernels.numba.parcels`);
a rank's parcel for its own node lies in its staging too. In a combine a rank stages its rows, and
the rank that passed tokens on encloses their sums. That needs the rows of its neighbours before the
agreement: it waits for them a moment only, and encloses nothing if they do not come.

Staging has two turns, used by one call after the other. A rank writes a turn again after all ranks
of the node have begun the call in between, and so have ended the one before it. Its size follows
from what ranks wanted to enclose, which all ranks hear: so all know how much the others can take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tokenyard.errors import PeerError, PeerLeft
from tokenyard.handle import Handle
from tokenyard.shm.node import SharedNode
from tokenyard.topology import Topology
from tokenyard.transports.base import Offer, Sum
from tokenyard.transports.direct import DirectKernels
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.messages import WIDTH, Message, swap
from tokenyard.transports.hierarchical.route import KnownMarks, Relay, TwoLevelRoute
from tokenyard.transports.hierarchical.staging import Staging, header
from tokenyard.types import Flow, round_up
from tokenyard.wire.columns import LINE, column_offsets, row_widths
from tokenyard.wire.nodes_table import (
    ALONE,
    BEFORE,
    ENCLOSES,
    HEADER,
    OFFERS,
    STATE,
    WANTS_ENCLOSED_AT,
    WITHDRAWN,
)
from tokenyard.wire.signals import STAGED

MOST_ENCLOSED = 2 << 20  # bytes of rows that a message to a node may enclose
MOST_SUMS = 1 << 19  # of these, bytes of sums: above, summing while chunks travel is quicker
_MOST_STAGED = 8 << 20  # bytes of rows that a rank may stage for its neighbours
_MOST_RECEIVED = 16 << 20  # bytes that a rank may get with all messages of a call
_LEAST = 1 << 14  # bytes of staging, if there is any

PassOn = Callable[[np.ndarray, Sequence[np.ndarray], str], np.ndarray]


class ParcelKernels(DirectKernels, Protocol):
    def fill_parcel(
        self,
        columns: Sequence[Tensor],
        is_token_in_rank_TR: Tensor,
        ranks_L: np.ndarray,
        parcel: int,
    ) -> int: ...

    def take_parcels(
        self,
        parcels_R: np.ndarray,
        tokens_R: np.ndarray,
        counts_R: np.ndarray,
        num_ranks: int,
        place: int,
        columns: Sequence[Tensor],
    ) -> int: ...


class EnclosedRows(NamedTuple):
    """The rows of a dispatch."""

    columns: Sequence[Tensor]
    is_token_in_rank_TR: Tensor


class EnclosedSums(NamedTuple):
    """The rows of a combine."""

    sums: Sequence[Sum]
    handle: Handle
    path: TwoLevelRoute


class Came(NamedTuple):
    """What all ranks enclosed in a call."""

    turn: int
    bases: list[np.ndarray]  # of a combine, by column: [L] where each local rank's rows begin


class Enclosures:
    def __init__(
        self,
        node: SharedNode,
        links: Links,
        topology: Topology,
        rank: int,
        kernels: ParcelKernels,
    ) -> None:
        self._node, self._links, self._topology = node, links, topology
        self._rank, self._kernels = rank, kernels
        self._home, self._place = topology.node_of_rank[rank], topology.place(rank)
        nodes = topology.ranks_of_node
        self._locals = nodes[self._home]
        self._ranks_of_node = [np.array(ranks, np.int64) for ranks in nodes]
        # By node: bytes of the words of a message to it.
        self.words = [round_up(8 * WIDTH * len(ranks), LINE) for ranks in nodes]
        most = max(map(topology.num_upstream, range(topology.num_ranks)))
        self.most_enclosed = min(MOST_ENCLOSED, _MOST_RECEIVED // max(1, most)) // LINE * LINE
        self._most_ranks = max(map(len, nodes))
        self.calls = 0
        self.wanted = (0, 0)
        self.staging = Staging(node, topology, rank, self.words, 0, 0, "Buffer")

    def of_rows(self, columns: Sequence[Tensor], is_token_in_rank_TR: Tensor) -> Offer | None:
        """An offer of a dispatch that encloses its rows, if there is room for them by now."""
        num_bytes = self.num_bytes(is_token_in_rank_TR.shape[0], sum(row_widths(columns)))
        if not self.has_room(num_bytes, num_bytes):
            return None
        return Offer(enclosed=EnclosedRows(columns, is_token_in_rank_TR))

    def of_sums(self, sums: Sequence[Sum], handle: Handle, path: TwoLevelRoute) -> Offer | None:
        """The same of a combine."""
        widths = row_widths([one.rows_ND for one in sums])
        counts = [int(one.before[-1]) for relays in path.relays.values() for one in relays]
        # All ranks want the same where they have the same tokens: a node may get them all.
        enclosed = max([column_offsets(count, widths)[-1] for count in counts], default=0)
        staged = 8 * HEADER + column_offsets(handle.flow.num_received, widths)[-1]
        if enclosed > MOST_SUMS or not self.has_room(enclosed, staged):
            return None
        return Offer(enclosed=EnclosedSums(sums, handle, path))

    def meet(
        self, message_RM: np.ndarray, offer: Offer, stage: str, pass_on: PassOn
    ) -> tuple[np.ndarray, Offer]:
        """Exchange messages with all ranks, and what they enclose. `pass_on` gives the messages
        that came from other nodes to the ranks of this node.
        """
        turn, self.calls = self.calls % 2, self.calls + 1
        enclosed, bases = offer.enclosed, []
        if not isinstance(enclosed, EnclosedRows):
            bases = self._stage(enclosed, turn)
            enclosed = enclosed if bases else None
        told_RW = np.empty((self._topology.num_ranks, WIDTH), np.int64)
        state = OFFERS if offer.enclosed is None else ALONE if enclosed is None else ENCLOSES
        told_RW[:, :BEFORE] = state, *self.wanted
        told_RW[:, BEFORE:] = message_RM
        self.wanted = (0, 0)
        now = self.staging
        messages = [
            self._fill(rail, space, told_RW, enclosed, bases)
            for rail, space in zip(self._links.numbers, now.sent)
        ]

        def meanwhile() -> None:
            if isinstance(enclosed, EnclosedRows):
                self._fill_own(enclosed, turn)

        swap(self._links, now, messages, turn, stage, meanwhile)
        num_bytes = 8 * WIDTH * len(self._locals)
        parts = [words[:num_bytes] for words in now.words[turn]]
        heard_RW = pass_on(told_RW, parts, stage)
        return self.settle(heard_RW, offer, Came(turn, bases), stage)

    def settle(
        self, heard_RW: np.ndarray, offer: Offer, came: Came, stage: str
    ) -> tuple[np.ndarray, Offer]:
        """The messages of all ranks, without the words before them, and this rank's offer with what
        came of it. Raises if a rank has given up the call.
        """
        states = heard_RW[:, STATE].tolist()
        if WITHDRAWN in states:
            who = states.index(WITHDRAWN)
            what = f"{stage}: rank {who} gave up the call, on rank {self._rank}"
            raise PeerLeft(what, ranks=(who,), stage=stage)
        self._grow(heard_RW, stage)
        all_enclose, all_offer = set(states) == {ENCLOSES}, set(states) == {OFFERS}
        return heard_RW[:, BEFORE:], Offer(
            offer.words,
            offer.blocks,
            None,
            came if all_enclose else None,
            not all_enclose and not all_offer,
        )

    def take_rows(self, came: Came, columns: Sequence[Tensor], flow: Flow, stage: str) -> None:
        """Take this rank's rows from the parcels of all ranks, into columns of results."""
        tokens_R = np.ascontiguousarray(flow.tokens_R)
        stray = int(tokens_R.argmax())
        if self.num_bytes(int(tokens_R[stray]), sum(row_widths(columns))) <= self.staging.enclosed:
            stray = self._kernels.take_parcels(
                self.staging.parcels[came.turn],
                tokens_R,
                np.array(flow.recv_counts, np.int64),
                len(self._locals),
                self._place,
                columns,
            )
        if stray >= 0:
            raise self.stray(stray, stage)

    def stray(self, rank: int, stage: str) -> PeerError:
        """The error about a rank whose message cannot be."""
        what = f"{stage}: rank {rank} enclosed what no rank encloses, on rank {self._rank}"
        return PeerError(what, ranks=(rank,), stage=stage)

    def marks(self, came: Came, marks_TR: np.ndarray, flow: Flow) -> KnownMarks:
        """Who gets each token that this rank's node gets, from the parcels of all ranks."""
        each = -(-len(self._locals) // 8)
        parcels = self.staging.parcels[came.turn].tolist()
        bits_R = [
            np.frombuffer(ctypes.string_at(parcel, each * num), np.uint8)
            for parcel, num in zip(parcels, flow.tokens_R.tolist())
        ]
        return KnownMarks(marks_TR, bits_R, self._topology, self._rank)

    def add_up(self, came: Came, sums: Sequence[Sum], path: TwoLevelRoute) -> None:
        """Add up the sums that other nodes enclosed, the rows of this node, and the biases."""
        widths = row_widths([one.rows_ND for one in sums])
        rail = self._links.numbers.index(self._links.own)
        received = self.staging.received[came.turn][rail].data_ptr() + self.words[self._home]
        begin_of_node, hops = self.staging.begin_of_node, path.hops
        for place, (one, width) in enumerate(zip(sums, widths)):
            bases_H = np.zeros(len(hops.node_of_hop), np.int64)
            bases_H[hops.own] = came.bases[place] + path.starts * width
            for node, hop in enumerate(hops.hop_of_node):
                if hop >= 0:
                    begins = column_offsets(hops.route.send_counts[hop], widths)
                    bases_H[hop] = received + begin_of_node[node] + begins[place]
            self._kernels.reduce_at(
                bases_H, hops.route, hops.node_of_hop, one.biases_TD, one.out_TD
            )

    def has_room(self, enclosed: int, staged: int) -> bool:
        """Whether a call may enclose and stage so many bytes. If not by now, the other ranks hear
        that this one would like to, unless that is too much at all.
        """
        if enclosed > self.most_enclosed or staged > _MOST_STAGED:
            return False
        self.wanted = (max(enclosed, 1), max(staged, 1))
        now = self.staging
        return now.is_shared and enclosed <= now.enclosed and staged <= now.staged

    def _fill_own(self, rows: EnclosedRows, turn: int) -> None:
        """Leave this rank's parcel for its own node in its staging."""
        parcel = int(self.staging.staged_at[turn][self._place])
        ranks = self._ranks_of_node[self._home]
        self._kernels.fill_parcel(rows.columns, rows.is_token_in_rank_TR, ranks, parcel)

    def _stage(self, back: EnclosedSums | None, turn: int) -> list[np.ndarray]:
        """Stage the rows of a combine, and find those of the neighbours: by column, where each
        local rank's rows begin. [] if not all have staged theirs.
        """
        now = self.staging
        if not now.is_shared:
            return []
        headers = [header(at) for at in now.staged_at[turn].tolist()]
        mine = headers[self._place]
        if back is None:
            mine[0] = -1
            if len(headers) > 1:
                self._node.mailbox.meet_soon(STAGED, self.calls, 0)
            return []
        rows = [one.rows_ND for one in back.sums]
        widths, num_rows = row_widths(rows), back.handle.flow.num_received
        begins = column_offsets(num_rows, widths)
        mine[:] = [back.handle.call, len(rows)] + [0] * (HEADER - 2)
        mine[2 : 2 + len(rows)] = widths
        mine[4 : 4 + len(rows)] = begins[: len(rows)]
        if len(headers) > 1:
            own = int(now.staged_at[turn][self._place]) + 8 * HEADER
            for column, begin, width in zip(rows, begins, widths):
                ctypes.memmove(own + begin, column.data_ptr(), num_rows * width)
            if not self._node.mailbox.meet_soon(STAGED, self.calls, now.soon):
                return []
        if any(one[:4].tolist() != mine[:4].tolist() for one in headers):
            return []
        bases = []
        for place, column in enumerate(rows):
            starts = [8 * HEADER + int(one[4 + place]) for one in headers]
            bases_L = now.staged_at[turn] + np.array(starts, np.int64)
            bases_L[self._place] = column.data_ptr()
            bases.append(bases_L)
        return bases

    def _fill(
        self,
        rail: int,
        space: Tensor,
        told_RW: np.ndarray,
        enclosed: EnclosedRows | EnclosedSums | None,
        bases: list[np.ndarray],
    ) -> Message:
        """The messages of this rank on a rail. Words go on the rank's own rail, sums back on the
        rail of their tokens.
        """
        num_nodes = self._topology.num_nodes
        counts, rows, at = [0] * num_nodes, [0] * num_nodes, 0
        relays = {}
        if isinstance(enclosed, EnclosedSums):
            relays = {one.node: one for one in enclosed.path.relays[rail]}
        for node, words in enumerate(self.words):
            if node == self._home:
                continue
            message = space[at:]
            size = 0
            if rail == self._links.own:
                told = np.ascontiguousarray(told_RW[self._ranks_of_node[node]])
                ctypes.memmove(message.data_ptr(), told.ctypes.data, told.nbytes)
                size = words
                if isinstance(enclosed, EnclosedRows):
                    columns, marks_TR = enclosed
                    ranks = self._ranks_of_node[node]
                    parcel = message.data_ptr() + words
                    num_records = self._kernels.fill_parcel(columns, marks_TR, ranks, parcel)
                    rows[node] = num_records * sum(row_widths(columns))
                    size = words + _first_record(len(marks_TR), len(ranks)) + rows[node]
            if node in relays and isinstance(enclosed, EnclosedSums):
                size = words + self._sum_for(relays[node], enclosed.sums, bases, message[words:])
                widths = row_widths([one.rows_ND for one in enclosed.sums])
                rows[node] = int(relays[node].before[-1]) * sum(widths)
            counts[node] = round_up(size, LINE)
            at += counts[node]
        return Message(space[:at, None], counts, rows)

    def _sum_for(
        self, relay: Relay, sums: Sequence[Sum], bases: list[np.ndarray], out: Tensor
    ) -> int:
        """Sum this node's rows for a partner's tokens, and round. Returns the number of bytes."""
        num_rows = int(relay.before[-1])
        widths = row_widths([one.rows_ND for one in sums])
        begins = column_offsets(num_rows, widths)
        for one, bases_L, width, begin in zip(sums, bases, widths, begins):
            part = out[begin : begin + num_rows * width].view(one.rows_ND.dtype)
            self._kernels.reduce_at(
                bases_L + relay.starts * width,
                relay.route,
                [0] * len(bases_L),
                (),
                part.view(num_rows, one.rows_ND.shape[1]),
            )
        return begins[-1]

    def num_bytes(self, num_tokens: int, width: int) -> int:
        """The most bytes that a parcel of so many tokens has, whose rows have so many."""
        return _first_record(num_tokens, self._most_ranks) + num_tokens * width

    def _grow(self, heard_RW: np.ndarray, stage: str) -> None:
        """Make room for what ranks would like to enclose. All ranks of all nodes do so at once."""
        now = self.staging
        wants, wants_staged = heard_RW[:, WANTS_ENCLOSED_AT:BEFORE].max(0).tolist()
        enclosed, staged = now.enclosed, now.staged
        if wants > enclosed:
            enclosed = min(self.most_enclosed, max(_LEAST, 1 << (wants - 1).bit_length()))
        if wants_staged > staged:
            staged = min(_MOST_STAGED, max(_LEAST, 1 << (wants_staged - 1).bit_length()))
        if (enclosed, staged) != (now.enclosed, now.staged):
            self.staging = Staging(
                self._node, self._topology, self._rank, self.words, enclosed, staged, stage
            )


def most_staging(topology: Topology, rank: int, parcel_bytes: int, row_bytes: int) -> int:
    """The most bytes that a rank's staging takes for parcels and rows for a combine of so many.

    What it outgrew stays with the node, and each one was at most half of the next in what grew.
    """
    if parcel_bytes > MOST_ENCLOSED and row_bytes > MOST_ENCLOSED:
        return 0  # rows travel after the agreement, through a stream
    enclosed = min(MOST_ENCLOSED, max(_LEAST, 1 << (parcel_bytes - 1).bit_length()))
    most = max(parcel_bytes, row_bytes)
    staged = min(_MOST_STAGED, max(_LEAST, 1 << (most - 1).bit_length()))
    members = topology.ranks_of_node[topology.node_of_rank[rank]]
    words = round_up(8 * WIDTH * len(members), LINE)
    rails = max(len(topology.rails_of(one)) for one in members)
    turn = staged + rails * (topology.num_nodes - 1) * (words + enclosed)
    return 2 * 2 * turn


def _first_record(num_tokens: int, num_ranks: int) -> int:
    """Where records begin in a parcel."""
    return round_up(num_tokens * -(-num_ranks // 8), LINE)
