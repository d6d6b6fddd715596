"""Rows through any engine that has an all-to-all: gloo, NCCL, MPI, or threads of one process.

All columns of a row are packed into one record, and one all-to-all of bytes moves the records.
Choose it between machines, and wherever ranks share no memory. It copies every row twice (into and
out of the records) besides what the engine itself does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Exchange, Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.transports.base import Sum
from tokenyard.types import Config, Flow, Handle


class CollectiveTransport:
    # Words and rows go through one engine, which takes them in the order in which they come: two
    # threads would give it another order on every rank.
    moves_alone = True
    offers_memory = False

    def __init__(
        self, communicator: Communicator, kernels: RowKernels, node_of_rank: Sequence[int]
    ) -> None:
        """The communicator is the Buffer's own, and closed with it; that of the meeting in which
        ranks open a Buffer is the group's.
        """
        self._communicator = communicator
        self._kernels = kernels
        self._node_of_rank = node_of_rank
        self.rank, self.size = communicator.rank, communicator.size
        self.name = f"collective over {communicator.name}"

    def exchange(self, message_RM: np.ndarray, stage: str) -> np.ndarray:
        return self._communicator.exchange(message_RM, stage)

    def offer_rows(self, flow: Flow | None, widths: Sequence[int]) -> Sequence[int]:
        return ()

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
        arrive = [self.empty(flow.num_rows, column.shape[1], column.dtype) for column in columns]

        def move() -> None:
            parts = [as_bytes(column) for column in columns]
            sent = pack_records(self._kernels, parts, flow.route.send_token)
            outs = [as_bytes(out)[: flow.num_received] for out in arrive]
            single = len(outs) == 1  # a single column is its own record
            records = outs[0] if single else self._bytes(flow.num_received, sent.shape[1])
            counts = flow.recv_counts, flow.route.send_counts
            self._communicator.all_to_all(Exchange(records, sent, *counts, stage))
            if not single:
                unpack_records(self._kernels, records, outs)

        return arrive, move

    def offer_back(self, columns: Sequence[Tensor], flow: Flow, ready: bool) -> np.ndarray:
        return np.empty((self.size, 0), np.int64)

    def sum_back(
        self,
        sums: Sequence[Sum],
        handle: Handle,
        told_RW: np.ndarray,
        config: Config,
        stage: str,
    ) -> Move:
        flow = handle.flow

        def move() -> None:
            columns = [as_bytes(one.rows_ND)[: flow.num_received] for one in sums]
            single = len(columns) == 1
            sent = columns[0] if single else pack_records(self._kernels, columns, None)
            counts = flow.route.send_counts
            records = self._bytes(sum(counts), sent.shape[1])
            self._communicator.all_to_all(Exchange(records, sent, counts, flow.recv_counts, stage))
            back = [records]
            if not single:
                back = [self._bytes(len(records), column.shape[1]) for column in columns]
                unpack_records(self._kernels, records, back)
            for one, rows in zip(sums, back):
                self._kernels.reduce(
                    rows.view(one.out_TD.dtype).split(list(counts)),
                    flow.route,
                    self._node_of_rank,
                    one.biases_TD,
                    one.out_TD,
                )

        return move

    def empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return memory.empty(num_rows, width, dtype=dtype, device=self._communicator.device)

    def tell(self, error: PeerError) -> None:
        if error.ranks == (self.rank,):  # of others the communicator has told already
            self._communicator.report(error)

    def dead_ranks(self) -> tuple[int, ...]:
        return self._communicator.dead_ranks()

    def explain(self, stage: str, error: RuntimeError) -> PeerError:
        return self._communicator.explain(stage, error)

    def close(self) -> None:
        self._communicator.close()

    def _bytes(self, num_rows: int, width: int) -> Tensor:
        return self.empty(num_rows, width, torch.uint8)


def pack_records(kernels: RowKernels, columns: Sequence[Tensor], index_N: Tensor | None) -> Tensor:
    """Rows of byte columns [T, B] beside each other: all, or those of an index."""
    num_rows = len(columns[0] if index_N is None else index_N)
    width, device = sum(column.shape[1] for column in columns), columns[0].device
    records = memory.empty(num_rows, width, device=device)
    for column, part in zip(columns, _parts(records, columns)):
        kernels.pack(column, index_N, part)
    return records


def unpack_records(kernels: RowKernels, records: Tensor, columns: Sequence[Tensor]) -> None:
    for part, column in zip(_parts(records, columns), columns):
        kernels.pack(part, None, column)


def _parts(records: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return records.split([column.shape[1] for column in columns], dim=1)
