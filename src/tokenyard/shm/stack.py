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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokenyard.errors import SharedMemoryError
from tokenyard.shm import segment
from tokenyard.shm.processes import Gone, own_address, within
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
    have done so.
    """

    def __init__(
        self, own: Tensor, ranks: Sequence[int], lengths: Sequence[int], rank: int
    ) -> None:
        """`ranks` are those of the node, and `lengths` say how many experts each has."""
        self._own, self._ranks, self._lengths, self._rank = own, ranks, lengths, rank
        num_bytes = math.prod(own.shape[1:]) * own.element_size()
        self._stride = whole_pages(num_bytes, lengths)
        self._segment: Segment | None = None

    def write(self) -> tuple[int, ...]:
        """Copy the stack into a segment: the words by which others map it."""
        why = segment.why_not()
        if why is not None:
            raise SharedMemoryError(why)
        num_bytes = len(self._own) * self._stride
        if not num_bytes:
            return (0,) * TOLD
        self._segment = Segment(num_bytes)
        self._view(self._segment.array(), len(self._own)).copy_(self._own)
        return own_address(), *self._segment.told

    def map(self, told: Sequence[Sequence[int]]) -> Stack:
        """Map the segments of all ranks of the node, of which they have told."""
        sizes = [length * self._stride for length in self._lengths]
        total = sum(sizes)
        memory = np.empty(0, np.uint8)
        if total:
            memory = np.frombuffer(self._range(total, sizes, told), np.uint8)
        place = self._ranks.index(self._rank)
        begin = sum(sizes[:place])
        # Memory of its own for the rank's part: torch.save writes all that a tensor's storage has.
        own = self._view(memory[begin : begin + sizes[place]], self._lengths[place])
        return Stack(own, self._view(memory, sum(self._lengths)))

    def _range(self, total: int, sizes: Sequence[int], told: Sequence[Sequence[int]]) -> Any:
        huge = segment.huge_page()
        try:
            at = segment.find_place(total, huge if 0 < huge <= total else mmap.PAGESIZE)
        except OSError as error:
            raise segment.cannot(total, error) from error
        mapped = segment.keep_mapped(at, total)
        for rank, size, (process, fd, _, identity) in zip(self._ranks, sizes, told):
            try:
                if rank == self._rank and self._segment is not None:
                    segment.map_at(at, self._segment.fd, size, is_own=True)
                elif size:
                    wait = within(_ANSWERS)

                    def read_only(fd: int, at: int = at, size: int = size) -> None:
                        segment.map_at(at, fd, size, is_own=False)

                    segment.with_descriptor(process, fd, size, identity, wait, read_only)
            except (OSError, SharedMemoryError) as error:
                gone = isinstance(error, (Gone, TimeoutError, SharedMemoryError))
                why = error if gone else segment.cannot(size, error)
                what = f"it cannot map the stack of rank {rank}: {why}"
                raise SharedMemoryError(what) from error
            at += size
        return mapped

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
            flat = torch.from_numpy(memory).view(kind)
            return flat.as_strided(shape, (stride, *inner))


def whole_pages(num_bytes: int, lengths: Sequence[int]) -> int:
    """Bytes from one expert to the next: as few as let each rank's experts fill whole pages.

    >>> whole_pages(8192, [3, 5]), whole_pages(512, [8, 16]), whole_pages(12, [1, 2])
    (8192, 512, 4096)
    """
    return round_up(num_bytes, mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, *lengths))
