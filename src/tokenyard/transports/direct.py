"""Ranks that share memory write each row where it belongs in the receiver's: one copy.

The receiver owns placement. With the words of the agreement it names a segment, as large as its
last dispatch needed. Once counts are known every rank can tell whose segment has room; if one has
none, those that fit are named in a second round. Columns lie in a segment one after the other, each
from a new cache line; senders write, and signal. What was received is given to the user as it lies;
the segment is used again once those tensors have died. Combine moves nothing: rows that lie in
shared memory already, or are copied there, are read by the ranks that sum them.

The default where all ranks share a machine. It takes memory for every result in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.runtime.pool import size_class
from tokenyard.shm import shared_rows
from tokenyard.shm.node import READ, ROWS, SignalKernels, Team
from tokenyard.shm.shared_rows import SharedRows
from tokenyard.transports.base import Sum
from tokenyard.types import Config, Flow, Handle, Route
from tokenyard.wire.columns import column_offsets, row_widths


class DirectKernels(RowKernels, SignalKernels, Protocol):
    def scatter(
        self,
        columns: Sequence[Tensor],
        route: Route,
        blocks_R: np.ndarray,
        starts_R: np.ndarray,
        rows_R: np.ndarray,
    ) -> None: ...

    def reduce_at(
        self,
        addresses_R: np.ndarray,
        route: Route,
        node_of_rank: Sequence[int],
        biases_TD: Sequence[Tensor],
        out_TD: Tensor,
    ) -> None: ...


class DirectTransport:
    name = "direct"
    moves_alone = False
    offers_memory = True

    def __init__(self, team: Team, kernels: DirectKernels, node_of_rank: Sequence[int]) -> None:
        self._team = team
        self._kernels = kernels
        self._node_of_rank = node_of_rank
        self.rank, self.size = team.rank, team.size
        self._last_bytes = 0  # of a dispatch
        self._offered: list[SharedRows] = []

    @property
    def team(self) -> Team:
        return self._team

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        return self._team.exchange(message_RM, stage)

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Sequence[int]:
        num_bytes = (
            self._last_bytes if flow is None else column_offsets(flow.num_rows, tuple(widths))[-1]
        )
        block = shared_rows.take(self._team.pool, num_bytes)
        self._offered = [block]
        return block.told

    def learn_route(
        self, flow: Flow, is_token_in_rank_TR: Tensor, widths: Sequence[int], stage: str
    ) -> None: ...

    def send(
        self,
        columns: Sequence[Tensor],
        flow: Flow,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> tuple[list[Tensor], Move]:
        widths = row_widths(columns)
        offsets = column_offsets(flow.num_rows, widths)
        self._last_bytes = offsets[-1]
        (block,) = self._offered
        self._offered = []
        sent_RR, rows_R = flow.sent_RR, flow.rows_R
        if sent_RR is not None and rows_R is not None and _all_fit(rows_R, widths, told_RW[:, 1]):
            starts_R = sent_RR[: self.rank].sum(0)
        else:
            del block  # so that its memory can be taken again
            block = shared_rows.take(self._team.pool, offsets[-1])
            message = np.empty((self.size, 5), np.int64)
            message[:] = *block.told, 0, flow.num_rows
            message[:, 3] = list(accumulate(flow.recv_counts, initial=0))[:-1]
            told_RW = self._team.exchange(message, stage)
            shared_rows.check(told_RW[:, :1], [block.error], stage, self.rank)
            starts_R, rows_R = told_RW[:, 3].copy(), told_RW[:, 4].copy()
            for rank, count in enumerate(flow.route.send_counts):
                start, num_rows, size = (
                    int(starts_R[rank]),
                    int(rows_R[rank]),
                    int(told_RW[rank, 1]),
                )
                fits = column_offsets(num_rows, widths)[-1] <= size
                if count and not (0 <= start <= num_rows - count and fits):
                    raise self._team.stray(rank, stage)
        counts = flow.route.send_counts
        # Nothing is mapped of ranks to which no rows go.
        mapped = [
            self._team.memory(rank, told, stage) if counts[rank] and rank != self.rank else None
            for rank, told in enumerate(told_RW[:, :3].tolist())
        ]
        blocks_R = np.array([one.address if one else 0 for one in mapped], np.int64)
        blocks_R[self.rank] = block.address

        def move(held: Any = (block, mapped)) -> None:
            # `held` lives until all ranks have written, even if nobody wants the result any more.
            self._kernels.scatter(columns, flow.route, blocks_R, starts_R, rows_R)
            self._team.meet(ROWS, stage)

        return shared_rows.views(block, offsets, flow.num_rows, columns), move

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> np.ndarray:
        words_RW = np.empty((self.size, 1 + 4 * len(columns)), np.int64)
        self._offered = []
        for place, column in enumerate(columns):
            width = column.shape[1] * column.element_size()
            block, begin = shared_rows.find_or_take(self._team.pool, column, flow.num_received)
            ready = ready and block.error is None and block.array is None
            self._offered.append(block)
            starts = list(accumulate((count * width for count in flow.recv_counts), initial=begin))
            words_RW[:, 1 + 4 * place : 4 + 4 * place] = block.told
            words_RW[:, 4 + 4 * place] = starts[:-1]
        words_RW[:, 0] = ready
        return words_RW

    def sum_back(
        self,
        sums: Sequence[Sum],
        handle: Handle,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> Move:
        flow, mine = handle.flow, self._offered
        self._offered = []
        told_fds = told_RW[:, 1 : 1 + 4 * len(mine) : 4]
        shared_rows.check(told_fds, [block.error for block in mine], stage, self.rank)
        own = sum(flow.recv_counts[: self.rank])
        addresses, held = [], []
        for place, one in enumerate(sums):
            told_R4 = told_RW[:, 1 + 4 * place : 5 + 4 * place].tolist()
            width = one.rows_ND.shape[1] * one.rows_ND.element_size()
            bases = [one.rows_ND.data_ptr() + own * width] * self.size
            for rank, (*told, begin) in enumerate(told_R4):
                count = flow.route.send_counts[rank]
                if count and rank != self.rank:
                    mapped = self._team.memory_at(rank, told, begin, count * width, stage)
                    held.append(mapped)
                    bases[rank] = mapped.address
            addresses.append(np.array(bases, np.int64))
        all_ready = all(told_RW[:, 0].tolist())

        def move(held: Any = held) -> None:
            for one, block in zip(sums, mine):
                shared_rows.share(one.rows_ND, block, flow, self.rank, self._kernels)
            if not all_ready:
                self._team.meet(ROWS, stage)
            for one, bases_R in zip(sums, addresses):
                self._kernels.reduce_at(
                    bases_R, flow.route, self._node_of_rank, one.biases_TD, one.out_TD
                )
            # The rows are the user's again after this, so all must have read them.
            self._team.meet(READ, stage)

        return move

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._team.pool.rows(num_rows, width, dtype)

    def tell(self, error: PeerError) -> None:
        self._team.tell(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._team.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._team.explain(stage, error)

    def close(self) -> None:
        self._team.close()


def _all_fit(rows_R: np.ndarray, widths: tuple[int, ...], sizes_R: np.ndarray) -> bool:
    """Does every rank's block hold what comes to it, without being far too large? All ranks see
    the same.
    """
    for num_rows, size in zip(rows_R.tolist(), sizes_R.tolist()):
        needed = column_offsets(num_rows, widths)[-1]
        if not needed <= size <= 2 * size_class(needed):
            return False
    return True
