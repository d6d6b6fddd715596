"""Rows through any engine that has an all-to-all: gloo, NCCL, MPI, or threads of one process.

The sender packs all columns of a row into one record, and one all-to-all of bytes moves the
records. Choose it where ranks share no memory. It copies every row twice, into and out of the
records, besides what the engine itself copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenyard.comm.base import Communicator, Exchange, Move
from tokenyard.errors import PeerError
from tokenyard.kernels.base import RowKernels
from tokenyard.runtime import memory
from tokenyard.runtime.memory import as_bytes
from tokenyard.transports.base import CommunicatorTransport, RowsBack, RowsOut


class CollectiveTransport(CommunicatorTransport):
    # Messages and rows go through one engine, which must get them in the same order on every rank.
    # Two threads would give it another order on each.
    moves_alone = True
    tells_from_device = True

    def __init__(
        self, communicator: Communicator, kernels: RowKernels, node_of_rank: Sequence[int]
    ) -> None:
        """The communicator is closed with the transport."""
        self._communicator = communicator
        self._kernels = kernels
        self._node_of_rank = node_of_rank
        self.rank, self.size, self.device = (
            communicator.rank,
            communicator.size,
            communicator.device,
        )
        self.name = f"collective over {communicator.name}"

    def send(self, rows: RowsOut) -> tuple[list[Tensor], Move]:
        columns, flow, _, _, _, stage = rows
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

    def sum_back(self, back: RowsBack) -> Move:
        sums, flow, stage = back.sums, back.handle.flow, back.stage

        def move() -> None:
            columns = [as_bytes(one.rows_ND)[: flow.num_received] for one in sums]
            single = len(columns) == 1
            sent = columns[0] if single else pack_records(self._kernels, columns, None)
            counts = flow.route.send_counts
            records = self._bytes(sum(counts), sent.shape[1])
            self._communicator.all_to_all(Exchange(records, sent, counts, flow.recv_counts, stage))
            came = [records]
            if not single:
                came = [self._bytes(len(records), column.shape[1]) for column in columns]
                unpack_records(self._kernels, records, came)
            for one, rows in zip(sums, came):
                self._kernels.reduce(
                    rows.view(one.out_TD.dtype),
                    flow.route,
                    self._node_of_rank,
                    one.biases_TD,
                    one.out_TD,
                )

        return move

    def tell(self, error: PeerError) -> None:
        if error.ranks == (self.rank,):  # the communicator has reported other ranks already
            self._communicator.report(error)

    def _bytes(self, num_rows: int, width: int) -> Tensor:
        return self.empty(num_rows, width, torch.uint8)


def pack_records(kernels: RowKernels, columns: Sequence[Tensor], index_N: Tensor | None) -> Tensor:
    """One record for each row of the byte columns [T, B], or for each that an index names."""
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
