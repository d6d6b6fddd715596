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
from tokenyard.runtime.pool import size_class
from tokenyard.shm.pool import SegmentPool, rows
from tokenyard.types import Flow
from tokenyard.wire.message import NO_MEMORY

NOTHING = (NO_MEMORY, 0, 0)  # instead of what is told of a segment


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


def fits(needed: int, size: int) -> bool:
    """Does a block of `size` bytes hold this many, without being far too large?"""
    return needed <= size <= 2 * size_class(needed)


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
    """If a rank has no memory for the rows of some column (`offer`), all raise."""
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
    raise no_memory(without, next((one for one in errors if one is not None), None), stage, rank)


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
