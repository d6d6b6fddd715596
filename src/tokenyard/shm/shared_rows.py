"""Rows in memory that ranks share: blocks of columns, and how ranks tell each other of them.

A block holds so many rows of each column, one column after the other, each from a new cache line.
A rank tells the others of a block by what names its segment (`Segment.told`). NO_MEMORY instead of
the descriptor says that the rank could not get the memory: all ranks raise once they have heard it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tokenyard.errors import SharedMemoryError, name_ranks
from tokenyard.kernels.base import RowKernels
from tokenyard.runtime.memory import as_bytes
from tokenyard.shm.pool import SegmentPool, rows
from tokenyard.shm.segment import Segment
from tokenyard.types import Flow
from tokenyard.wire.message import NO_MEMORY

NOTHING = (NO_MEMORY, 0, 0)  # instead of what is told of a segment
_WINDOW = 64  # calls; the largest result of the last one or two windows is remembered
_LITTLE = 1 << 20  # bytes of a block that may stay empty


class SharedRows(NamedTuple):
    """A block of this rank, which lives as long as `array`; or the reason why it has none.

    `array` is also None where the rows lay in shared memory already.
    """

    array: np.ndarray | None
    told: tuple[int, int, int] = NOTHING
    address: int = 0
    error: SharedMemoryError | None = None


def take(pool: SegmentPool, num_bytes: int) -> SharedRows:
    try:
        segment, array = pool.take(num_bytes)
    except SharedMemoryError as error:
        return SharedRows(None, error=error)
    return SharedRows(array, segment.told, segment.address)


class Room:
    """Blocks for results whose size this rank does not know yet: as large as the largest of the
    last 64 to 128 was, so that calls of changing sizes fit.

    Above 1 MiB, a block that is larger than the last result must lie idle already: no memory is
    taken to stay empty. If none does, somebody keeps small results in large blocks, and for a while
    blocks are as large as the last result, or the last few if those were small.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._last = self._largest = self._of_window = 0  # bytes of results
        self._calls = 0  # in this window
        self._careful = 0  # calls that take no larger block

    def take(self) -> tuple[Segment, np.ndarray]:
        """Raises SharedMemoryError."""
        if self._largest <= _LITTLE:
            return self._pool.take_small(self._largest)
        if self._careful:
            self._careful -= 1
        elif self._largest > self._last:
            found = self._pool.take_idle(self._largest, self._last)
            if found is None and self._last < self._of_window < self._largest:
                found = self._pool.take_idle(self._of_window, self._last)
            if found is not None:
                return found
            if self._of_window > self._last:
                self._careful = _WINDOW
        few = self._of_window if self._of_window <= _LITTLE else 0
        return self._pool.take_small(max(self._last, few))

    def offer(self) -> SharedRows:
        try:
            segment, array = self.take()
        except SharedMemoryError as error:
            return SharedRows(None, error=error)
        return SharedRows(array, segment.told, segment.address)

    def learn(self, num_bytes: int) -> None:
        """Note how many bytes a result had."""
        self._last = num_bytes
        if num_bytes > self._of_window:
            self._of_window = num_bytes
            if num_bytes > self._largest:
                self._largest = num_bytes
            self._pool.needed(num_bytes)
        self._calls += 1
        if self._calls == _WINDOW:
            self._largest, self._of_window, self._calls = self._of_window, 0, 0


def find_or_take(pool: SegmentPool, column: Tensor, num_rows: int) -> tuple[SharedRows, int]:
    """The block that a column's rows lie in already, and where they begin in it. Else a new block,
    to whose beginning `publish` copies them.
    """
    address, num_bytes = column.data_ptr(), num_rows * column.shape[1] * column.element_size()
    segment = pool.find(address, num_bytes)
    if segment is None:
        return take(pool, num_bytes), 0
    return SharedRows(None, segment.told, segment.address), address - segment.address


def offer(
    pool: SegmentPool, columns: Sequence[Tensor], num_rows: int, ready: bool
) -> tuple[tuple[SharedRows, ...], list[int]]:
    """So many rows of each column where other ranks can read them, and the words that say where:
    whether the rows can be read now, and for each column what names its segment, and where its rows
    begin there.
    """
    blocks, words = [], [0]
    for column in columns:
        block, begin = find_or_take(pool, column, num_rows)
        ready = ready and block.error is None and block.array is None
        blocks.append(block)
        words += *block.told, begin
    words[0] = int(ready)
    return tuple(blocks), words


def check_offers(told_RW: np.ndarray, blocks: Sequence[SharedRows], stage: str, rank: int) -> None:
    """Raise on all ranks if a rank has no memory for the rows of some column (`offer`)."""
    check(told_RW[:, 1 : 1 + 4 * len(blocks) : 4], [one.error for one in blocks], stage, rank)


def views(
    block: SharedRows, begins: Sequence[int], num_rows: int, columns: Sequence[Tensor]
) -> list[Tensor]:
    """Tensors for so many rows of columns like these, which begin there in a block."""
    return [
        rows(block.array, at, num_rows, column.shape[1], column.dtype)
        for at, column in zip(begins, columns)
    ]


def publish(rows_ND: Tensor, block: SharedRows, flow: Flow, rank: int, kernels: RowKernels) -> None:
    """Copy rows into the block that was taken for them, if one was. Rows that came from this rank
    are left out: it reads those where they are.
    """
    if block.array is None:
        return
    copy = rows(block.array, 0, flow.num_received, rows_ND.shape[1], rows_ND.dtype)
    begin = sum(flow.recv_counts[:rank])
    end = begin + flow.recv_counts[rank]
    for others in (slice(0, begin), slice(end, flow.num_received)):
        kernels.pack(as_bytes(rows_ND[others]), None, as_bytes(copy[others]))


def check(
    told_fds: np.ndarray, errors: Sequence[SharedMemoryError | None], stage: str, rank: int
) -> None:
    """If a rank has no memory for its rows, all raise. Row r has the descriptors of rank r."""
    if NO_MEMORY not in told_fds.flatten().tolist():
        return
    without = np.flatnonzero((told_fds == NO_MEMORY).any(1)).tolist()
    own = [one for one in errors if one is not None and rank in without]
    raise no_memory(without, own[0] if own else None, stage, rank)


def no_memory(
    ranks: Sequence[int], own: SharedMemoryError | None, stage: str, rank: int
) -> SharedMemoryError:
    """The error of this rank when all ranks raise because some have no memory; `own` if this is one
    of them. The Buffer goes on.
    """
    who = (
        f"{name_ranks(list(ranks))} could not get memory for {'their' * (len(ranks) > 1) or 'its'}"
    )
    error = own or SharedMemoryError(f"{stage}: {who} rows, on rank {rank}")
    error.on_all_ranks = True
    return error
