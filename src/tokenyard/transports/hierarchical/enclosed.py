"""Few rows travel with the words of the agreement: one round over the network instead of three.

A rank whose rows are few encloses them with its message to each other node, and says so in it. So
all ranks hear which of them did. If all did, every rank takes its rows from what its node got, and
the call is over. If one did not, what came is ignored, and all ranks go on with the general rounds.

What comes from other nodes lands in memory that the node shares, the *staging*, so the ranks of the
node read it there. In a dispatch a message to a node encloses a parcel
(`kernels.numba.between_nodes.parcels`); a rank's parcel for its own node lies in its staging too.
In a combine a rank stages its rows, and the rank that passed tokens on encloses their sums. That
needs the rows of its neighbours before the agreement: it waits for them a moment only, and encloses
nothing if they do not come.

Staging has two turns, used by one call after the other. A rank writes a turn again after all ranks
of the node have begun the call in between, and so have ended the one before it. Its size follows
from what ranks wanted to enclose, which all ranks hear: so all know how much the others can take.

The steps of a call are compiled, and read a table (`steps`). The engine's calls have one table
here; those of `engine.nodes` have one for each shape.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import PeerError, PeerLeft
from tokenyard.kernels.base import RowSteps, SharingKernels, Step, SumSteps
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.shm.mailbox import SignalKernels
from tokenyard.shm.node import SharedNode
from tokenyard.topology import Topology
from tokenyard.transports.base import Offer, RowsOut, Sum
from tokenyard.transports.hierarchical.enclosed_steps import EnclosedSteps
from tokenyard.transports.hierarchical.links import Links
from tokenyard.transports.hierarchical.route import KnownMarks
from tokenyard.types import round_up
from tokenyard.wire import int64s
from tokenyard.wire import nodes_table as at
from tokenyard.wire.columns import LINE, column_offsets, row_widths
from tokenyard.wire.verdicts import LOW

MOST_ENCLOSED = 2 << 20  # bytes of rows that a message to a node may enclose
MOST_SUMS = 1 << 19  # of these, bytes of sums: above, summing while chunks travel is quicker
_MOST_STAGED = 8 << 20  # bytes of rows that a rank may stage for its neighbours
_MOST_RECEIVED = 16 << 20  # bytes that a rank may get with all messages of a call
_LEAST = 1 << 14  # bytes of staging, if there is any


class ParcelKernels(SharingKernels, SignalKernels, Protocol):
    def nodes_rows(self, table: int) -> RowSteps: ...

    def nodes_sums(self, dtypes: Sequence[torch.dtype], table: int) -> SumSteps: ...


class EnclosedRows(NamedTuple):
    """The rows of a dispatch."""

    columns: Sequence[Tensor]
    is_token_in_rank_TR: Tensor


class EnclosedSums(NamedTuple):
    """The rows of a combine."""

    sums: Sequence[Sum]
    handle: Handle


class Came(NamedTuple):
    """What all ranks enclosed in a call."""

    table: array[int]
    steps: Any  # RowSteps or SumSteps, which read the table
    arrived: Sequence[Tensor] | None = None  # the rows, once they are taken


class Enclosures:
    def __init__(
        self,
        node: SharedNode,
        links: Links,
        topology: Topology,
        rank: int,
        kernels: ParcelKernels,
    ) -> None:
        self._topology, self._rank, self._kernels = topology, rank, kernels
        self._locals = topology.ranks_of_node[topology.node_of_rank[rank]]
        self._partners = [source for _, source in topology.upstream(rank)]
        most = max(map(topology.num_upstream, range(topology.num_ranks)))
        self.most_enclosed = min(MOST_ENCLOSED, _MOST_RECEIVED // max(1, most)) // LINE * LINE
        self._most_ranks = max(map(len, topology.ranks_of_node))
        self.steps = EnclosedSteps(node, links, topology, rank)
        self._table, self._scratch = self.steps.table(0)
        self._of_rows: RowSteps | None = None
        self._of_sums: dict[tuple[torch.dtype, ...], SumSteps] = {}

    def of_rows(self, columns: Sequence[Tensor], is_token_in_rank_TR: Tensor) -> Offer | None:
        """An offer of a dispatch that encloses its rows, if there is room for them by now."""
        num_bytes = self.num_bytes(is_token_in_rank_TR.shape[0], sum(row_widths(columns)))
        if not self.has_room(num_bytes, num_bytes):
            return None
        return Offer(enclosed=EnclosedRows(columns, is_token_in_rank_TR))

    def of_sums(self, sums: Sequence[Sum], handle: Handle) -> Offer | None:
        """An offer of a combine that encloses its sums, if there is room for them by now."""
        rows = [one.rows_ND for one in sums]
        known: KnownMarks = handle.flow.two_level
        enclosed, staged = self.sizes(known.tally_FR, handle.flow.num_received, row_widths(rows))
        if enclosed > MOST_SUMS or not self.has_room(enclosed, staged):
            return None
        return Offer(enclosed=EnclosedSums(sums, handle))

    def sizes(
        self, tally_FR: np.ndarray, num_rows: int, widths: tuple[int, ...]
    ) -> tuple[int, int]:
        """The most bytes of a combine's sums that a message encloses, and bytes that it stages."""
        # All ranks want the same where they have the same tokens: a node may get them all.
        most_records = int(tally_FR[at.CAME_RECORDS, self._partners].max(initial=0))
        enclosed = column_offsets(most_records, widths)[-1]
        return enclosed, 8 * at.HEADER + column_offsets(num_rows, widths)[-1]

    def meet(self, message_RM: np.ndarray, offer: Offer, stage: str) -> tuple[np.ndarray, Offer]:
        """Exchange messages with all ranks, and what they enclose."""
        steps, table, enclosed = self.steps, self._table, offer.enclosed
        steps.begin(table)
        rows, made = self._row_steps(), None
        meanwhile, table[at.COMES] = None, at.ENCLOSES
        sum_for: Sequence[Step] = ()
        if isinstance(enclosed, EnclosedRows):
            _write_columns(table, enclosed.columns)
            marks_TR, table[at.IS_BACK] = enclosed.is_token_in_rank_TR, False
            table[at.NUM_TOKENS], table[at.MARKS] = len(marks_TR), marks_TR.data_ptr()
            meanwhile = rows.fill_own
        elif isinstance(enclosed, EnclosedSums):
            made = self._write_sums(enclosed)
            if steps.stage(made):
                sum_for = made.sum_for
            else:
                table[at.COMES] = at.ALONE
        else:
            table[at.COMES] = at.OFFERS
            steps.stage_nothing()
        steps.told_RW[:, at.BEFORE :] = message_RM
        for step in (rows.pack, *sum_for):
            step()
        heard = steps.exchange(table, rows.relay, meanwhile, stage)
        return self.settle(heard[steps.slots_R], offer, Came(table, made or rows), stage)

    def settle(
        self, heard_RW: np.ndarray, offer: Offer, came: Came, stage: str
    ) -> tuple[np.ndarray, Offer]:
        """The messages of all ranks, without the words before them, and this rank's offer with what
        came of it. Raises if a rank has given up the call.
        """
        states = heard_RW[:, at.STATE].tolist()
        if at.WITHDRAWN in states:
            who = states.index(at.WITHDRAWN)
            what = f"{stage}: rank {who} gave up the call, on rank {self._rank}"
            raise PeerLeft(what, ranks=(who,), stage=stage)
        self._grow(heard_RW, stage)
        all_enclose, all_offer = set(states) == {at.ENCLOSES}, set(states) == {at.OFFERS}
        return heard_RW[:, at.BEFORE :], Offer(
            offer.words,
            offer.blocks,
            None,
            came if all_enclose else None,
            not all_enclose and not all_offer,
        )

    def take_rows(self, rows: RowsOut) -> tuple[list[Tensor], np.ndarray, np.ndarray]:
        """Take this rank's rows from the parcels of all ranks. Returns the columns, and the facts
        and marks of `KnownMarks`.
        """
        flow, (table, steps, _), stage = rows.flow, rows.offer.came, rows.stage
        tokens_R, counts_R = flow.tokens_R, np.array(flow.recv_counts, np.int64)
        most = self.steps.staging.enclosed
        width = sum(row_widths(rows.columns))
        for rank, (tokens, count) in enumerate(zip(tokens_R.tolist(), flow.recv_counts)):
            if tokens < 0 or count < 0 or self.num_bytes(tokens, width) > most:
                raise self.stray(rank, stage)
        arrived = [
            memory.empty(flow.num_rows, one.shape[1], dtype=one.dtype) for one in rows.columns
        ]
        tally_FR = memory.empty_array((at.FACTS + len(self._locals), len(tokens_R)), np.int64)
        tally_FR[at.CAME_TOKENS], tally_FR[at.CAME_ROWS] = tokens_R, counts_R
        num_bytes = int(tokens_R.sum()) * -(-len(self._locals) // 8)
        bits = memory.empty_array(num_bytes, np.uint8)
        table[at.TALLY], table[at.BITS] = tally_FR.ctypes.data, bits.ctypes.data
        for column, one in enumerate(arrived):
            table[at.TARGETS + column] = one.data_ptr()
        verdict = steps.take()
        if verdict:
            raise self.stray(verdict & LOW, stage)
        return arrived, tally_FR, bits

    def stray(self, rank: int, stage: str) -> PeerError:
        """The error about a rank whose message cannot be."""
        what = f"{stage}: rank {rank} enclosed what no rank encloses, on rank {self._rank}"
        return PeerError(what, ranks=(rank,), stage=stage)

    def add_up(self, came: Came, sums: Sequence[Sum]) -> None:
        """Add up the sums that other nodes enclosed, the rows of this node, and the biases."""
        table = came.table
        for column, (one, add_up) in enumerate(zip(sums, came.steps.add_up)):
            biases = np.array([bias.data_ptr() for bias in one.biases_TD], np.int64)
            table[at.NUM_BIASES], table[at.BIASES] = len(biases), biases.ctypes.data
            table[at.TARGETS + column] = one.out_TD.data_ptr()
            add_up()

    def has_room(self, enclosed: int, staged: int) -> bool:
        """Whether a call may enclose and stage so many bytes. If not by now, the other ranks hear
        that this one would like to, unless that is too much at all.
        """
        if enclosed > self.most_enclosed or staged > _MOST_STAGED:
            return False
        self.steps.wanted = (max(enclosed, 1), max(staged, 1))
        now = self.steps.staging
        return now.is_shared and enclosed <= now.enclosed and staged <= now.staged

    def num_bytes(self, num_tokens: int, width: int) -> int:
        """The most bytes that a parcel of so many tokens has, whose rows have so many."""
        return _first_record(num_tokens, self._most_ranks) + num_tokens * width

    def _row_steps(self) -> RowSteps:
        if self._of_rows is None:
            self._of_rows = self._kernels.nodes_rows(int64s.address(self._table))
        return self._of_rows

    def _write_sums(self, enclosed: EnclosedSums) -> SumSteps:
        """Write the words of a combine into the table. Returns the steps for its dtypes."""
        table, rows = self._table, [one.rows_ND for one in enclosed.sums]
        _write_columns(table, rows)
        known: KnownMarks = enclosed.handle.flow.two_level
        table[at.IS_BACK], table[at.HANDLE] = True, enclosed.handle.call
        table[at.NUM_TOKENS], table[at.MARKS] = len(known.marks_TR), known.marks_TR.ctypes.data
        table[at.TALLY], table[at.BITS] = known.tally_FR.ctypes.data, known.bits.ctypes.data
        dtypes = tuple([one.dtype for one in rows])
        steps = self._of_sums.get(dtypes)
        if steps is None:
            steps = self._kernels.nodes_sums(dtypes, int64s.address(table))
            self._of_sums[dtypes] = steps
        return steps

    def _grow(self, heard_RW: np.ndarray, stage: str) -> None:
        """Make room for what ranks would like to enclose. All ranks of all nodes do so at once."""
        now = self.steps.staging
        wants, wants_staged = heard_RW[:, at.WANTS_ENCLOSED_AT : at.BEFORE].max(0).tolist()
        enclosed, staged = now.enclosed, now.staged
        if wants > enclosed:
            enclosed = min(self.most_enclosed, max(_LEAST, 1 << (wants - 1).bit_length()))
        if wants_staged > staged:
            staged = min(_MOST_STAGED, max(_LEAST, 1 << (wants_staged - 1).bit_length()))
        if (enclosed, staged) != (now.enclosed, now.staged):
            self.steps.share(enclosed, staged, stage)


def _write_columns(table: array[int], columns: Sequence[Tensor]) -> None:
    assert len(columns) <= at.MOST_COLUMNS
    table[at.NUM_COLUMNS] = len(columns)
    for column, one in enumerate(columns):
        each = one.element_size()
        table[at.SOURCES + column] = one.data_ptr()
        table[at.WIDTHS + column] = one.shape[1] * each
        table[at.STRIDES + column] = one.stride(0) * each


def most_staging(topology: Topology, rank: int, parcel_bytes: int, row_bytes: int) -> int:
    """The most bytes that a rank's staging takes for parcels and rows for a combine of so many.

    Outgrown staging stays with the node. Sizes double, so all of it together is at most twice the
    current staging.
    """
    if parcel_bytes > MOST_ENCLOSED and row_bytes > MOST_ENCLOSED:
        return 0  # rows travel after the agreement, through a stream
    enclosed = min(MOST_ENCLOSED, max(_LEAST, 1 << (parcel_bytes - 1).bit_length()))
    most = max(parcel_bytes, row_bytes)
    staged = min(_MOST_STAGED, max(_LEAST, 1 << (most - 1).bit_length()))
    members = topology.ranks_of_node[topology.node_of_rank[rank]]
    words = round_up(8 * at.WIDTH * len(members), LINE)
    rails = max(len(topology.rails_of(one)) for one in members)
    turn = staged + rails * (topology.num_nodes - 1) * (words + enclosed)
    return 2 * 2 * turn


def _first_record(num_tokens: int, num_ranks: int) -> int:
    """Where records begin in a parcel."""
    return round_up(num_tokens * -(-num_ranks // 8), LINE)
