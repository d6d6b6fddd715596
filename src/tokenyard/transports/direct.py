"""Ranks that share memory write each row where it belongs in the receiver's: one copy.

The receiver owns placement. Once counts are known it takes a segment with room for all columns and
tells everybody where their rows begin; senders write, and signal. What was received is given to the
user as it lies; the segment is used again once those tensors have died. Combine moves nothing: rows
that lie in shared memory already, or are copied there, are read by the ranks that sum them.

The default where all ranks share a machine. It takes memory for every result in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, from_numpy

from tokenyard.errors import SharedMemoryError, name_ranks
from tokenyard.transports.base import PackKernel
from tokenyard.transports.symmetric import LINE
from tokenyard.transports.team import READ, ROWS, SignalKernels, Team
from tokenyard.types import Route, round_up


class DirectKernels(PackKernel, SignalKernels, Protocol):
    def scatter(self, x_TB: Tensor, route: Route, bases: np.ndarray) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """Rows of this rank in shared memory, kept there by `array`; or why there is none for them."""

    array: np.ndarray
    fd: int = -1
    size: int = 0
    begin: int = 0
    error: SharedMemoryError | None = None


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
        offsets = list(
            accumulate((round_up(num_rows * width, LINE) for width in widths), initial=0)
        )
        block = self._take(offsets.pop())
        message = np.empty((self.size, 3 + len(columns)), np.int64)
        message[:, :2] = block.fd, block.size
        message[:, 2] = list(accumulate(recv_counts, initial=0))[:-1]
        message[:, 3:] = offsets
        placed = self._place(message, [block], stage)
        bases = np.zeros(self.size, np.int64)  # and 0 where no rows go, so that nothing is mapped
        for rank, (fd, size) in enumerate(placed[:, :2].tolist()):
            if rank == self.rank:
                bases[rank] = block.array.__array_interface__["data"][0]
            elif route.send_counts[rank]:
                bases[rank] = self._team.memory(rank, fd, size, stage)[1]
        for place, (values, width) in enumerate(zip(columns, widths)):
            begins = bases + placed[:, 3 + place] + placed[:, 2] * width
            self._kernels.scatter(values, route, begins)
        self._team.signal(ROWS)
        self._team.wait(ROWS, stage)
        return [_rows(block.array, at, num_rows, width) for at, width in zip(offsets, widths)]

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
        blocks = [self._share(column, own) for column in columns]
        for place, (column, block) in enumerate(zip(columns, blocks)):
            message[:, 3 * place : 3 * place + 2] = block.fd, block.size
            message[:, 3 * place + 2] = block.begin + starts * column.shape[1]
        placed = self._place(message, blocks, stage).tolist()
        back = [[column[own]] * self.size for column in columns]
        for rank, told in enumerate(placed):
            for place, column in enumerate(columns):
                if rank == self.rank:
                    continue
                if not send_counts[rank]:
                    back[place][rank] = column[:0]
                    continue
                fd, size, begin = told[3 * place : 3 * place + 3]
                memory, _ = self._team.memory(rank, fd, size, stage)
                back[place][rank] = _rows(memory, begin, send_counts[rank], column.shape[1])
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

    def _take(self, num_bytes: int) -> _Block:
        try:
            segment, array = self._team.pool.take(num_bytes)
        except SharedMemoryError as error:
            return _Block(array=np.empty(0, np.uint8), error=error)
        return _Block(fd=segment.fd, size=segment.size, array=array)

    def _share(self, column: Tensor, own: slice) -> _Block:
        """These rows in shared memory: where they lie, or copied, but for those of this rank."""
        segment = self._team.pool.find(column.data_ptr(), column.numel())
        if segment is not None:
            begin = column.data_ptr() - segment.address
            return _Block(fd=segment.fd, size=segment.size, begin=begin, array=segment.array())
        block = self._take(column.numel())
        if block.error is None:
            copy = _rows(block.array, 0, *column.shape)
            for others in (slice(0, own.start), slice(own.stop, None)):
                self._kernels.pack(column[others], None, copy[others])
        return block

    def _place(self, message: np.ndarray, blocks: Sequence[_Block], stage: str) -> np.ndarray:
        """Tell all ranks where rows are or go. If a rank has no memory for them, all raise."""
        errors = [block.error for block in blocks if block.error is not None]
        if errors:
            message[:, 0] = -1
        placed = self._team.exchange(message, stage)
        if errors:
            raise errors[0]
        without = np.flatnonzero(placed[:, 0] == -1).tolist()
        if without:
            raise SharedMemoryError(
                f"{stage}: {name_ranks(without)} could not get shared memory, on rank {self.rank}"
            )
        return placed


def _rows(memory: np.ndarray, begin: int, count: int, width: int) -> Tensor:
    if count == 0:
        return torch.empty(0, width, dtype=torch.uint8)
    return from_numpy(memory[begin : begin + count * width].reshape(count, width))
