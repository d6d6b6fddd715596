"""Rows through any engine that has an all-to-all: gloo, NCCL, MPI, or threads of one process.

All columns of a row are packed into one record, and one all-to-all of bytes moves the records.
Choose it between machines, and wherever ranks share no memory. It copies every row twice (into and
out of the records) besides what the engine itself does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tokenyard import memory
from tokenyard.memory import as_bytes
from tokenyard.transports.base import Communicator, PackKernel
from tokenyard.types import Route


class CollectiveTransport:
    def __init__(self, communicator: Communicator, kernels: PackKernel) -> None:
        self._communicator = communicator
        self._kernels = kernels
        self.rank, self.size = communicator.rank, communicator.size
        self.name = f"collective over {communicator.name}"

    def exchange(self, message_RM: Tensor, stage: str) -> Tensor:
        one_each = [1] * self.size
        answer_RM = torch.zeros_like(message_RM)
        self._communicator.all_to_all(
            as_bytes(answer_RM), as_bytes(message_RM), one_each, one_each, stage
        )
        return answer_RM

    def send(
        self,
        columns: Sequence[Tensor],
        route: Route,
        recv_counts: Sequence[int],
        num_rows: int,
        stage: str,
    ) -> list[Tensor]:
        sent = self._pack(columns, route.send_token)
        arrived = memory.empty(sum(recv_counts), sent.shape[1])
        self._communicator.all_to_all(arrived, sent, recv_counts, route.send_counts, stage)
        return self._unpack(arrived, columns, num_rows)

    @contextmanager
    def give_back(
        self,
        columns: Sequence[Tensor],
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        stage: str,
    ) -> Iterator[list[list[Tensor]]]:
        sent = columns[0] if len(columns) == 1 else self._pack(columns, None)
        arrived = memory.empty(sum(send_counts), sent.shape[1])
        self._communicator.all_to_all(arrived, sent, send_counts, recv_counts, stage)
        back = self._unpack(arrived, columns, len(arrived))
        yield [list(column.split(list(send_counts))) for column in back]

    def empty(self, num_rows: int, num_bytes: int) -> Tensor:
        return memory.empty(num_rows, num_bytes)

    def close(self) -> None:
        self._communicator.close()

    def _pack(self, columns: Sequence[Tensor], index_N: Tensor | None) -> Tensor:
        num_rows = len(columns[0] if index_N is None else index_N)
        records = memory.empty(num_rows, sum(column.shape[1] for column in columns))
        for column, part in zip(columns, self._parts(records, columns)):
            self._kernels.pack(column, index_N, part)
        return records

    def _unpack(self, records: Tensor, like: Sequence[Tensor], num_rows: int) -> list[Tensor]:
        if len(like) == 1 and num_rows == len(records):
            return [records]  # a single column is its own record
        columns = []
        for column, part in zip(like, self._parts(records, like)):
            out = memory.empty(num_rows, column.shape[1])
            self._kernels.pack(part, None, out[: len(records)])
            columns.append(out)
        return columns

    @staticmethod
    def _parts(records: Tensor, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return records.split([column.shape[1] for column in columns], dim=1)
