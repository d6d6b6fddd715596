"""Contiguous rows at addresses, moved by granules: what both ways of the low-latency mode share.

Calls are short, so launches are few. Where rows of an expert and a source rank are moved, a program
has a block of columns of every LANES-th of them: only the device knows how many there are. Blocks
and what goes back are addresses, and may lie apart. All memory is the device's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenyard.kernels.triton.launch import blocks, power_of_two, read_first_bad, words
from tokenyard.wire.slots import Stray

_TILE = 1024  # elements of a row that are moved at once
LANES = 4  # programs that share the rows of an expert and a source


class Granules(NamedTuple):
    """Contiguous rows in granules."""

    width: int
    element: Any
    group: int
    columns: int

    @property
    def num_blocks(self) -> int:
        """One at least: programs write more than rows."""
        return max(1, blocks(self.width * self.group, self.columns))


def granules(num_bytes: int, *addresses: int) -> Granules:
    granule = math.gcd(16, num_bytes, *addresses)
    element, group, _ = words(granule)
    width = num_bytes // granule
    return Granules(width, element, group, min(_TILE, power_of_two(width * group)))


@triton.jit
def rows_from(address, ELEMENT: tl.constexpr, GROUP: tl.constexpr):
    """Rows that begin at an address, of which the compiler cannot know that it is a granule's."""
    size: tl.constexpr = ELEMENT.primitive_bitwidth // 8 * GROUP
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), size)


@triton.jit
def move_columns(write, read, width, block, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """A block of a row's columns."""
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width * GROUP
    tl.store(write + columns, tl.load(read + columns, mask=inside), mask=inside)


def check(stray: Tensor) -> None:
    """Raise if a kernel met a word that no rank writes."""
    rank = read_first_bad(stray)
    if rank >= 0:
        raise Stray(rank)
