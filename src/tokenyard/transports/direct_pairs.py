"""Rows by expert between ranks that share memory: each pair's row is written once, to its place.

A rank's block has the rows of its experts' pairs first, and after them, by (source rank, token),
what the way back needs to know of each token. All ranks know how many pairs every expert gets from
whom, so a sender can tell where each of its rows belongs.

Combine moves nothing. Experts' rows that lie in shared memory are read there, by the rank that
sums. Otherwise the experts' rank has summed its share of each token into shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import gt
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from tokenyard.comm.base import Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.shm import shared_rows
from tokenyard.shm.mailbox import SignalKernels
from tokenyard.shm.node import SharedNode
from tokenyard.shm.shared_rows import Room
from tokenyard.transports.base import Offer
from tokenyard.types import Flow, Route, SentPairs
from tokenyard.wire.columns import column_offsets, row_widths
from tokenyard.wire.pairs import SHARES, UNWEIGHED
from tokenyard.wire.signals import READ, ROWS


class PairKernels(RowKernels, SignalKernels, Protocol):
    def place_pairs(
        self, topk_idx_TK: Tensor, rank_of_expert_E: Tensor, first_E: np.ndarray
    ) -> tuple[Tensor, Tensor]: ...

    def scatter_by_expert(
        self, columns: Sequence[Tensor], sent: SentPairs, blocks_R: np.ndarray
    ) -> None: ...

    def scatter(
        self,
        columns: Sequence[Tensor],
        route: Route,
        blocks_R: np.ndarray,
        starts_R: np.ndarray,
        rows_R: np.ndarray,
    ) -> None: ...

    def reduce_by_expert(
        self,
        bases_R: np.ndarray,
        kinds_R: np.ndarray,
        route: Route,
        sent: SentPairs,
        node_of_rank: Sequence[int],
        out_TD: Tensor,
    ) -> None: ...


class PairsOut(NamedTuple):
    """The rows of a dispatch by expert, once all ranks have agreed on it."""

    pairs: Sequence[Tensor]  # [T, D] each; every pair gets a row
    rows: Sequence[Tensor]  # [T, D] each; every rank that gets the token gets a row
    flow: Flow
    sent_RR: np.ndarray  # int64, tokens from rank i to rank j
    sent: SentPairs
    offer: Offer  # this rank's
    told_RW: np.ndarray  # what every rank offered
    stage: str


class PairsBack(NamedTuple):
    """The rows of a combine by expert, once all ranks have agreed on it."""

    rows: Tensor  # [M, D] of this rank's pairs, or [N, D] its shares
    flow: Flow
    sent: SentPairs
    told_RW: np.ndarray  # what every rank offered
    out_TD: Tensor
    stage: str


class DirectPairs:
    def __init__(self, node: SharedNode, kernels: PairKernels, node_of_rank: Sequence[int]) -> None:
        self._node, self._kernels, self._node_of_rank = node, kernels, node_of_rank
        self.rank, self.size = node.rank, node.size
        self._room = Room(node.pool)  # for what dispatches by expert bring

    def offer(self) -> Offer:
        block = self._room.offer()
        return Offer(block.told, (block,))

    def place(
        self, topk_idx_TK: Tensor, rank_of_expert_E: Tensor, first_E: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The row of each pair on its expert's rank, and that rank; -1 where there is no expert."""
        return self._kernels.place_pairs(topk_idx_TK, rank_of_expert_E, first_E)

    def send(self, out: PairsOut) -> tuple[list[Tensor], list[Tensor], Move]:
        """Where the rows of both kinds of columns arrive, and the move that brings them."""
        flow, stage, widths = out.flow, out.stage, row_widths(out.pairs)
        rows_R = out.sent_RR.sum(0)
        begins_R = [column_offsets(num, widths)[-1] for num in out.sent.rows_R.tolist()]
        lengths = [column_offsets(num, row_widths(out.rows))[-1] for num in rows_R.tolist()]
        needed_R = [begin + length for begin, length in zip(begins_R, lengths)]
        needed = needed_R[self.rank]
        self._room.learn(needed)
        (block,) = out.offer.take_blocks()
        told_R3 = out.told_RW[:, :3]
        if any(map(gt, needed_R, told_R3[:, 1].tolist())):
            if block.error is not None or needed > block.told[1]:
                del block  # so that its memory can be taken again
                block = shared_rows.take(self._node.pool, needed)
            told_R3 = self._node.mailbox.exchange(np.tile(block.told, (self.size, 1)), stage)
            shared_rows.check(told_R3[:, :1], [block.error], stage, self.rank)
        for rank, (needed, size) in enumerate(zip(needed_R, told_R3[:, 1].tolist())):
            if flow.route.send_counts[rank] and not 0 <= needed <= size:
                raise self.stray(rank, stage)
        blocks_R, mapped = self._node.map_blocks(told_R3, flow.route.send_counts, block, stage)
        later_R = np.where(blocks_R > 0, blocks_R + np.array(begins_R), 0)
        starts_R = out.sent_RR[: self.rank].sum(0)

        def move(held: Any = (block, mapped)) -> None:
            # `held` lives until all ranks have written, even if nobody wants the result any more.
            self._kernels.scatter_by_expert(out.pairs, out.sent, blocks_R)
            self._kernels.scatter(out.rows, flow.route, later_R, starts_R, rows_R)
            self._node.mailbox.meet(ROWS, stage)

        num_pairs = int(out.sent.rows_R[self.rank])
        begins = column_offsets(num_pairs, widths)
        pairs = shared_rows.views(block, begins, num_pairs, out.pairs)
        begins = [begins[-1] + at for at in column_offsets(flow.num_rows, row_widths(out.rows))]
        return pairs, shared_rows.views(block, begins, flow.num_rows, out.rows), move

    def stray(self, rank: int, stage: str) -> PeerError:
        """The error if what a rank told would become a place outside a segment."""
        return self._node.liveness.stray(rank, stage)

    def lies_here(self, y_MD: Tensor) -> bool:
        """Whether other ranks can read these rows where they lie."""
        return self._node.pool.find(y_MD.data_ptr(), y_MD.nbytes) is not None

    def offer_back(self, rows: Tensor, kind: int, flow: Flow) -> Offer:
        """Of rows in shared memory: their kind, what names the segment, and where they begin."""
        segment = self._node.pool.find(rows.data_ptr(), rows.nbytes)
        words_RW = np.zeros((self.size, 5), np.int64)
        words_RW[:, 0] = kind
        if segment is not None:  # else there are no rows, and nobody reads any
            words_RW[:, 1:] = *segment.told, rows.data_ptr() - segment.address
        if kind == SHARES:
            before_R = list(accumulate(flow.recv_counts, initial=0))[:-1]
            words_RW[:, 4] += np.array(before_R) * rows.shape[1] * rows.element_size()
        return Offer(words_RW)

    def sum_back(self, back: PairsBack) -> Move:
        """Each token's sum of all ranks' rows."""
        flow, stage, rows = back.flow, back.stage, back.rows
        width = rows.shape[1] * rows.element_size()
        bases, held = [0] * self.size, []
        kinds = back.told_RW[:, 0].tolist()
        for rank, (kind, *told, begin) in enumerate(back.told_RW[:, :5].tolist()):
            count = flow.route.send_counts[rank]
            if not SHARES <= kind <= UNWEIGHED:
                raise self.stray(rank, stage)
            if rank == self.rank:
                own = sum(flow.recv_counts[:rank]) if kind == SHARES else 0
                bases[rank] = rows.data_ptr() + own * width
            elif count:
                num_rows = count if kind == SHARES else int(back.sent.rows_R[rank])
                size = num_rows * width
                mapped = self._node.attached.memory_at(rank, told, begin, size, stage)
                held.append(mapped)
                bases[rank] = mapped.address

        def move(held: Any = held) -> None:
            self._kernels.reduce_by_expert(
                np.array(bases, np.int64),
                np.array(kinds, np.int64),
                flow.route,
                back.sent,
                self._node_of_rank,
                back.out_TD,
            )
            # The rows are the user's again after this, so all must have read them.
            self._node.mailbox.meet(READ, stage)

        return move
