"""Rows in memory that ranks share: blocks of columns, and how ranks tell each other of them.

A block holds so many rows of each column, one column after the other, each from a new cache line.
What a rank tells of a block is that of its segment (`Segment.told`); NO_MEMORY in the first place
stands for a block that could not be had, which raises on all ranks once all have heard of it.
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
from tokenyard.types import Flow

NO_MEMORY = -1  # told instead of a file descriptor
NOTHING = (NO_MEMORY, 0, 0)  # instead of what is told of a segment


class SharedRows(NamedTuple):
    """Rows of this rank in shared memory, kept there by `array`; or why there is none for them.

    `array` is None too where the rows lay in shared memory already.
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


def find_or_take(pool: SegmentPool, column: Tensor, num_rows: int) -> tuple[SharedRows, int]:
    """The block that a column's rows lie in already, with where they begin in it, or one that they
    must be copied to (see `share`), from its beginning on.
    """
    address, num_bytes = column.data_ptr(), num_rows * column.shape[1] * column.element_size()
    segment = pool.find(address, num_bytes)
    if segment is None:
        return take(pool, num_bytes), 0
    return SharedRows(None, segment.told, segment.address), address - segment.address


def views(
    block: SharedRows, begins: Sequence[int], num_rows: int, columns: Sequence[Tensor]
) -> list[Tensor]:
    """So many rows of columns like these, where they begin in a block (see `wire.columns`)."""
    return [
        rows(block.array, at, num_rows, column.shape[1], column.dtype)
        for at, column in zip(begins, columns)
    ]


def share(rows_ND: Tensor, block: SharedRows, flow: Flow, rank: int, kernels: RowKernels) -> None:
    """Copy rows into the block that was taken for them, if one was, but for those of this rank."""
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
    """If a rank told of no memory for its rows (row r is what rank r told), all raise."""
    if NO_MEMORY not in told_fds.flatten().tolist():
        return
    without = np.flatnonzero((told_fds == NO_MEMORY).any(1)).tolist()
    raise no_memory(without, next((one for one in errors if one is not None), None), stage, rank)


def no_memory(
    ranks: Sequence[int], own: SharedMemoryError | None, stage: str, rank: int
) -> SharedMemoryError:
    """What this rank raises when all ranks raise, since some have no memory; `own` is why it has
    none itself. The Buffer goes on.
    """
    who = (
        f"{name_ranks(list(ranks))} could not get memory for {'their' * (len(ranks) > 1) or 'its'}"
    )
    error = own or SharedMemoryError(f"{stage}: {who} rows, on rank {rank}")
    error.on_all_ranks = True
    return error
