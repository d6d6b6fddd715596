"""Stacks of experts that the ranks of a node share: each process has those of all, side by side, as
one tensor.

A rank's stack lies in a segment of its own, which its owner alone can write to. Every process of
the node maps the segments of all ranks into one range of addresses. A segment lives as long as some
process maps it, so the others still read what a rank has left that died.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.shm import segment
from tokenyard.shm.processes import own_address, within
from tokenyard.shm.segment import Segment
from tokenyard.types import round_up

TOLD = 4  # int64s that a rank tells of its stack
_ANSWERS = 10.0  # seconds in which a rank must give a descriptor, where it is asked for one


class Stack(NamedTuple):
    """What `Buffer.share_stack` returns. The memory lives as long as one of its tensors does."""

    own: Tensor  # [L, ...] this rank's, which it may write to
    node: Tensor  # [E, ...] of all ranks of the node, ranks ascending: only to be read


class Making:
    """A stack on its way into shared memory: `write`, tell the others, `map`, and `close` when all
    have done so. Raises SharedMemoryError.
    """

    stack: Stack  # in the end

    def __init__(self, own: Tensor, lengths: dict[int, int], rank: int) -> None:
        """`lengths` says how many experts each rank of the node has."""
        self._own, self._lengths, self._rank = own, lengths, rank
        num_bytes = math.prod(own.shape[1:]) * own.element_size()
        self._stride = whole_pages(num_bytes, *lengths.values())
        self._segment: Segment | None = None

    def write(self) -> Sequence[int]:
        """Copy the stack into a segment: the words by which others map it."""
        if why := segment.why_not():
            raise SharedMemoryError(why)
        if not (num_bytes := len(self._own) * self._stride):
            return ()
        self._segment = Segment(num_bytes)
        self._view(self._segment.array(), len(self._own)).copy_(self._own)
        return own_address(), *self._segment.told

    def map(self, told: Sequence[Sequence[int]]) -> Sequence[int]:
        """Map the segments of the node's ranks, of which all have told. Nothing is to be told."""
        total, huge = sum(self._lengths.values()), segment.huge_page()
        memory, own, at = np.empty(0, np.uint8), slice(0), 0
        if num_bytes := total * self._stride:
            try:
                step = huge if 0 < huge <= num_bytes else mmap.PAGESIZE
                begin = segment.find_place(num_bytes, step)
            except OSError as error:
                raise segment.cannot(num_bytes, error) from error
            memory = np.frombuffer(segment.keep_mapped(begin, num_bytes), np.uint8)
            for rank, length in self._lengths.items():
                size = length * self._stride
                if rank == self._rank:
                    own = slice(at, at + size)
                if size:
                    self._map_part(begin + at, size, rank, told[rank])
                at += size
        # Memory of its own for the rank's part: torch.save writes all that a tensor's storage has.
        self.stack = Stack(self._view(memory[own], len(self._own)), self._view(memory, total))
        return ()

    def _map_part(self, place: int, size: int, rank: int, told: Sequence[int]) -> None:
        process, fd, _, identity = told
        try:
            if self._segment is not None and rank == self._rank:
                segment.map_at(place, self._segment.fd, size, is_own=True)
            else:
                segment.attach(process, fd, size, identity, within(_ANSWERS), place)
        except (OSError, SharedMemoryError) as error:
            what = f"it cannot map the stack of rank {rank}: {error}"
            raise SharedMemoryError(what) from error

    def close(self) -> None:
        """Nobody maps this rank's segment any more. Existing mappings keep its memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _view(self, memory: np.ndarray, length: int) -> Tensor:
        kind, shape = self._own.dtype, (length, *self._own.shape[1:])
        plain, *inner = torch.empty(shape, dtype=kind, device="meta").stride()
        stride = self._stride // kind.itemsize if length > 1 else plain
        with torch.inference_mode(self._own.is_inference()):  # what is made so cannot be trained
            if not memory.size:
                return torch.empty(shape, dtype=kind, device="cpu")
            return torch.from_numpy(memory).view(kind).as_strided(shape, (stride, *inner))


def whole_pages(num_bytes: int, *lengths: int) -> int:
    """Bytes from one expert to the next: as few as let each rank's experts fill whole pages.

    >>> whole_pages(8192, 3, 5), whole_pages(512, 8, 16), whole_pages(12, 1, 2)
    (8192, 512, 4096)
    """
    return round_up(num_bytes, mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, *lengths))
