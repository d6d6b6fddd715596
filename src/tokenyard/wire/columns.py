"""Columns of rows in memory: one column after the other, each from a new cache line.

Segments, records and symmetric memory are laid out like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from tokenyard.types import round_up

LINE = 64  # bytes of a cache line: rows begin on one, and a signal has one to itself


def row_widths(columns: Sequence[Tensor]) -> tuple[int, ...]:
    """Bytes of a row of each column."""
    return tuple([column.shape[1] * column.element_size() for column in columns])


@lru_cache(maxsize=256)
def column_offsets(num_rows: int, widths: tuple[int, ...]) -> list[int]:
    """Where columns begin in a block, and where the last ends.

    >>> column_offsets(3, (100, 4, 8))
    [0, 320, 384, 448]
    """
    begins = [0]
    for width in widths:
        begins.append(begins[-1] + round_up(num_rows * width, LINE))
    return begins
