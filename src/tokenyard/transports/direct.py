"""Ranks that share memory write each row where it belongs in the receiver's: one copy.

The receiver owns placement. With its words of the agreement it names a segment, as large as its
largest dispatch of late needed (`Room`). Once counts are known every rank can tell whose segment
has room. If one has none, all ranks name segments that fit in a second round. Columns lie in a
segment one after the other, each from a new cache line. Senders write, then signal. The user gets
what was received where it lies, and the segment is used again once those tensors have died. Combine
moves nothing: rows that lie in shared memory already, or are copied there, are read by the ranks
that sum them.

It is the default where all ranks share a machine. It takes memory for every result in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import le
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tokenyard.comm.base import Move
from tokenyard.shm import shared_rows
from tokenyard.shm.node import SharedNode
from tokenyard.shm.shared_rows import Room, SharedRows
from tokenyard.transports.base import Offer, RowsBack, RowsOut, SharedMemoryTransport
from tokenyard.transports.direct_pairs import DirectPairs, PairKernels
from tokenyard.types import Flow, Route
from tokenyard.wire.columns import column_offsets, row_widths
from tokenyard.wire.signals import READ, ROWS


class DirectKernels(PairKernels, Protocol):
    def list_by_lane(self, route: Route, topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> None: ...

    def reduce_at(
        self,
        addresses_R: np.ndarray,
        route: Route,
        node_of_rank: Sequence[int],
        biases_TD: Sequence[Tensor],
        out_TD: Tensor,
    ) -> None: ...


class DirectTransport(SharedMemoryTransport):
    name = "direct"
    offers_memory = True

    def __init__(
        self, node: SharedNode, kernels: DirectKernels, node_of_rank: Sequence[int]
    ) -> None:
        self.node = self._node = node
        self._kernels = kernels
        self._node_of_rank = node_of_rank
        self.rank, self.size = node.rank, node.size
        self.room = Room(node.pool)  # for what dispatches bring
        self.pairs = DirectPairs(node, kernels, node_of_rank)

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Offer:
        if flow is None:
            block = self.room.offer()
        else:
            num_bytes = column_offsets(flow.num_rows, tuple(widths))[-1]
            block = shared_rows.take(self._node.pool, num_bytes)
        return Offer(block.told, (block,))

    def send(self, rows: RowsOut) -> tuple[list[Tensor], Move]:
        columns, flow, offer, told_RW, _, stage = rows
        widths = row_widths(columns)
        offsets = column_offsets(flow.num_rows, widths)
        self.room.learn(offsets[-1])
        (block,) = offer.take_blocks()
        sent_RR, rows_R = flow.sent_RR, flow.rows_R
        if sent_RR is not None and rows_R is not None and _all_fit(rows_R, widths, told_RW[:, 1]):
            starts_R = sent_RR[: self.rank].sum(0)
        else:
            if block.error is not None or offsets[-1] > block.told[1]:
                del block  # so that its memory can be taken again
                block = shared_rows.take(self._node.pool, offsets[-1])
            told_RW = self._offer_again(block, flow, stage)
            starts_R, rows_R = told_RW[:, 3].copy(), told_RW[:, 4].copy()
            self._check_places(flow, widths, told_RW, stage)
        blocks_R, mapped = self._node.map_blocks(
            told_RW[:, :3], flow.route.send_counts, block, stage
        )

        def move(held: Any = (block, mapped)) -> None:
            # `held` lives until all ranks have written, even if nobody wants the result any more.
            self._kernels.scatter(columns, flow.route, blocks_R, starts_R, rows_R)
            self._node.mailbox.meet(ROWS, stage)

        return shared_rows.views(block, offsets, flow.num_rows, columns), move

    def _offer_again(self, block: SharedRows, flow: Flow, stage: str) -> np.ndarray:
        """Offer a block once counts are known. What all ranks tell this one is [R, 5]: the segment,
        where this rank's rows begin in each column, and how many rows there are.
        """
        message = np.empty((self.size, 5), np.int64)
        message[:] = *block.told, 0, flow.num_rows
        message[:, 3] = list(accumulate(flow.recv_counts, initial=0))[:-1]
        told_R5 = self._node.mailbox.exchange(message, stage)
        shared_rows.check(told_R5[:, :1], [block.error], stage, self.rank)
        return told_R5

    def _check_places(
        self, flow: Flow, widths: tuple[int, ...], told_R5: np.ndarray, stage: str
    ) -> None:
        """Raise if a rank told of a place outside its segment."""
        for rank, (count, told) in enumerate(zip(flow.route.send_counts, told_R5.tolist())):
            _, size, _, start, num_rows = told
            fits = column_offsets(num_rows, widths)[-1] <= size
            if count and not (0 <= start <= num_rows - count and fits):
                raise self._node.liveness.stray(rank, stage)

    def list_by_lane(self, route: Route, topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> bool:
        if any(self._node_of_rank):  # each node's rows are summed first, by rank
            return False
        self._kernels.list_by_lane(route, topk_idx_TK.contiguous(), rank_of_expert_E)
        return True

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> Offer:
        blocks, words = shared_rows.offer(self._node.pool, columns, flow.num_received, ready)
        words_RW = np.empty((self.size, len(words)), np.int64)
        words_RW[:] = words
        before_R = np.array(list(accumulate(flow.recv_counts, initial=0))[:-1], np.int64)
        for place, width in enumerate(row_widths(columns)):
            words_RW[:, 4 + 4 * place] += before_R * width
        return Offer(words_RW, blocks)

    def sum_back(self, back: RowsBack) -> Move:
        sums, told_RW, flow, stage = back.sums, back.told_RW, back.handle.flow, back.stage
        shared_rows.check_offers(told_RW, back.offer.blocks, stage, self.rank)
        own = sum(flow.recv_counts[: self.rank])
        addresses, held = [], []
        for place, one in enumerate(sums):
            told_R4 = told_RW[:, 1 + 4 * place : 5 + 4 * place].tolist()
            width = one.rows_ND.shape[1] * one.rows_ND.element_size()
            bases = [one.rows_ND.data_ptr() + own * width] * self.size
            for rank, (*told, begin) in enumerate(told_R4):
                count = flow.route.send_counts[rank]
                if count and rank != self.rank:
                    mapped = self._node.attached.memory_at(rank, told, begin, count * width, stage)
                    held.append(mapped)
                    bases[rank] = mapped.address
            addresses.append(np.array(bases, np.int64))
        all_ready = all(told_RW[:, 0].tolist())

        def move(held: Any = held) -> None:
            self._publish(back, all_ready, self._kernels)
            for one, bases_R in zip(sums, addresses):
                self._kernels.reduce_at(
                    bases_R, flow.route, self._node_of_rank, one.biases_TD, one.out_TD
                )
            # The rows are the user's again after this, so all must have read them.
            self._node.mailbox.meet(READ, stage)

        return move


def _all_fit(rows_R: np.ndarray, widths: tuple[int, ...], sizes_R: np.ndarray) -> bool:
    """Does every rank's block hold what comes to it? All ranks see the same."""
    needed = (column_offsets(num_rows, widths)[-1] for num_rows in rows_R.tolist())
    return all(map(le, needed, sizes_R.tolist()))
