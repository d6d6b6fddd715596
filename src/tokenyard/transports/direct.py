"""Ranks that share memory write each row where it belongs in the receiver's: one copy.

The receiver owns placement. Once counts are known it takes a segment with room for all columns and
tells everybody where their rows begin; senders write, and signal. What was received is given to the
user as it lies; the segment is used again once those tensors have died. Combine moves nothing: rows
that lie in shared memory already, or are copied there, are read by the ranks that sum them.

The default where all ranks share a machine. Memory: every result in full; see `ring` to bound it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard.transports.base import PackKernel
from tokenyard.transports.team import READ, ROWS, SignalKernels, Team
from tokenyard.types import Route

_LINE = 64


class DirectKernels(PackKernel, SignalKernels, Protocol):
    def scatter(self, x_TB: Tensor, route: Route, rows_by_rank: Sequence[Tensor]) -> None: ...


class DirectTransport:
    name = "direct"

    def __init__(self, team: Team, kernels: DirectKernels) -> None:
        self._team = team
        self._kernels = kernels
        self.rank, self.size = team.rank, team.size

    def exchange(self, message_RM: Tensor, stage: str) -> Tensor:
        return from_numpy(self._team.exchange(message_RM.numpy(), stage))

    def send(
        self,
        columns: Sequence[Tensor],
        route: Route,
        recv_counts: Sequence[int],
        num_rows: int,
        stage: str,
    ) -> list[Tensor]:
        widths = [column.shape[1] for column in columns]
        offsets = list(accumulate((_aligned(num_rows * width) for width in widths), initial=0))
        segment, array = self._team.pool.take(offsets.pop())

        message = np.empty((self.size, 3 + len(columns)), np.int64)
        message[:, :2] = segment.fd, segment.size
        message[:, 2] = list(accumulate(recv_counts, initial=0))[:-1]
        message[:, 3:] = offsets
        placed = self._team.exchange(message, stage)
        targets: list[list[Tensor]] = [[] for _ in columns]
        for rank, (fd, size, start, *at) in enumerate(placed.tolist()):
            count = route.send_counts[rank]
            memory = array if rank == self.rank else self._memory(rank, fd, size, count)
            for column, width in enumerate(widths):
                begin = at[column] + start * width
                targets[column].append(_rows(memory, begin, count, width))
        for values, target in zip(columns, targets):
            self._kernels.scatter(values, route, target)
        self._team.signal(ROWS)
        self._team.wait(ROWS, stage)
        return [_rows(array, at, num_rows, width) for at, width in zip(offsets, widths)]

    @contextmanager
    def give_back(
        self,
        columns: Sequence[Tensor],
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        stage: str,
    ) -> Iterator[list[list[Tensor]]]:
        starts = np.array(list(accumulate(recv_counts, initial=0))[:-1], np.int64)
        own = slice(int(starts[self.rank]), int(starts[self.rank]) + recv_counts[self.rank])
        message = np.empty((self.size, 3 * len(columns)), np.int64)
        kept = []
        for place, column in enumerate(columns):
            fd, size, begin, array = self._share(column, own)
            kept.append(array)
            message[:, 3 * place : 3 * place + 2] = fd, size
            message[:, 3 * place + 2] = begin + starts * column.shape[1]
        placed = self._team.exchange(message, stage).tolist()
        back = [[column[own]] * self.size for column in columns]
        for rank, told in enumerate(placed):
            if rank == self.rank:
                continue
            for place, column in enumerate(columns):
                fd, size, begin = told[3 * place : 3 * place + 3]
                count = send_counts[rank]
                memory = self._memory(rank, fd, size, count)
                back[place][rank] = _rows(memory, begin, count, column.shape[1])
        try:
            yield back
        finally:
            # The rows are the user's again when this returns, so all must have read them.
            self._team.signal(READ)
            self._team.wait(READ, stage)

    def empty(self, num_rows: int, num_bytes: int) -> Tensor:
        _, array = self._team.pool.take(num_rows * num_bytes)
        return _rows(array, 0, num_rows, num_bytes)

    def close(self) -> None:
        self._team.close()

    def _share(self, column: Tensor, own: slice) -> tuple[int, int, int, np.ndarray]:
        """fd, size and offset of these rows in shared memory, and what keeps them there.

        Copied if they lie elsewhere, but for the rows that this rank itself will read.
        """
        num_bytes = column.numel()
        segment = self._team.pool.find(column.data_ptr(), num_bytes)
        if segment is not None:
            return segment.fd, segment.size, column.data_ptr() - segment.address, segment.array()
        segment, array = self._team.pool.take(num_bytes)
        copy = _rows(array, 0, *column.shape)
        for others in (slice(0, own.start), slice(own.stop, None)):
            self._kernels.pack(column[others], None, copy[others])
        return segment.fd, segment.size, 0, array

    def _memory(self, rank: int, fd: int, size: int, count: int) -> np.ndarray:
        """The segment that rank named; nothing where no rows go, so that it is not even mapped."""
        return self._team.memory(rank, fd, size) if count else np.empty(0, np.uint8)


def _rows(memory: np.ndarray, begin: int, count: int, width: int) -> Tensor:
    if count == 0:
        return torch.empty(0, width, dtype=torch.uint8)
    return from_numpy(memory[begin : begin + count * width].reshape(count, width))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE
